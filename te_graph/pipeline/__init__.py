"""Stages of ``torch.distributed.pipelining`` that hold graphed callables."""

from te_graph.pipeline.stages import prepare_stage

__all__ = ["prepare_stage"]
