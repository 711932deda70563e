"""Sums times a factor, and a reduce-scatter into this rank's own part of its input.

All ranks draw the same numbers, so each knows what all others have: the reference needs no communication.
"""

import itertools
from functools import partial

import pytest
import torch
from collective_ranks import FOUR_GPUS, capture, open_group
from ranks import WORLDS, Rank, ranks_of
from tensor_lists import same_bits
from torch import Tensor

import te_graph as tg

FOUR_PROCESSES = [pytest.param(("cpu", world), id=f"gloo-{world}") for world in (3, 4)]
ranks = pytest.fixture(ranks_of, scope="module", params=[*WORLDS, *FOUR_PROCESSES, FOUR_GPUS])
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def numels(rank: Rank) -> tuple[int, ...]:
    """With unaligned ends, and for each of the algorithms and protocols."""
    return (1, 13, 70_001) if rank.device == "cpu" else (1, 13, 1000, 70_001, 600_000, 9_000_011)


def reference(all_ranks: Tensor, scale: float) -> Tensor:  # [world, ...] -> [...]
    """The sum in fp32 in the order of the ranks, times the factor in fp32, rounded once."""
    total = all_ranks[0].float()
    for x in all_ranks[1:]:
        total = total + x.float()
    return (total * torch.tensor(scale, device=total.device)).to(all_ranks.dtype)


def draw(rank: Rank, dtype: torch.dtype, *shape: int) -> Tensor:
    """[world, *shape]: what each rank has."""
    x = torch.randn(rank.world, *shape, device=rank.device)
    return (x * 2.0 ** torch.randint(-5, 6, x.shape, device=rank.device)).to(dtype)


def scenario_sums(rank: Rank) -> None:
    """A number and a tensor give the same bits, in place or not."""
    with open_group(rank) as group:
        for dtype, numel in itertools.product(DTYPES, numels(rank)):
            all_ranks, parts = draw(rank, dtype, numel), draw(rank, dtype, rank.world, numel)
            mine, expected = all_ranks[rank.rank].clone(), reference(all_ranks, 1 / 3)
            out, part = torch.full_like(mine, float("nan")), torch.full_like(mine, float("nan"))
            factor = torch.tensor(1 / 3, device=rank.device)
            tg.all_reduce_out(out, mine, group, scale=1 / 3)
            tg.all_reduce_out(mine, mine, group, scale=factor)
            assert same_bits(out, expected) and same_bits(mine, expected), (dtype, numel)
            for scale in (1 / 3, factor[None]):
                tg.reduce_scatter_out(part[None], parts[rank.rank], group, scale=scale)
                assert same_bits(part, reference(parts, 1 / 3)[rank.rank]), (dtype, numel)
        group.check()


def scenario_own_part(rank: Rank) -> None:
    """Along any dim, of any alignment, whatever else of x is written: only this rank's part changes."""
    with open_group(rank) as group:
        cases = [((rank.world * n,), 0, n % 2) for n in numels(rank)]
        cases += [((3, 2 * rank.world), 1, 0), ((1, 5 * rank.world, 3), 1, 3), ((0, rank.world), 1, 0)]
        for dtype, (shape, dim, offset) in itertools.product(DTYPES, cases):
            all_ranks = draw(rank, dtype, *shape)
            memory = torch.empty(offset + all_ranks[0].numel(), dtype=dtype, device=rank.device)
            x = memory[offset:].view(shape).copy_(all_ranks[rank.rank])
            expected = all_ranks[rank.rank].clone()
            expected.chunk(rank.world, dim)[rank.rank].copy_(
                reference(all_ranks, 0.75).chunk(rank.world, dim)[rank.rank]
            )
            tg.reduce_scatter_out(x.chunk(rank.world, dim)[rank.rank], x, group, dim, scale=0.75)
            assert same_bits(x, expected), (dtype, shape, dim, offset)
        if rank.world > 1:  # into another part of x, and one beside the parts, x is copied
            all_ranks = draw(rank, torch.float32, rank.world * 6)
            for begin in ((rank.rank + 1) % rank.world * 6, 3):
                x = all_ranks[rank.rank].clone()
                tg.reduce_scatter_out(x[begin : begin + 6], x, group)
                assert same_bits(x[begin : begin + 6], reference(all_ranks, 1.0).view(rank.world, 6)[rank.rank])
        group.check()


def scenario_replays(rank: Rank) -> None:
    """A factor in memory is that of the replay; it may lie in what is written."""
    with open_group(rank) as group:
        factor = torch.ones((), device=rank.device)
        x, whole = torch.zeros(2 * rank.world, 500, device=rank.device), torch.zeros(501, device=rank.device)

        def step() -> None:
            tg.all_reduce_out(whole, whole, group, scale=whole[500])
            tg.reduce_scatter_out(x.chunk(rank.world)[rank.rank], x, group, scale=factor)

        step()
        graph, _ = capture(rank, step)
        for number in (0.25, 1 / 3, 1.0):
            factor.fill_(number)
            rows, wholes = draw(rank, torch.float32, *x.shape), draw(rank, torch.float32, 501)
            wholes[:, 500] = number
            x.copy_(rows[rank.rank]), whole.copy_(wholes[rank.rank])
            graph.replay()
            assert same_bits(whole, reference(wholes, number))
            assert same_bits(x.chunk(rank.world)[rank.rank], reference(rows, number).chunk(rank.world)[rank.rank])
        group.check()


def scenario_bad_scales(rank: Rank) -> None:
    """Refused before anything is sent: the other ranks do not call."""
    with open_group(rank) as group:
        x = torch.ones(2 * rank.world, device=rank.device)
        factor, part = torch.ones((), device=rank.device), x[:2].clone()
        bad = [
            (2.0, "max", ValueError, "expected a scale with reduction 'sum' only, got one with 'max'"),
            (factor, "max", ValueError, "expected a scale with reduction 'sum' only, got one with 'max'"),
            (factor.double(), "sum", TypeError, "expected scale of dtype torch.float32, got torch.float64"),
            (torch.ones(2, device=rank.device), "sum", ValueError, r"expected scale of one element, got shape \[2\]"),
            ("2", "sum", TypeError, "expected scale to be a number or a tensor, got str"),
        ]
        if rank.device != "cpu":
            bad.append((factor.cpu(), "sum", ValueError, f"expected scale on {rank.device}, got cpu"))
        for number, (scale, reduction, error, words) in enumerate(bad):
            for op in (partial(tg.all_reduce_out, torch.empty_like(x)), partial(tg.reduce_scatter_out, part)):
                if rank.rank == number % rank.world:
                    with pytest.raises(error, match=f"{op.func.__name__}: {words}"):
                        op(x, group, reduction=reduction, scale=scale)
        with pytest.raises(NotImplementedError, match="all_reduce_out: has no gradient"):
            tg.all_reduce_out(part, part, group, scale=factor.clone().requires_grad_())
        tg.all_reduce_out(x, x, group, "max", scale=1.0)
        assert (x == 1).all()


def test_sums_are_multiplied_before_they_are_rounded(ranks, seed):
    ranks.run(scenario_sums, seed)


def test_a_part_is_reduced_where_it_lies(ranks, seed):
    ranks.run(scenario_own_part, seed)


def test_replays_read_the_factor_anew(ranks, seed):
    ranks.run(scenario_replays, seed)


def test_bad_scales_are_refused(ranks, seed):
    ranks.run(scenario_bad_scales, seed)
