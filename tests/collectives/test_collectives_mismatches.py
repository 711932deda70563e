"""Ranks that run different operations of a group: an error on all, which names the operations of two ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_ranks import open_group, reference_reduce
from failed_groups import SEVERAL, assert_aborted, draw, error_of, gather_texts, is_cpu, short_lived
from ranks import Rank, ranks_of
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg

ranks = pytest.fixture(ranks_of, scope="module", params=SEVERAL)
cpu_ranks = pytest.fixture(ranks_of, scope="module", params=[w for w in SEVERAL if w.values[0][0] == "cpu"])

Call = Callable[[tg.PeerGroup, str], Any]
Step = tuple[Call, str]  # and how errors speak of it


def along(dim: int, size: int, before: int = 1, behind: int = 1) -> str:
    return f" along dim {dim} of size {size} ({before} before, {behind} behind)"


def scatter(shape: tuple[int, ...], dim: int, words: str) -> Step:
    return lambda g, d: tg.reduce_scatter(torch.ones(shape, device=d), g, dim), "reduce_scatter (sum) of " + words


def scatter_out(shape: tuple[int, ...], dim: int, words: str) -> Step:
    def call(group: tg.PeerGroup, device: str) -> None:
        x = torch.ones(shape, device=device)
        tg.reduce_scatter_out(x.chunk(group.world_size, dim)[0].contiguous(), x, group, dim)

    return call, "reduce_scatter (sum) of " + words


def all_reduced_out(group: tg.PeerGroup, device: str, wire_dtype: torch.dtype | None) -> None:
    x = torch.ones(48, device=device)
    tg.all_reduce_out(x, x, group, wire_dtype=wire_dtype)


def gather(shape: tuple[int, ...], dim: int, words: str) -> Step:
    return lambda g, d: tg.all_gather(torch.ones(shape, device=d), g, dim), "all_gather of " + words


def gather_out(shape: tuple[int, ...], dim: int, words: str) -> Step:
    def call(group: tg.PeerGroup, device: str) -> None:
        x = torch.ones(shape, device=device)
        tg.all_gather_out(torch.cat([x] * group.world_size, dim), x, group, dim)

    return call, "all_gather of " + words


# What rank 0 does and what the others do. World sizes up to 4 share 48 elements.
MISMATCHES: dict[str, tuple[Step, Step]] = {
    "numel": (
        (lambda g, d: tg.all_reduce(torch.ones(48, device=d), g), "all_reduce (sum) of 48 Float"),
        (lambda g, d: tg.all_reduce(torch.ones(52, device=d), g), "all_reduce (sum) of 52 Float"),
    ),
    "large numel": (
        gather((1 << 17,), 0, "131072 Float" + along(0, 131072)),
        gather((1 << 16,), 0, "65536 Float" + along(0, 65536)),
    ),
    "dtype of as many bytes": (
        (lambda g, d: tg.all_reduce(torch.ones(48, device=d), g), "all_reduce (sum) of 48 Float"),
        (lambda g, d: tg.all_reduce(torch.ones(96, device=d).bfloat16(), g), "all_reduce (sum) of 96 BFloat16"),
    ),
    "dtype": (
        (lambda g, d: tg.all_reduce(torch.ones(48, device=d).half(), g), "all_reduce (sum) of 48 Half"),
        (lambda g, d: tg.all_reduce(torch.ones(48, device=d).bfloat16(), g), "all_reduce (sum) of 48 BFloat16"),
    ),
    "dtype that is sent": (
        (lambda g, d: all_reduced_out(g, d, torch.bfloat16), "all_reduce (sum) of 48 Float sent as BFloat16"),
        (lambda g, d: all_reduced_out(g, d, None), "all_reduce (sum) of 48 Float"),
    ),
    "reduction": (
        (lambda g, d: tg.all_reduce(torch.ones(48, device=d), g, "max"), "all_reduce (max) of 48 Float"),
        (lambda g, d: tg.all_reduce(torch.ones(48, device=d), g), "all_reduce (sum) of 48 Float"),
    ),
    "op": (
        (lambda g, d: tg.all_reduce(torch.ones(48, device=d), g), "all_reduce (sum) of 48 Float"),
        scatter((48,), 0, "48 Float" + along(0, 48)),
    ),
    "op without a sum": (
        gather((48,), 0, "48 Float" + along(0, 48)),
        scatter((48,), 0, "48 Float" + along(0, 48)),
    ),
    "dim": (
        scatter((4, 12), 0, "48 Float" + along(0, 4, behind=12)),
        scatter((4, 12), 1, "48 Float" + along(1, 12, before=4)),
    ),
    "dim, out": (
        scatter_out((4, 12), -1, "48 Float" + along(1, 12, before=4)),
        scatter_out((4, 12), 0, "48 Float" + along(0, 4, behind=12)),
    ),
    "dim, gathered": (
        gather((4, 12), 0, "48 Float" + along(0, 4, behind=12)),
        gather((4, 12), -1, "48 Float" + along(1, 12, before=4)),
    ),
    "dim, gathered out": (
        gather_out((4, 12), 1, "48 Float" + along(1, 12, before=4)),
        gather_out((4, 12), 0, "48 Float" + along(0, 4, behind=12)),
    ),
    "dim of much": (
        scatter((1024, 2048), 0, "2097152 Float" + along(0, 1024, behind=2048)),
        scatter((1024, 2048), 1, "2097152 Float" + along(1, 2048, before=1024)),
    ),
    "dim of much, gathered": (
        gather((1024, 2048), 0, "2097152 Float" + along(0, 1024, behind=2048)),
        gather((1024, 2048), 1, "2097152 Float" + along(1, 2048, before=1024)),
    ),
    "shape": (
        scatter((4, 12), 0, "48 Float" + along(0, 4, behind=12)),
        scatter((12, 4), 0, "48 Float" + along(0, 12, behind=4)),
    ),
    "shape, gathered": (
        gather((4, 12), 0, "48 Float" + along(0, 4, behind=12)),
        gather((12, 4), 0, "48 Float" + along(0, 12, behind=4)),
    ),
    "shape around dim": (
        scatter((2, 8, 6), 1, "96 Float" + along(1, 8, before=2, behind=6)),
        scatter((6, 8, 2), 1, "96 Float" + along(1, 8, before=6, behind=2)),
    ),
    "shape around dim, gathered out": (
        gather_out((2, 8, 6), 1, "96 Float" + along(1, 8, before=2, behind=6)),
        gather_out((6, 8, 2), 1, "96 Float" + along(1, 8, before=6, behind=2)),
    ),
    "shape where sizes before dim are several": (
        scatter((2, 3, 4, 5), 2, "120 Float" + along(2, 4, before=6, behind=5)),
        scatter((5, 4, 2, 3), -3, "120 Float" + along(1, 4, before=5, behind=6)),
    ),
}


def scenario_mismatch(rank: Rank, what: str) -> None:
    """All ranks raise; each on a CPU, on GPUs at least one, names what it did and what another did."""
    (first, first_words), (other, other_words) = MISMATCHES[what]
    own, theirs = (first_words, other_words) if rank.rank == 0 else (other_words, first_words)
    with short_lived(rank) as group:
        good = draw(rank, 100)
        assert same_bits(tg.all_reduce(good[rank.rank], group), reference_reduce(good))
        error = error_of(rank, group, lambda: (first if rank.rank == 0 else other)(group, rank.device))
        assert f"on rank {rank.rank}" in error
        names_both = f"in operation 2, {own}: " in error and theirs in error
        assert any("True" in answer for answer in gather_texts(rank, str(names_both))), error
        assert names_both or not is_cpu(rank), error
        assert_aborted(rank, group, f"was aborted on rank {rank.rank}")


def scenario_same(rank: Rank) -> None:
    """A negative dim is the one that it counts to, and an all-reduce takes any shape of as many elements."""
    world, is_first = rank.world, rank.rank == 0
    with open_group(rank) as group:
        all_ranks = draw(rank, 3, 2 * world, 5)
        x, total = all_ranks[rank.rank], reference_reduce(all_ranks)
        for dim in (1 if is_first else -2, -2 if is_first else 1):
            part = total.chunk(world, 1)[rank.rank].contiguous()
            assert same_bits(tg.reduce_scatter(x, group, dim), part)
            assert same_bits(tg.all_gather(x, group, dim), torch.cat(list(all_ranks), 1))
            out = torch.empty_like(part)
            tg.reduce_scatter_out(out, x, group, dim)
            assert same_bits(out, part)
            whole = torch.empty(3, 2 * world * world, 5, device=rank.device)
            tg.all_gather_out(whole, x, group, dim)
            assert same_bits(whole, torch.cat(list(all_ranks), 1))
        assert same_bits(tg.all_reduce(x if is_first else x.view(-1, 3), group).view(x.shape), total)
        group.check()


def scenario_equal_flags(rank: Rank) -> None:
    """Shapes whose hashes in the flag are equal: on CPUs the sizes themselves are compared."""
    shape = (6155, 4, 1371)
    words = f"all_gather of {6155 * 4 * 1371} Byte" + along(1, 4, 6155, 1371)
    other_words = f"all_gather of {6155 * 4 * 1371} Byte" + along(1, 1, 2 * 6155, 2 * 1371)
    if rank.rank != 0:
        shape, words, other_words = (2 * 6155, 1, 2 * 1371), other_words, words
    x = torch.empty(shape, dtype=torch.uint8)
    with short_lived(rank) as group:
        error = error_of(rank, group, lambda: tg.all_gather(x, group, 1))
        assert f"in operation 1, {words}: " in error and other_words in error


class TwoSums(nn.Module):
    """A loss, and a sum beside it, whose backward eager code alone leaves out where the loss does not use it."""

    def __init__(self, group: tg.PeerGroup) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor, w: Tensor, breaks: bool = False) -> tuple[Tensor, Tensor]:  # [4] each
        h = tg.all_reduce(x * w, self.group)
        loss = (h * h).sum()
        if breaks:
            torch._dynamo.graph_break()
        return loss, tg.all_reduce((x + w).sin(), self.group)


FORMS = ["compiled beside eager", "graph break", "fallback"]


def scenario_backward(rank: Rank, form: str, is_used: bool) -> None:
    """Rank 0 runs the sums in another form than the others."""
    torch._dynamo.reset()
    x, w = torch.full((4,), 1.0 + rank.rank), torch.ones(4, requires_grad=True)
    is_first = rank.rank == 0

    def gradient(call: Callable[..., tuple[Tensor, Tensor]], **kwargs: bool) -> Tensor:  # [4]
        loss, beside = call(x, w, **kwargs)
        return torch.autograd.grad(loss + beside.sum() if is_used else loss, w)[0]

    with short_lived(rank, timeout=60.0) as group:  # the others wait while one compiles
        sums: nn.Module = TwoSums(group)
        expected = gradient(sums)
        if form == "fallback":
            tg.make_graphed_callables(sums, (x, torch.ones(4, requires_grad=True)), on_mismatch="eager")
        elif form == "graph break" or not is_first:
            sums = torch.compile(sums, backend="aot_eager")
        breaks = {"breaks": True} if is_first and form != "compiled beside eager" else {}
        if is_used:
            assert all(torch.allclose(gradient(sums, **breaks), expected) for _ in range(3))
            group.check()
            return
        with pytest.raises(RuntimeError) as caught:
            for _ in range(3):
                gradient(sums, **breaks)
        error = str(caught.value)
        assert "all_reduce (sum) of 4 Float in a backward" in error and error.count(" in a backward") == 1
        assert_aborted(rank, group, f"was aborted on rank {rank.rank}")


def scenario_replayed_backward(rank: Rank) -> None:
    """A replay runs forward and backward at once, where autograd runs none, beside eager code."""
    x, w = torch.full((4,), 1.0 + rank.rank), torch.ones(4, requires_grad=True)
    w.grad = torch.zeros(4)
    with short_lived(rank, timeout=60.0) as group:
        sums = TwoSums(group)

        def step() -> None:
            w.grad.zero_()
            sum(part.sum() for part in sums(x, w)).backward()

        step()
        expected, graphed = w.grad.clone(), tg.graphed(step)
        for number in range(6):
            (step if rank.rank == 0 and number > 3 else graphed)()
            assert same_bits(w.grad, expected)
        assert graphed.info()["forward_replays"] >= (1 if rank.rank == 0 else 3)
        group.check()


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_do_something_else_are_an_error_that_names_both(ranks, seed, what):
    ranks.run(scenario_mismatch, seed, what)


def test_ranks_that_name_a_dim_from_either_end_do_the_same(ranks, seed):
    ranks.run(scenario_same, seed)


def test_ranks_on_cpus_compare_sizes_whose_hashes_are_equal(cpu_ranks, seed):
    cpu_ranks.run(scenario_equal_flags, seed)


@pytest.mark.parametrize("form", FORMS)
def test_a_backward_that_one_rank_alone_runs_never_meets_a_forward(cpu_ranks, seed, form):
    cpu_ranks.run(scenario_backward, seed, form, False)


@pytest.mark.parametrize("form", FORMS)
def test_ranks_of_several_forms_run_the_same_where_the_loss_uses_all(cpu_ranks, seed, form):
    cpu_ranks.run(scenario_backward, seed, form, True)


def test_a_replayed_backward_is_one_to_eager_ranks(cpu_ranks, seed):
    cpu_ranks.run(scenario_replayed_backward, seed)
