"""te_graph.Linear over ranks: tensor and sequence parallelism beside one process.

The reference is the same two layers in one process, which all ranks run as well.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fp8_parallel import RECIPES, assert_close, part_of, region, with_group
from ranks import WORLDS, Rank, ranks_of
from torch import Tensor, nn
from torch.nn import functional as F

import te_graph as tg

ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
WIDTH, HIDDEN, TOKENS = 32, 64, 6


class MLP(nn.Module):
    """x [n, WIDTH] -> [n, WIDTH]; over the ranks of ``group``, if there is one."""

    def __init__(self, group: tg.PeerGroup | None, sequence_parallel: bool, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        options = {"device": device, "dtype": dtype}
        column, row = {}, {}
        if group is not None:
            shared = {"tp_group": group, "sequence_parallel": sequence_parallel}
            column, row = {"parallel_mode": "column", **shared}, {"parallel_mode": "row", **shared}
        self.up = tg.Linear(WIDTH, HIDDEN, **options, **column)
        self.down = tg.Linear(HIDDEN, WIDTH, **options, **row)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


@with_group
def train_beside_one_process(rank: Rank, group: tg.PeerGroup, recipe_name: str, sequence_parallel: bool) -> None:
    recipe, device, dtype = RECIPES[recipe_name], rank.device, torch.float32
    # Up to the order of sums, and in FP8 up to the scales, which parts of a tensor have of their own.
    tolerance = 1e-5 if recipe is None else 0.35
    torch.manual_seed(5)
    model = MLP(group, sequence_parallel, dtype, device)
    torch.manual_seed(5)
    whole = MLP(None, False, dtype, device)
    assert torch.equal(model.up.weight, part_of(whole.up.weight, rank))
    assert torch.equal(model.down.weight, part_of(whole.down.weight, rank, 1))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, whole)]
    for _ in range(3):
        x = torch.randn(TOKENS * rank.world, WIDTH, device=device)
        dist.broadcast(x, 0)
        own = (part_of(x, rank) if sequence_parallel else x).clone().requires_grad_()
        both = x.clone().requires_grad_()
        with region(recipe, dist.group.WORLD if recipe_name == "delayed" else None):
            y = model(own)
        with region(recipe):
            expected = whole(both)
        part = part_of(expected, rank) if sequence_parallel else expected
        assert_close("y", y, part, tolerance)
        y.square().sum().backward()
        expected.square().sum().backward()
        grad = part_of(both.grad, rank) if sequence_parallel else both.grad
        assert_close("x.grad", own.grad, grad, tolerance)
        for name, parameter in model.named_parameters():
            of_whole = whole.get_parameter(name).grad
            dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
            of_part = of_whole if dim is None else part_of(of_whole, rank, dim)
            assert_close(name, parameter.grad, of_part, tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_parts_of_layers_train_as_one_process(ranks, recipe_name: str, sequence_parallel: bool) -> None:
    ranks.run(train_beside_one_process, 0, recipe_name, sequence_parallel)


@with_group
def graphs_beside_eager(rank: Rank, group: tg.PeerGroup, recipe_name: str, sequence_parallel: bool) -> None:
    recipe, device = RECIPES[recipe_name], rank.device
    results = []
    for graphed in (False, True):
        torch.manual_seed(5)
        model = MLP(group, sequence_parallel, torch.bfloat16, device)
        sample = torch.randn(TOKENS, WIDTH, device=device, dtype=torch.bfloat16, requires_grad=True)
        if graphed:
            with region(recipe):
                tg.make_graphed_callables(model, (sample,))
        torch.manual_seed(6)
        found = []
        for _ in range(4):
            x = torch.randn(TOKENS, WIDTH, device=device).to(torch.bfloat16)
            dist.broadcast(x, 0)
            x.requires_grad_()
            with region(recipe):
                y = model(x)
            y.float().square().sum().backward()
            found += [y.detach().clone(), x.grad, *(p.grad.clone() for p in model.parameters())]
        assert not graphed or model.te_graph.info()["forward_replays"] == 4
        results.append([*found, model.up.get_extra_state(), model.down.get_extra_state()])
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_graphs_of_parts_are_bit_equal(ranks, recipe_name: str, sequence_parallel: bool) -> None:
    ranks.run(graphs_beside_eager, 0, recipe_name, sequence_parallel)


@with_group
def bad_arguments(rank: Rank, group: tg.PeerGroup) -> None:
    for error, message, options in (
        (ValueError, "expected parallel_mode to be 'column', 'row' or None, got 'rows'", {"parallel_mode": "rows"}),
        (TypeError, "expected tp_group to be a te_graph.PeerGroup, got NoneType", {"parallel_mode": "row"}),
        (ValueError, "expected parallel_mode='column' or 'row' with tp_group", {"tp_group": group}),
        (ValueError, "expected parallel_mode='column' or 'row' with tp_group", {"sequence_parallel": True}),
    ):
        with pytest.raises(error, match=message):
            tg.Linear(16, 16, **options)
    if rank.world > 1:
        for mode, name in (("column", "out_features"), ("row", "in_features")):
            with pytest.raises(ValueError, match=f"expected {name} that the {rank.world} ranks of tp_group divide"):
                tg.Linear(17, 17, parallel_mode=mode, tp_group=group)
        with pytest.raises(ValueError, match=f"expected out_features, in 2 blocks, that the {rank.world} ranks"):
            tg.Linear(16, 3 * rank.world, parallel_mode="column", tp_group=group, stride=2)


def test_bad_arguments(ranks) -> None:
    ranks.run(bad_arguments, 0)


@with_group
def return_bias(rank: Rank, group: tg.PeerGroup) -> None:
    """The bias of a row-parallel layer is left to the caller, with its gradient summed over the rows."""
    layer = tg.Linear(32, 16, parallel_mode="row", tp_group=group, sequence_parallel=True, return_bias=True)
    layer = layer.to(rank.device)
    y, bias = layer(torch.randn(2 * rank.world, 32 // rank.world, device=rank.device))
    assert y.shape == (2, 16)
    (y + bias).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full_like(layer.bias, 2.0 * rank.world))


def test_return_bias(ranks) -> None:
    ranks.run(return_bias, 0)
