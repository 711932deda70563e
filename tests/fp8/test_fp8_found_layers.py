"""FP8 layers that captured code gets to through containers and attributes: their scales are known there, too."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH = 32
RECIPES = {"delayed": tg.DelayedScaling(amax_history_len=3), "current": tg.Float8CurrentScaling()}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
Call = Callable[[Tensor], Tensor]


def a_model(device: str) -> nn.Sequential:
    return nn.Sequential(*(tg.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(2)))


def in_list(model: nn.Module) -> Call:
    held = [nn.Identity(), model]
    return lambda x: held[1](x)


def in_tuple(model: nn.Module) -> Call:
    held = (model,)
    return lambda x: held[0](x)


def in_dictionary(model: nn.Module) -> Call:
    held = {"model": model}
    return lambda x: held["model"](x)


def in_attribute(model: nn.Module) -> Call:
    held = types.SimpleNamespace(model=model)
    return lambda x: held.model(x)


def far_away(model: nn.Module) -> Call:
    held = types.SimpleNamespace(models={"all": [[types.SimpleNamespace(models=(model,))]]})
    return lambda x: held.models["all"][0][0].models[0](x)


def in_list_of_module(model: nn.Module) -> nn.Module:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = [[model]]

        def forward(self, x: Tensor) -> Tensor:
            return self.held[0][0](x)

    return Holder()


WAYS = (in_list, in_tuple, in_dictionary, in_attribute, far_away, in_list_of_module)


def train(model: nn.Module, call: Call, recipe: Any, device: str) -> list[Tensor]:
    """Losses, gradients of weights and FP8 states."""
    values, results = torch.Generator().manual_seed(1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for number in range(4):
        x = (1 + number) * torch.randn(16, WIDTH, generator=values).to(device)
        with tg.fp8_autocast(recipe=recipe):
            loss = call(x).square().mean()
        loss.backward()
        results += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *tg.fp8_state_dict(model).values()]


@recipes
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("has_trained", [False, True], ids=["new", "trained"])
@pytest.mark.one_of(5)
def test_trainings_are_bit_equal(device: str, recipe: Any, way: Callable, has_trained: bool) -> None:
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model, found = a_model(device), []
        if has_trained:
            found += train(model, model, recipe, device)
        call = way(model)
        if is_graphed:
            with tg.fp8_autocast(recipe=recipe):
                call = tg.make_graphed_callables(call, (torch.randn(16, WIDTH, device=device),))
        results.append([*found, *train(model, call, recipe, device)])
        assert not is_graphed or call.te_graph.info()["forward_replays"] == 4
    assert all(map(same_bits, *results))


@recipes
@pytest.mark.parametrize("how", [tg.make_graphed_callables, tg.graphed])
def test_other_layers_and_other_scales_are_seen(device: str, recipe: Any, how: Callable) -> None:
    """Of an evaluation, which reads no weight but its FP8 copy."""
    torch.manual_seed(0)
    held, x = [a_model(device)], torch.randn(16, WIDTH, device=device)
    other_recipe = tg.DelayedScaling(amax_history_len=7)

    def evaluate(x: Tensor) -> Tensor:
        with torch.no_grad():
            return held[0](x)

    def compare(replays: int) -> None:
        with tg.fp8_autocast(recipe=recipe):
            expected = evaluate(x)
            for _ in range(3):
                assert same_bits(call(x), expected)
        assert call.te_graph.info()["forward_replays"] >= replays if how is not tg.graphed else True

    with tg.fp8_autocast(recipe=recipe):
        arguments = () if how is tg.graphed else ((x,),)
        call = how(evaluate, *arguments, on_mismatch="capture")
    compare(3)
    held[0] = a_model(device)
    compare(5)
    train(held[0], held[0], other_recipe, device)  # by which the layers have other scales, and copies, from now on
    compare(5)
    train(held[0], held[0], recipe, device)
    compare(7)
