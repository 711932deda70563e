"""Forward-mode derivatives of the collectives: tangents of all ranks go the way of their primals, or are refused.

The reference is one process that has everything, as all ranks draw the same numbers; sums of small integers are exact.
"""

from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from collective_ranks import open_group
from ranks import WORLDS, Rank, ranks_of
from tensor_lists import same_bits
from torch import Tensor

import te_graph as tg

ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
Function = Callable[[Tensor], Tensor]
Whole = Callable[[list[Tensor], int], Tensor]  # what all ranks have, and a rank: what that rank finds
ROWS, COLUMNS = 3, 5


def whole_numbers(*shape: int, device: str) -> Tensor:
    return torch.randint(-8, 9, shape, device=device).float()


def linear_ops(group: tg.PeerGroup) -> dict[str, tuple[Function, Whole]]:
    """What is called, and what one process that has all ranks' tensors does for one of them."""
    world = group.world_size
    return {
        "all_reduce": (lambda x: tg.all_reduce(x, group), lambda xs, rank: sum(xs)),
        "reduce_scatter": (lambda x: tg.reduce_scatter(x, group), lambda xs, rank: sum(xs).chunk(world)[rank]),
        "reduce_scatter, columns": (
            lambda x: tg.reduce_scatter(x, group, dim=1),
            lambda xs, rank: sum(xs).chunk(world, 1)[rank],
        ),
        "all_gather": (lambda x: tg.all_gather(x, group), lambda xs, rank: torch.cat(xs)),
        "all_gather, columns": (lambda x: tg.all_gather(x, group, dim=-1), lambda xs, rank: torch.cat(xs, -1)),
    }


def scenario_tangents(rank: Rank, dtype: torch.dtype) -> None:
    with open_group(rank) as group:
        shape = (ROWS * rank.world, COLUMNS * rank.world)
        xs, ts = ([whole_numbers(*shape, device=rank.device).to(dtype) for _ in range(rank.world)] for _ in range(2))
        for name, (op, whole) in linear_ops(group).items():
            value, tangent = (whole(all_ranks, rank.rank) for all_ranks in (xs, ts))
            with forward_ad.dual_level():
                for requires_grad in (False, True):
                    x = xs[rank.rank].clone().requires_grad_(requires_grad)
                    for mode in (torch.enable_grad, torch.no_grad):
                        with mode():
                            got = forward_ad.unpack_dual(op(forward_ad.make_dual(x, ts[rank.rank])))
                        assert same_bits(got.primal, value) and same_bits(got.tangent, tangent), name
                        assert got.primal.requires_grad == (requires_grad and mode is torch.enable_grad)
            primal, along = torch.func.jvp(op, (xs[rank.rank],), (ts[rank.rank],))
            assert same_bits(primal, value) and same_bits(along, tangent), name


def scenario_forward_over_reverse(rank: Rank) -> None:
    """The tangent of a gradient, and the gradient of a tangent: sums over ranks in both."""
    with open_group(rank) as group:
        x, t = (whole_numbers(ROWS * rank.world, COLUMNS * rank.world, device=rank.device) for _ in range(2))
        for name, (op, _) in linear_ops(group).items():
            with forward_ad.dual_level():
                leaf = x.clone().requires_grad_()
                y = op(forward_ad.make_dual(leaf, t)) ** 2
                (gradient,) = torch.autograd.grad(y.sum(), leaf)
                got = forward_ad.unpack_dual(gradient)
                twin, twin_t = x.clone().requires_grad_(), t.clone().requires_grad_()
                (expected,) = torch.autograd.grad((op(twin) ** 2).sum(), twin)
                (along,) = torch.autograd.grad((op(twin_t) ** 2).sum(), twin_t)
            assert same_bits(got.primal, expected) and same_bits(got.tangent, along), name


def scenario_tangents_refused(rank: Rank) -> None:
    """By name, before anything is sent: 'max', and the forms that write into given memory."""
    with open_group(rank) as group:
        x = whole_numbers(rank.world, 3, device=rank.device)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x)
            for name, call in {
                "all_reduce: 'max' has no gradient": lambda: tg.all_reduce(dual, group, "max"),
                "reduce_scatter: 'max' has no gradient": lambda: tg.reduce_scatter(dual, group, reduction="max"),
                "all_reduce_: has no forward-mode derivative": lambda: tg.all_reduce_(dual, group),
                "all_reduce_out: has no forward": lambda: tg.all_reduce_out(torch.empty_like(x), dual, group),
                "all_reduce_out: has no forward-mode": lambda: tg.all_reduce_out(dual, x, group),
                "reduce_scatter_out: has no forward": lambda: tg.reduce_scatter_out(x[:1].clone(), dual, group),
                "all_gather_out: has no forward": lambda: tg.all_gather_out(x.repeat(rank.world, 1), dual, group),
            }.items():
                for mode in (torch.enable_grad, torch.no_grad):
                    with mode(), pytest.raises(NotImplementedError, match=name):
                        call()
        assert same_bits(tg.all_reduce(x, group), x * rank.world)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tangents_are_those_of_one_process(ranks, seed, dtype):
    ranks.run(scenario_tangents, seed, dtype)


def test_tangents_of_gradients(ranks, seed):
    ranks.run(scenario_forward_over_reverse, seed)


def test_tangents_without_a_derivative_are_refused_by_name(ranks, seed):
    ranks.run(scenario_tangents_refused, seed)
