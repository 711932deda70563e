"""Sums of fp32 that ranks send as bf16.

All ranks draw the same numbers, so each knows what all others have: the reference needs no communication.
"""

import pytest
import torch
from collective_ranks import FOUR_GPUS, capture, open_group
from ranks import WORLDS, Rank, ranks_of
from tensor_lists import same_bits
from torch import Tensor

import te_graph as tg

THREE_PROCESSES = pytest.param(("cpu", 3), id="gloo-3")
ranks = pytest.fixture(ranks_of, scope="module", params=[*WORLDS, THREE_PROCESSES, FOUR_GPUS])
BF16 = torch.bfloat16


def reference(all_ranks: Tensor, scale: float, is_rounded: bool) -> Tensor:  # [world, ...] -> [...]
    """What bf16 makes of each rank's, summed in fp32 in the order of the ranks, times the factor in fp32; rounded where
    the sum is sent."""
    sent = all_ranks.bfloat16().float()
    total = sent[0]
    for x in sent[1:]:
        total = total + x
    total = total * torch.tensor(scale, device=total.device)
    return total.bfloat16().float() if is_rounded else total


def draw(rank: Rank, *shape: int) -> Tensor:
    """[world, *shape]: what each rank has, of sizes so different that the order of a sum matters."""
    x = torch.randn(rank.world, *shape, device=rank.device)
    return x * 2.0 ** torch.randint(-12, 13, x.shape, device=rank.device)


def numels(rank: Rank) -> tuple[int, ...]:
    """With unaligned ends; for several launches on GPUs, and for several lines of a thread."""
    return (1, 13, 70_001) if rank.device == "cpu" else (1, 7, 13, 1000, 70_001, 600_000, 9_000_011)


def scenario_sums(rank: Rank) -> None:
    """In place or not, of any alignment, along any dim; nothing beside the output is written."""
    with open_group(rank, buffer_bytes=8 << 20) as group:
        for numel in numels(rank):
            all_ranks, parts = draw(rank, numel), draw(rank, rank.world, numel)
            memory = torch.full((numel + 6,), 7.0, device=rank.device)
            out = memory[3:-3]
            expected = reference(all_ranks, 1 / 3, is_rounded=True)
            tg.all_reduce_out(out, all_ranks[rank.rank], group, scale=1 / 3, wire_dtype=BF16)
            assert same_bits(out, expected), numel
            out.copy_(all_ranks[rank.rank])
            factor = torch.tensor(1 / 3, device=rank.device)
            tg.all_reduce_out(out, out, group, scale=factor, wire_dtype=BF16)
            assert same_bits(out, expected) and (memory[:3] == 7).all() and (memory[-3:] == 7).all(), numel
            expected = parts[rank.rank].clone()
            expected[rank.rank] = reference(parts, 1 / 3, is_rounded=False)[rank.rank]
            part = torch.full_like(out, float("nan"))
            tg.reduce_scatter_out(part[None], parts[rank.rank], group, scale=1 / 3, wire_dtype=BF16)
            assert same_bits(part, expected[rank.rank]), numel
            x = torch.empty(rank.world * numel + 1, device=rank.device)[1:].view(rank.world, numel)
            x.copy_(parts[rank.rank])
            tg.reduce_scatter_out(x[rank.rank : rank.rank + 1], x, group, scale=factor, wire_dtype=BF16)
            assert same_bits(x, expected), numel
        columns = draw(rank, 3, 2 * rank.world)
        part = torch.empty(3, 2, device=rank.device)
        tg.reduce_scatter_out(part, columns[rank.rank], group, 1, wire_dtype=BF16)
        assert same_bits(part, reference(columns, 1.0, is_rounded=False).chunk(rank.world, 1)[rank.rank])
        empty = torch.empty(0, device=rank.device)
        tg.all_reduce_out(empty, empty, group, wire_dtype=BF16)
        group.check()


def scenario_special_values(rank: Rank) -> None:
    """Infinities and NaNs are what IEEE makes of them, NaNs of all bits too; what bf16 has no room for is infinite."""
    limits = torch.finfo(torch.float32)
    values = [0.0, -0.0, 1.0, float("inf"), -float("inf"), float("nan"), limits.tiny / 4, limits.max, -limits.max]
    pairs = torch.cartesian_prod(*[torch.tensor(values, device=rank.device)] * 2)
    ones = torch.full((9,), -1, dtype=torch.int32, device=rank.device).view(torch.float32)
    all_ranks = torch.stack([torch.cat([pairs[:, r % 2], ones]) for r in range(rank.world)])
    with open_group(rank) as group:
        out = torch.empty_like(all_ranks[0])
        tg.all_reduce_out(out, all_ranks[rank.rank], group, wire_dtype=BF16)
        expected = reference(all_ranks, 1.0, is_rounded=True)
        assert torch.equal(out.isnan(), expected.isnan()) and out[-9:].isnan().all()
        assert same_bits(out.nan_to_num(nan=0.5), expected.nan_to_num(nan=0.5))
        minus = torch.full((7,), -0.0, device=rank.device)
        tg.all_reduce_out(minus, minus, group, wire_dtype=BF16)
        assert minus.signbit().all()


def scenario_replays(rank: Rank) -> None:
    with open_group(rank) as group:
        x, whole = torch.zeros(rank.world, 501, device=rank.device), torch.zeros(501, device=rank.device)

        def step() -> None:
            tg.all_reduce_out(whole, whole, group, wire_dtype=BF16)
            tg.reduce_scatter_out(x[rank.rank : rank.rank + 1], x, group, wire_dtype=BF16)

        step()
        graph, _ = capture(rank, step)
        for _ in range(3):
            rows, wholes = draw(rank, rank.world, 501), draw(rank, 501)
            x.copy_(rows[rank.rank]), whole.copy_(wholes[rank.rank])
            graph.replay()
            assert same_bits(whole, reference(wholes, 1.0, is_rounded=True))
            assert same_bits(x[rank.rank], reference(rows, 1.0, is_rounded=False)[rank.rank])
        group.check()


def scenario_bad_dtypes(rank: Rank) -> None:
    """Refused before anything is sent: the other ranks do not call."""
    with open_group(rank) as group:
        x = torch.ones(2 * rank.world, device=rank.device)
        words = "expected as wire_dtype the dtype of x, or torch.bfloat16 for torch.float32, got"
        bad = [
            (x, torch.float16, "sum", TypeError, f"{words} torch.float16 for torch.float32"),
            (x.bfloat16(), torch.float32, "sum", TypeError, f"{words} torch.float32 for torch.bfloat16"),
            (x, BF16, "max", ValueError, "expected another wire_dtype with reduction 'sum' only, got one with 'max'"),
        ]
        for number, (given, dtype, reduction, error, words) in enumerate(bad):
            for write, out in ((tg.all_reduce_out, given), (tg.reduce_scatter_out, given[:2])):
                if rank.rank == number % rank.world:
                    with pytest.raises(error, match=f"{write.__name__}: {words}"):
                        write(out, given, group, reduction=reduction, wire_dtype=dtype)
        for reduction in ("sum", "max"):
            tg.all_reduce_out(x, x, group, reduction, wire_dtype=torch.float32)
        assert (x == rank.world).all()


def test_sums_of_what_is_rounded(ranks, seed):
    ranks.run(scenario_sums, seed)


def test_special_values(ranks, seed):
    ranks.run(scenario_special_values, seed)


def test_replays(ranks, seed):
    ranks.run(scenario_replays, seed)


def test_bad_dtypes_are_refused(ranks, seed):
    ranks.run(scenario_bad_dtypes, seed)
