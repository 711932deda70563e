"""Weights that a graph reads through tensors of its own, such as ``detach()`` makes: replays cast their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp8_recipes import BOTH_KINDS, both_kinds
from tensor_lists import all_same_bits
from torch import Tensor, nn
from torch.func import functional_call

import te_graph as tg
from te_graph import _C

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH = 32
Weights = dict[str, Tensor]


def in_state(layer: nn.Module) -> Weights:
    return {name: value for name, value in layer.state_dict().items() if isinstance(value, Tensor) and "_" not in name}


def each(make: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], Weights]:
    return lambda layer: {name: make(parameter) for name, parameter in layer.named_parameters()}


WAYS = {
    "detach": each(lambda p: p.detach()),
    "detach twice": each(lambda p: p.detach().detach()),
    "data": each(lambda p: p.data),
    "view": each(lambda p: p.detach().view(-1).view(p.shape)),
    "parameter": each(lambda p: nn.Parameter(p, requires_grad=False)),
    "state_dict": in_state,
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def new_layer(device: str) -> tuple[nn.Module, Tensor]:
    """With an input, [16, WIDTH]."""
    torch.manual_seed(0)
    return tg.Linear(WIDTH, WIDTH, device=device), torch.randn(16, WIDTH, device=device)


@both_kinds
@ways
def test_an_evaluation_follows_weights_that_change(device: str, recipe: Any, way: Callable) -> None:
    results = []
    for is_graphed in (False, True):
        (layer, x), found = new_layer(device), []

        def evaluate(layer: nn.Module = layer, x: Tensor = x) -> Tensor:
            with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
                return functional_call(layer, way(layer), (x,))

        call = tg.graphed(evaluate) if is_graphed else evaluate
        for _ in range(4):
            found.append(call().clone())
            with torch.no_grad():
                layer.weight.mul_(1.5)
        assert not is_graphed or call.info()["forward_replays"] > 1
        results.append(found)
    assert all_same_bits(*results)


class Frozen(nn.Module):
    """x [n, WIDTH] -> [n, WIDTH], with no gradients for the parameters."""

    def __init__(self, layer: nn.Module, way: Callable) -> None:
        super().__init__()
        self.layer, self.way = layer, way

    def forward(self, x: Tensor) -> Tensor:
        return functional_call(self.layer, self.way(self.layer), (x,))


@ways
def test_a_callable_follows_weights_that_change(device: str, way: Callable) -> None:
    recipe, results = tg.Float8CurrentScaling(), []
    for is_graphed in (False, True):
        (layer, x), found = new_layer(device), []
        model = Frozen(layer, way)
        if is_graphed:
            with tg.fp8_autocast(recipe=recipe):
                model(x)
                tg.make_graphed_callables(model, (x.clone().requires_grad_(),), allow_unused_input=True)
        for _ in range(4):
            x.requires_grad_().grad = None
            with tg.fp8_autocast(recipe=recipe):
                y = model(x)
            y.square().mean().backward()
            found += [y.detach().clone(), x.grad]
            with torch.no_grad():
                layer.weight.mul_(1.5)
        results.append(found)
    assert all_same_bits(*results)


def test_other_weights_whose_memory_is_gone_are_a_mismatch(device: str) -> None:
    layer, x = new_layer(device)
    steps, others = _C.HostSteps(), {name: 2 * p.detach() for name, p in layer.named_parameters()}
    with torch.no_grad(), tg.fp8_autocast(recipe=BOTH_KINDS["current"]):
        functional_call(layer, others, (x,))
        with steps:
            functional_call(layer, others, (x,))
        assert not steps.change()
        others.clear()
        assert steps.change() == "the memory of a weight that a te_graph.Linear was called with was freed"
