"""What tests of FP8 layers over ranks share."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.distributed as dist
from fp8_recipes import BOTH_KINDS
from ranks import Rank
from torch import Tensor

import te_graph as tg

RECIPES = {"off": None, "delayed": BOTH_KINDS["delayed"], "current": BOTH_KINDS["current"]}


def with_group(scenario: Callable[..., None]) -> Callable[..., None]:
    """``scenario`` with a group of all ranks as its second argument."""

    @functools.wraps(scenario)
    def run(rank: Rank, *arguments: object) -> None:
        with tg.PeerGroup() as group:
            scenario(rank, group, *arguments)

    return run


def region(recipe: object, group: dist.ProcessGroup | None = None) -> tg.fp8_autocast:
    return tg.fp8_autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group)


def part_of(tensor: Tensor, rank: Rank, dim: int = 0) -> Tensor:
    """The rank's share of ``tensor`` [...] along ``dim``; a view."""
    return tensor.chunk(rank.world, dim)[rank.rank]


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Both [...], by the norm of what differs."""
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error <= tolerance, f"{name}: {error}"
