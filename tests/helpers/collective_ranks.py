"""What tests of collectives share: worlds of ranks, groups, captures, the reference of sums, calls of operators."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Rank
from torch import Tensor

import te_graph as tg

FOUR_GPUS = pytest.param(("cuda", 4), id="nccl-4", marks=pytest.mark.multi_gpu(4))
WORLDS = [
    pytest.param(("cpu", 1), id="gloo-1"),
    pytest.param(("cpu", 2), id="gloo-2"),
    pytest.param(("cpu", 3), id="gloo-3"),
    pytest.param(("cuda", 1), id="nccl-1", marks=pytest.mark.gpu),
    pytest.param(("cuda", 2), id="nccl-2", marks=pytest.mark.multi_gpu),
    FOUR_GPUS,
]
ops = torch.ops.te_graph
TIMEOUT = 20.0  # seconds: less than a test may take, so that a rank that waits ends with te_graph's own error


def open_group(rank: Rank, **options: Any) -> tg.PeerGroup:
    """A group of all ranks; on several GPUs it must be one of peers."""
    group = tg.PeerGroup(**{"timeout": TIMEOUT, "buffer_bytes": 64 << 20} | options)
    assert group.uses_peers == (rank.world > 1 and rank.device.startswith("cuda"))
    return group


def capture(
    rank: Rank, function: Callable[[], Any], pool: Any = None
) -> tuple[tg.Recorder | torch.cuda.CUDAGraph, Any]:
    """Capture what ``function`` does; the graph, and what it returned."""
    if rank.device == "cpu":
        graph = tg.Recorder(poison=True)
        with graph.capture():
            result = function()
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = function()
    return graph, result


def reference_reduce(all_ranks: Tensor) -> Tensor:  # [world, ...] -> [...]
    """The sum in fp32 in the order of the ranks, rounded once."""
    total = all_ranks[0].float()
    for x in all_ranks[1:]:
        total = total + x.float()
    return total.to(all_ranks.dtype)


def calls(x: Tensor, group: str, world: int) -> list[tuple[Any, tuple]]:
    """Each operator with arguments for it. x: [2 * world, 3, 2 * world]."""
    part, whole = x[:2].contiguous(), torch.cat([x] * world, 1)
    return [
        (ops.all_reduce.default, (x, group)),
        (ops.all_reduce.default, (x.detach(), group, "max")),
        (ops.reduce_scatter.default, (x, 0, world, group)),
        (ops.reduce_scatter.default, (x, -1, world, group)),
        (ops.all_gather.default, (x, 1, world, group)),
        (ops.all_gather.default, (x, -3, world, group)),
        (ops.all_reduce_.default, (x.detach().clone(), group)),
        (ops.all_reduce_out.default, (x.detach().clone(), x.detach(), group)),
        (ops.reduce_scatter_out.default, (part.detach().clone(), x.detach(), 0, world, group)),
        (ops.all_gather_out.default, (whole.detach().clone(), x.detach(), 1, world, group)),
    ]
