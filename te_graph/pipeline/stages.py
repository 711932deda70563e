"""Stages of ``torch.distributed.pipelining`` that hold graphed callables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.parallel import DistributedDataParallel


def prepare_stage(stage: Any) -> Any:
    """Let schedules that split the backward (zero bubble, DualPipeV) run that of ``stage`` as a whole.

    They ask for the gradients of a stage's inputs first and for those of its weights later. A graph has both in one
    launch, so all is done where the inputs' are due, and nothing is left for later: ``stage.dw_builder`` says so. For
    other schedules it changes nothing.

    Args:
        stage: a ``PipelineStage``, its modules graphed or about to be. Mutated.

    Returns:
        ``stage``.

    Raises:
        TypeError: it is no ``PipelineStage``.
        ValueError: it has another ``dw_builder``, or a module in it is a DistributedDataParallel, whose gradients
            such a stage would never reduce.

    Stream and capture: launches nothing.

    Source of the semantics: torch/distributed/pipelining/stage.py, ``backward_one_chunk``.
    """
    if not hasattr(stage, "dw_builder") or not hasattr(stage, "submod"):
        raise TypeError(f"prepare_stage: expected a PipelineStage, got {type(stage).__name__}")
    if stage.dw_builder not in (None, _leave_nothing):
        raise ValueError("prepare_stage: expected a stage without a dw_builder of its own, got one that has one")
    for name, module in stage.submod.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"prepare_stage: {name or 'the module of the stage'} is a DistributedDataParallel, which reduces no "
                "gradients in stages with a dw_builder: reduce them once the schedule's step is done"
            )
    stage.dw_builder = _leave_nothing
    return stage


def _leave_nothing() -> Callable[[], None]:
    return _do_nothing


def _do_nothing() -> None:
    """What is left of a backward for its weights."""
