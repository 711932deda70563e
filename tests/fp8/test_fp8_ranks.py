"""Scales that ranks share: row 0 of the history, or an amax, is reduced by max, and all find the same bits.

All ranks draw the same numbers, so each knows the whole tensor of which it casts its rows: what one process finds for
that is the reference.
"""

import pytest
import torch
import torch.distributed as dist
from fp8_references import E4M3, FP8_MAX, reference_cast
from fp8_tensors import assert_same_bits
from ranks import WORLDS, Rank, ranks_of
from tensor_lists import same_bits
from torch import Tensor

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
HISTORY, STEPS = 3, 8


class Scaling:
    """Delayed scaling of ``count`` tensors: history [3, count], scale and scale_inv [count]."""

    def __init__(self, count: int, device: str) -> None:
        self.history = torch.zeros(HISTORY, count, device=device)
        self.scale, self.scale_inv = (torch.ones(count, device=device) for _ in range(2))
        self.everything = torch.ones(count, dtype=torch.bool, device=device)

    def cast(self, column: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cast ``x`` [M, N] by the scale of a column, and leave its amax there."""
        return tg.fp8_cast(x, self.scale[column], E4M3, amax=self.history[0, column])

    def update(self) -> None:
        tg.amax_and_scale_update_inplace(
            self.history, self.scale, self.scale_inv, self.everything, False, FP8_MAX[E4M3]
        )

    def is_like(self, other: "Scaling") -> bool:
        pairs = ((self.history, other.history), (self.scale, other.scale), (self.scale_inv, other.scale_inv))
        return all(same_bits(*pair) for pair in pairs)


def rows_of(x: Tensor, rank: Rank) -> Tensor:  # [M, N] -> [M / world, N]
    return x.chunk(rank.world)[rank.rank]


def scenario_delayed(rank: Rank) -> None:
    """A14: FP8 bytes and scales are those of one process that has all rows."""
    shared, alone = Scaling(2, rank.device), Scaling(2, rank.device)
    for step in range(STEPS):
        for column in range(2):
            # The largest one lies now with one rank, now with the other.
            x = torch.randn(8, 5, device=rank.device) * 2.0 ** torch.randint(-5, 6, (8, 1), device=rank.device)
            mine, _ = shared.cast(column, rows_of(x, rank))
            whole, _ = alone.cast(column, x)
            assert_same_bits(mine, rows_of(whole, rank))
        dist.all_reduce(shared.history[0], op=dist.ReduceOp.MAX)
        shared.update()
        alone.update()
        assert shared.is_like(alone), step


def scenario_not_run(rank: Rank) -> None:
    """A13: a column that ran on one rank only is rolled on all; one that ran nowhere, nowhere."""
    shared = Scaling(3, rank.device)
    shared.history[1:] = torch.tensor([[2.0], [3.0]], device=rank.device)
    before = shared.history.clone()
    x = torch.full((4, 4), 7.0, device=rank.device)
    if rank.rank == 0:
        shared.cast(0, x)
    if rank.rank == rank.world - 1:
        shared.cast(1, x)
    dist.all_reduce(shared.history[0], op=dist.ReduceOp.MAX)
    shared.update()
    for column in (0, 1):
        assert shared.history[:, column].tolist() == [0.0, 3.0, 7.0]
        assert shared.scale[column].item() == FP8_MAX[E4M3] / 7
    assert same_bits(shared.history[:, 2], before[:, 2]) and shared.scale[2].item() == 1


def scenario_current(rank: Rank) -> None:
    """An amax that is reduced, and the scale that follows from it."""
    x = torch.randn(8, 5, device=rank.device) * 2.0 ** torch.randint(-5, 6, (8, 1), device=rank.device)
    amax, _ = tg.fp8_current_scale(rows_of(x, rank))
    dist.all_reduce(amax, op=dist.ReduceOp.MAX)
    scale = tg.fp8_scale(amax)
    assert same_bits(scale, tg.fp8_current_scale(x)[1])
    mine, scale_inv = tg.fp8_cast(rows_of(x, rank), scale)
    expected = reference_cast(rows_of(x, rank), scale, E4M3)
    assert_same_bits(mine, expected.out)
    assert_same_bits(scale_inv, expected.scale_inv)


def test_ranks_that_reduce_amaxes_scale_and_cast_as_one_process_does(ranks, seed):
    ranks.run(scenario_delayed, seed)


def test_what_ran_on_one_rank_is_rolled_on_all(ranks, seed):
    ranks.run(scenario_not_run, seed)


def test_current_scales_are_shared_through_their_amax(ranks, seed):
    ranks.run(scenario_current, seed)
