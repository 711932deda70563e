"""Gradients of the collectives and of tensor- and sequence-parallel regions.

The reference is one process that has everything: all ranks draw the same numbers, so each of them computes what all
have, and autograd of ordinary operators tells what a rank's gradient must be. Small integers make sums exact in any
order, so that all but the block of layers is compared exactly, and that within a tolerance.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from collective_ranks import open_group
from ranks import WORLDS, Rank, ranks_of
from tensor_lists import all_same_bits, same_bits
from torch import Tensor, nn

import te_graph as tg
from te_graph import tensor_parallel as tp

ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
Function = Callable[[Tensor], Tensor]
Whole = Callable[[list[Tensor], int], Tensor]  # what all ranks have, and a rank: what that rank finds
ROWS, COLUMNS = 3, 5


def whole_numbers(*shape: int, device: str) -> Tensor:
    return torch.randint(-8, 9, shape, device=device).float()


def part(x: Tensor, dim: int, world: int, rank: int) -> Tensor:
    return x.chunk(world, dim)[rank]


# Bare ops. Their loss is the sum of the ranks' losses.


def bare_ops(group: tg.PeerGroup) -> Iterator[tuple[str, Function, Whole]]:
    """What is called, and what one process does for rank r. x: [ROWS * world, COLUMNS * world]."""
    world = group.world_size
    yield "all_reduce", lambda x: tg.all_reduce(x, group), lambda xs, _: sum(xs)
    for dim in (0, 1, -1):
        yield (
            f"reduce_scatter {dim}",
            lambda x, dim=dim: tg.reduce_scatter(x, group, dim),
            lambda xs, r, dim=dim: part(sum(xs), dim, world, r),
        )
        yield (
            f"all_gather {dim}",
            lambda x, dim=dim: tg.all_gather(x, group, dim),
            lambda xs, _, dim=dim: torch.cat(xs, dim),
        )


def uses(call: Function, x: Tensor, *, twice: bool) -> Tensor:
    """One result, or one of two calls on the same input with x itself in between."""
    return call(x) * call(x * 2) if twice else call(x)


def scenario_bare_ops(rank: Rank, dtype: torch.dtype) -> None:
    with open_group(rank) as group:
        for what, call, whole in bare_ops(group):
            for twice in (False, True):
                shape = (ROWS * rank.world, COLUMNS * rank.world)
                all_ranks = [
                    whole_numbers(*shape, device=rank.device).to(dtype).requires_grad_() for _ in range(rank.world)
                ]
                each = [uses_whole(all_ranks, whole, r, twice) for r in range(rank.world)]
                weights = [whole_numbers(*each[0].shape, device=rank.device).to(dtype) for _ in each]
                expected = torch.autograd.grad(
                    sum((w * y).sum() for w, y in zip(weights, each, strict=True)), all_ranks
                )

                mine = all_ranks[rank.rank].detach().clone().requires_grad_()
                result = uses(call, mine, twice=twice)
                assert same_bits(result.detach(), each[rank.rank].detach()), (what, twice)
                (got,) = torch.autograd.grad(result, mine, weights[rank.rank])
                # Zeros may differ in sign: one process adds 0.0 where nothing comes back.
                assert torch.equal(got, expected[rank.rank]), (what, twice)


def uses_whole(xs: list[Tensor], whole: Whole, r: int, twice: bool) -> Tensor:
    return whole(xs, r) * whole([x * 2 for x in xs], r) if twice else whole(xs, r)


def scenario_no_grad(rank: Rank) -> None:
    with open_group(rank) as group:
        for what, call, _ in bare_ops(group):
            x = torch.ones(rank.world, rank.world, device=rank.device, requires_grad=True)
            with torch.no_grad():
                assert not call(x).requires_grad, what
            assert not call(x.detach()).requires_grad, what
            assert call(x).requires_grad, what


def scenario_odd_gradients(rank: Rank) -> None:
    """Gradients that are expanded or transposed, as sums and transposes send them back."""
    with open_group(rank) as group:
        all_ranks = [whole_numbers(4 * rank.world, 3, device=rank.device).requires_grad_() for _ in range(rank.world)]
        mine = all_ranks[rank.rank].detach().clone().requires_grad_()
        tg.all_reduce(mine, group).sum().backward()
        assert same_bits(mine.grad, torch.full_like(mine, rank.world))
        weight = whole_numbers(3, 4, device=rank.device)
        (tg.reduce_scatter(mine, group).t() * weight).sum().backward()
        total = sum(all_ranks)
        sum((part(total, 0, rank.world, r).t() * weight).sum() for r in range(rank.world)).backward()
        assert same_bits(mine.grad, all_ranks[rank.rank].grad + rank.world)


# Regions. Their loss is one number, which all ranks find.


def assert_like_one_process(
    rank: Rank, all_ranks: list[Tensor], parallel: Function, one: Callable[[list[Tensor]], Tensor], what: str
) -> None:
    """all_ranks: [...] for each rank, or one tensor that all have alike. The loss and its gradient."""
    leaves = [x.clone().requires_grad_() for x in all_ranks]
    expected = torch.autograd.grad(one(leaves), leaves)
    mine = all_ranks[rank.rank % len(all_ranks)].clone().requires_grad_()
    loss = parallel(mine)
    assert same_bits(loss.detach(), one(leaves).detach()), what
    (got,) = torch.autograd.grad(loss, mine)
    assert torch.equal(got, expected[rank.rank % len(all_ranks)]), what


def scenario_regions(rank: Rank) -> None:
    """Each region between what each rank has of its own, and what all do alike."""
    world, device = rank.world, rank.device
    with open_group(rank) as group:
        shape = (ROWS * world, COLUMNS * world)
        alike, own = whole_numbers(*shape, device=device), [whole_numbers(*shape, device=device) for _ in range(world)]
        w, ws = whole_numbers(*shape, device=device), [whole_numbers(*shape, device=device) for _ in range(world)]
        w_mine, r = ws[rank.rank], rank.rank
        rows, columns = [part(x, 0, world, 0) for x in own], [part(x, 1, world, 0) for x in own]
        total = sum(ws)

        def summed(x: Tensor) -> Tensor:
            """The loss of all ranks from the share of each, which is what reduce_from_tp is for."""
            return tp.reduce_from_tp(x.sum(), group)

        cases: list[tuple[str, list[Tensor], Function, Callable[[list[Tensor]], Tensor]]] = [
            (
                "copy_to_tp",
                [alike],
                lambda x: summed(tp.copy_to_tp(x, group) * w_mine),
                lambda xs: (xs[0] * total).sum(),
            ),
            ("reduce_from_tp", own, lambda x: (tp.reduce_from_tp(x, group) * w).sum(), lambda xs: (sum(xs) * w).sum()),
            (
                "scatter_to_tp",
                [alike],
                lambda x: summed(tp.scatter_to_tp(x, group) * part(w, 1, world, r)),
                lambda xs: (xs[0] * w).sum(),
            ),
            (
                "gather_from_tp",
                columns,
                lambda x: (tp.gather_from_tp(x, group) * w).sum(),
                lambda xs: (torch.cat(xs, 1) * w).sum(),
            ),
            (
                "all_gather_last_dim_from_tp",
                columns,
                lambda x: summed(tp.all_gather_last_dim_from_tp(x, group) * w_mine),
                lambda xs: (torch.cat(xs, 1) * total).sum(),
            ),
            (
                "scatter_to_sp",
                [alike],
                lambda x: summed(tp.scatter_to_sp(x, group) * part(w, 0, world, r)),
                lambda xs: (xs[0] * w).sum(),
            ),
            (
                "gather_from_sp, own work",
                rows,
                lambda x: summed(tp.gather_from_sp(x, group) * w_mine),
                lambda xs: (torch.cat(xs) * total).sum(),
            ),
            (
                "gather_from_sp, the same work",
                rows,
                lambda x: (tp.gather_from_sp(x, group, tensor_parallel_output_grad=False) * w).sum(),
                lambda xs: (torch.cat(xs) * w).sum(),
            ),
            (
                "reduce_scatter_to_sp",
                own,
                lambda x: summed(tp.reduce_scatter_to_sp(x, group) * part(w, 0, world, r)),
                lambda xs: (sum(xs) * w).sum(),
            ),
        ]
        for what, all_ranks, parallel, one in cases:
            assert_like_one_process(rank, all_ranks, parallel, one, what)
            # Through the region twice: gradients of both add up.
            assert_like_one_process(
                rank,
                all_ranks,
                lambda x, f=parallel: f(x) + f(x * 3),
                lambda xs, f=one: f(xs) + f([x * 3 for x in xs]),
                f"{what}, twice",
            )


def scenario_penalties(rank: Rank) -> None:
    """The gradient of a gradient's square, as of one process that has all weights."""
    world, r = rank.world, rank.rank
    with open_group(rank) as group:
        x = torch.randn(2 * world, 3 * world, device=rank.device)
        up = torch.randn(world, 3 * world, 6, device=rank.device) / 4
        down = torch.randn(world, 6, 3 * world, device=rank.device) / 4

        def whole(x: Tensor) -> Tensor:
            return sum(torch.tanh(x @ up[k]) @ down[k] for k in range(world)).square().sum()

        def by_columns(x: Tensor) -> Tensor:
            inner = torch.tanh(tp.copy_to_tp(x, group) @ up[r])
            return tp.reduce_from_tp(inner @ down[r], group).square().sum()

        def by_rows(x: Tensor) -> Tensor:
            inner = torch.tanh(tp.gather_from_sp(tp.scatter_to_sp(x, group), group) @ up[r])
            rows = tp.reduce_scatter_to_sp(inner @ down[r], group)
            return tp.gather_from_sp(rows, group, tensor_parallel_output_grad=False).square().sum()

        def by_elements(x: Tensor) -> Tensor:
            return tp.gather_from_tp(torch.tanh(tp.scatter_to_tp(x, group)), group).square().sum()

        pairs = ((by_columns, whole), (by_rows, whole), (by_elements, lambda x: torch.tanh(x).square().sum()))
        for parallel, one in pairs:
            torch.testing.assert_close(penalty(parallel, x), penalty(one, x), rtol=1e-4, atol=1e-4)


def penalty(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(x), x, create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), x)[0]


def scenario_region_shapes(rank: Rank) -> None:
    with open_group(rank) as group:
        n = 2 * rank.world + 1
        x = torch.randn(n, n, device=rank.device)
        for region, dim in ((tp.scatter_to_tp, -1), (tp.scatter_to_sp, 0)):
            if rank.world == 1:
                assert same_bits(region(x, group), x)
                continue
            with pytest.raises(ValueError, match=f"in dim {dim} that {rank.world} ranks can share, got {n}"):
                region(x, group)


# A sequence-parallel block.

WIDTH, INNER = 16, 32


class Block(nn.Module):
    """A sequence-parallel MLP: the rank's rows [n, WIDTH] -> its rows [n, WIDTH]."""

    def __init__(self, whole: "WholeBlock", group: tg.PeerGroup) -> None:
        super().__init__()
        self.group = group
        shares = [
            part(whole.up, 0, group.world_size, group.rank),
            part(whole.down, 1, group.world_size, group.rank),
        ]
        self.up, self.down = (nn.Parameter(share.detach().clone().contiguous()) for share in shares)
        self.gain, self.bias = (nn.Parameter(p.detach().clone()) for p in (whole.gain, whole.bias))

    def forward(self, x: Tensor) -> Tensor:  # [n, WIDTH] -> [n, WIDTH]
        inner = F.gelu(F.linear(tp.gather_from_sp(x, self.group), self.up))
        y = tp.reduce_scatter_to_sp(F.linear(inner, self.down), self.group)
        return F.layer_norm(y + x, (WIDTH,), self.gain, self.bias)


class WholeBlock(nn.Module):
    """The same in one process: [world * n, WIDTH] -> the same."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(INNER, WIDTH, device=device) / 4)
        self.down = nn.Parameter(torch.randn(WIDTH, INNER, device=device) / 4)
        self.gain = nn.Parameter(torch.randn(WIDTH, device=device))
        self.bias = nn.Parameter(torch.randn(WIDTH, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(F.linear(F.gelu(F.linear(x, self.up)), self.down) + x, (WIDTH,), self.gain, self.bias)


def step(block: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Result, gradient of the input and of the parameters. x, gradient: [n, WIDTH]."""
    x = x.clone().requires_grad_()
    block.zero_grad(set_to_none=True)
    result = block(x)
    result.backward(gradient)
    return [t.detach().clone() for t in (result, x.grad, *(p.grad for p in block.parameters()))]


def draw_step(rank: Rank, rows: int) -> list[Tensor]:
    """Input and gradient of all rows: [world * rows, WIDTH] each."""
    return [torch.randn(rank.world * rows, WIDTH, device=rank.device) for _ in range(2)]


def rows_of(rank: Rank, tensors: list[Tensor]) -> list[Tensor]:
    return [part(t, 0, rank.world, rank.rank).clone() for t in tensors]


def scenario_block(rank: Rank) -> None:
    with open_group(rank) as group:
        whole = WholeBlock(rank.device)
        block = Block(whole, group)
        for rows in (1, 4, 9):
            everything = draw_step(rank, rows)
            result, x_grad, up, down, gain, bias = step(whole, *everything)
            expected = [
                *rows_of(rank, [result, x_grad]),
                part(up, 0, rank.world, rank.rank),
                part(down, 1, rank.world, rank.rank),
            ]
            got = step(block, *rows_of(rank, everything))
            torch.testing.assert_close(got[:4], expected, rtol=2e-5, atol=2e-5)
            # Parameters that all ranks have alike see the ranks' own rows; their gradients are summed by the user.
            sums = [tg.all_reduce(gradient, group) for gradient in got[4:]]
            torch.testing.assert_close(sums, [gain, bias], rtol=2e-5, atol=2e-5)


def scenario_graphed_block(rank: Rank) -> None:
    with open_group(rank) as group:
        whole = WholeBlock(rank.device)
        eager, graphed = Block(whole, group), Block(whole, group)
        sample = torch.randn(4, WIDTH, device=rank.device, requires_grad=True)
        tg.make_graphed_callables(graphed, (sample,))
        for _ in range(4):
            mine = rows_of(rank, draw_step(rank, 4))
            assert all_same_bits(step(graphed, *mine), step(eager, *mine))
        info = graphed.te_graph.info()
        assert info["forward_replays"] == info["backward_replays"] == 4
        group.check()


def scenario_compiled_block(rank: Rank) -> None:
    with open_group(rank) as group:
        whole = WholeBlock(rank.device)
        eager, inner = Block(whole, group), Block(whole, group)
        compiled = torch.compile(inner, fullgraph=True, backend="aot_eager", dynamic=True)
        for rows in (4, 4, 7, 2):
            mine = rows_of(rank, draw_step(rank, rows))
            assert all_same_bits(step(compiled, *mine), step(eager, *mine)), rows
        torch._dynamo.reset()


def scenario_graphed_compiled_block(rank: Rank) -> None:
    """Compiled before anything is captured, then captured, forward and backward."""
    with open_group(rank) as group:
        whole = WholeBlock(rank.device)
        eager, inner = Block(whole, group), Block(whole, group)
        compiled = torch.compile(inner, fullgraph=True, backend="aot_eager")
        step(compiled, *rows_of(rank, draw_step(rank, 4)))

        def both(x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:  # [n, WIDTH] each
            x = x.detach().requires_grad_()
            result = compiled(x)
            return result.detach(), *torch.autograd.grad(result, [x, *inner.parameters()], gradient)

        static, graph = rows_of(rank, draw_step(rank, 4)), tg.create_graph()
        with tg.capture_to_graph(graph):
            outputs = both(*static)
        for _ in range(4):
            mine = rows_of(rank, draw_step(rank, 4))
            for place, value in zip(static, mine, strict=True):
                place.copy_(value)
            tg.replay_graph(graph)
            assert all_same_bits(outputs, step(eager, *mine))
        torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_of_the_ops_are_those_of_the_sum_of_the_losses(ranks, seed, dtype):
    ranks.run(scenario_bare_ops, seed, dtype)


def test_without_a_need_no_gradient_is_kept(ranks, seed):
    ranks.run(scenario_no_grad, seed)


def test_gradients_of_odd_strides(ranks, seed):
    ranks.run(scenario_odd_gradients, seed)


def test_regions_have_the_gradients_of_one_process(ranks, seed):
    ranks.run(scenario_regions, seed)


def test_regions_have_the_second_derivatives_of_one_process(ranks, seed):
    ranks.run(scenario_penalties, seed)


def test_regions_name_a_size_that_ranks_cannot_share(ranks, seed):
    ranks.run(scenario_region_shapes, seed)


def test_a_sequence_parallel_block_is_like_one_process(ranks, seed):
    ranks.run(scenario_block, seed)


def test_a_graphed_block_has_the_bits_of_its_eager_self(ranks, seed):
    ranks.run(scenario_graphed_block, seed)


def test_a_compiled_block_has_the_bits_of_its_eager_self(ranks, seed):
    ranks.run(scenario_compiled_block, seed)


def test_a_block_that_was_compiled_before_has_its_bits_in_a_graph(ranks, seed):
    ranks.run(scenario_graphed_compiled_block, seed)
