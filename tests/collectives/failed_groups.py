"""Shared by the tests of failing groups: short-lived groups, and their errors once they were aborted.

The documentation of te_graph.PeerGroup describes failures: on a CPU the op raises, on a GPU its
result is NaN, found_inf 1, and check() and later ops raise. Each scenario that fails has a process group of its own,
because gloo closes connections that were late.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from collective_ranks import open_group
from ranks import WORLDS, Rank
from torch import Tensor

import te_graph as tg

SEVERAL = [world for world in WORLDS if world.values[0][1] > 1]
TIMEOUT, SLACK = 1.0, 2.0  # seconds: an error comes within their sum


def is_cpu(rank: Rank) -> bool:
    return rank.device == "cpu"


def is_last(rank: Rank) -> bool:
    return rank.rank == rank.world - 1


def finish(rank: Rank) -> None:
    if not is_cpu(rank):
        torch.cuda.synchronize(rank.device)


@contextlib.contextmanager
def short_lived(rank: Rank, **options: Any) -> Iterator[tg.PeerGroup]:
    """A group over a process group of its own."""
    own = dist.new_group() if is_cpu(rank) else None
    with open_group(rank, process_group=own, **{"timeout": TIMEOUT} | options) as group:
        yield group
        dist.barrier()
    if own is not None:
        dist.destroy_process_group(own)


def error_of(rank: Rank, group: tg.PeerGroup, call: Callable[[], Any]) -> str:
    """The error of ``call``, or, on a GPU, of the group once the kernels are done."""
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        call()
        finish(rank)
        group.check()
    assert time.monotonic() - began < TIMEOUT + SLACK
    return str(caught.value)


def assert_aborted(rank: Rank, group: tg.PeerGroup, words: str) -> None:
    """From now on check() and all ops say why; nothing waits any more."""
    began, x = time.monotonic(), torch.ones(rank.world, device=rank.device)
    for call in (group.check, *(lambda f=f: f(x, group) for f in (tg.all_reduce, tg.reduce_scatter, tg.all_gather))):
        with pytest.raises(RuntimeError, match=words):
            call()
    assert time.monotonic() - began < TIMEOUT / 2


def gather_texts(rank: Rank, own: str) -> list[str]:
    """What each rank has, by rank."""
    found: list[Any] = [None] * rank.world
    dist.all_gather_object(found, own)
    return found


def draw(rank: Rank, *shape: int) -> Tensor:
    """[world, *shape]: what each rank has."""
    return torch.randn(rank.world, *shape, device=rank.device)
