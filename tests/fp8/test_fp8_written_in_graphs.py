"""Weights that a graph writes itself, and layers that it calls with and without gradients: bit-equal to eager."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from seeds import first_seed
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
RECIPES = {"delayed": tg.DelayedScaling(amax_history_len=3), "current": tg.Float8CurrentScaling()}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
WIDTH = 32
# What a forward does, one letter each, with layer a or b: w writes its weight, n calls it without gradients, g with.
REFUSED = "called with them first|to be trained there before that"


class Program(nn.Module):
    """x [n, WIDTH] -> [n, WIDTH]."""

    def __init__(self, text: str, device: str) -> None:
        super().__init__()
        self.steps = text.split()
        self.a, self.b = (tg.Linear(WIDTH, WIDTH, device=device) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            layer = getattr(self, step[1])
            if step[0] == "w":
                with torch.no_grad():
                    layer.weight.clamp_(-0.15, 0.15).mul_(1.01)
            elif step[0] == "n":
                with torch.no_grad():
                    given = layer(x)
                x = x + 0.5 * given
            else:
                x = x + layer(x)
        return x


def train(text: str, recipe: Any, device: str, is_graphed: bool) -> list[Tensor]:
    """Losses and weights, [...] each, of three steps of two micro-batches, with an evaluation between."""
    torch.manual_seed(0)
    model = Program(text, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    values, results = torch.Generator().manual_seed(1), []

    def sample() -> Tensor:
        return torch.randn(16, WIDTH, generator=values).to(device).requires_grad_()

    with tg.fp8_autocast(recipe=recipe):
        plain = Program(text, device).eval()  # has a place of its own in the scope
        plain.a(sample())
    if is_graphed:
        with tg.fp8_autocast(recipe=recipe):
            tg.make_graphed_callables(model, (torch.zeros(16, WIDTH, device=device, requires_grad=True),))
    for _ in range(3):
        for _ in range(2):
            x = sample()
            with tg.fp8_autocast(recipe=recipe):
                loss = model(x).square().mean()
            loss.backward()
            results += [loss.detach().clone(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
            results.append(model.a(sample().detach()))
        results += [parameter.detach().clone() for parameter in model.parameters()]
    return results


def check(text: str, recipe: Any, device: str) -> bool:
    """Compare graphs of ``text`` with eager execution; whether it is refused, as it has to be."""
    calls = ["".join(step[0] for step in text.split() if step[1] == name) for name in "ab"]
    try:
        expected = train(text, recipe, device, False)
    except RuntimeError as error:  # a weight was written, and cast with others, before the backward of a call
        assert "cast again between this forward and its backward" in str(error)
        return True
    if isinstance(recipe, tg.DelayedScaling) and any(re.match("[nw]+g", each) for each in calls):
        with pytest.raises(RuntimeError, match=REFUSED):
            train(text, recipe, device, True)
        return True
    assert all(map(same_bits, expected, train(text, recipe, device, True))), text
    return False


@recipes
@pytest.mark.parametrize("text", ["ga wa", "gb ga wa", "ga na", "ga na wa", "na nb wa", "wa na gb", "ga gb wa nb"])
def test_programs_are_bit_equal(device: str, recipe: Any, text: str) -> None:
    assert not check(text, recipe, device)


@pytest.mark.parametrize("text", ["na ga", "wa ga", "na wa ga", "wa na ga", "gb wa ga", "wa gb ga", "wa wb ga gb"])
def test_what_delayed_scaling_records_otherwise_in_eager_execution_is_refused(device: str, text: str) -> None:
    assert check(text, RECIPES["delayed"], device)
    assert not check(text, RECIPES["current"], device)


@recipes
@pytest.mark.parametrize("is_graphed", [False, True])
def test_a_write_before_the_backward_is_refused(device: str, recipe: Any, is_graphed: bool) -> None:
    with pytest.raises(RuntimeError, match=f"cast again between this forward and its backward|{REFUSED}"):
        train("ga wa ga", recipe, device, is_graphed)


@recipes
def test_random_programs_are_bit_equal(device: str, recipe: Any) -> None:
    seed = first_seed("FP8 weights written in graphs")
    for number in range(seed, seed + 6):
        rng = random.Random(number)
        text = " ".join(rng.choice("wngg") + rng.choice("aab") for _ in range(rng.randint(2, 6)))
        if "g" in text:
            check(text, recipe, device)


def run_functions(text: str, recipe: Any, device: str, is_graphed: bool) -> list[Tensor]:
    """Losses and weights, [...] each, of a function: t trains both layers, a or b one, s steps, e evaluates."""
    torch.manual_seed(0)
    model = nn.ModuleDict({name: tg.Linear(WIDTH, WIDTH, device=device) for name in "ab"})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.zeros(16, WIDTH, device=device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step(model: nn.Module = model, x: Tensor = x, optimizer: Any = optimizer) -> list[Tensor]:
        results = []
        for letter in text:
            if letter == "s":
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
                continue
            with tg.fp8_autocast(recipe=recipe), torch.set_grad_enabled(letter != "e"):
                y = x
                for name in letter if letter in "ab" else "ab":
                    y = y + model[name](y)
                loss = y.square().mean()
            if letter != "e":
                loss.backward()
            results.append(loss.detach())
        return results

    called, found = tg.graphed(step) if is_graphed else step, []
    for _ in range(5):
        x.normal_()
        found += [loss.clone() for loss in called()]
        found += [parameter.detach().clone() for parameter in model.parameters()]
    if is_graphed:
        assert called.info()["forward_replays"] == 4
    return found


@recipes
@pytest.mark.parametrize("text", ["tsts", "tts", "tse", "te", "tstse", "tesets", "tasbs", "tetesbsa"])
@pytest.mark.one_of(3)
def test_functions_with_steps_of_an_optimizer_are_bit_equal(device: str, recipe: Any, text: str) -> None:
    assert all(map(same_bits, *(run_functions(text, recipe, device, is_graphed) for is_graphed in (False, True))))


def test_a_function_that_writes_a_weight_before_its_layer_is_called_is_refused(device: str) -> None:
    with pytest.raises(RuntimeError, match=REFUSED):
        run_functions("asbs", RECIPES["delayed"], device, True)


@recipes
def test_a_function_that_steps_a_layer_which_it_does_not_call_is_refused_or_bit_equal(device: str, recipe: Any) -> None:
    """Eagerly it is cast, and recorded, with the layer that is called behind the step."""

    def results(is_graphed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(tg.Linear(WIDTH, WIDTH, device=device) for _ in range(2)))
        x = torch.ones(16, WIDTH, device=device)
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.1), []

        def train(*layers: nn.Module) -> None:
            y = x
            with tg.fp8_autocast(recipe=recipe):
                for layer in layers:
                    y = layer(y)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        def twice() -> None:
            for _ in range(2):
                train(model[0])

        train(*model)
        called = tg.graphed(twice) if is_graphed else twice
        for _ in range(3):
            called()
            train(*model)
            found += [parameter.detach().clone() for parameter in model.parameters()]
            found += [layer.get_extra_state()[:, 8:] for layer in model]
        return found

    if isinstance(recipe, tg.DelayedScaling):
        with pytest.raises(RuntimeError, match=REFUSED):
            results(True)
    else:
        assert all(map(same_bits, results(False), results(True)))


@recipes
def test_random_functions_are_bit_equal(device: str, recipe: Any) -> None:
    seed = first_seed("FP8 functions with steps")
    for number in range(seed, seed + 4):
        rng = random.Random(number)
        text = "t" + "".join(rng.choice("tabse") for _ in range(rng.randint(2, 6)))
        expected, found = (run_functions(text, recipe, device, is_graphed) for is_graphed in (False, True))
        assert all(map(same_bits, expected, found)), text


@recipes
@pytest.mark.parametrize("others", [1, 2])
@pytest.mark.parametrize("own_inside", [None, "first", "last"])
def test_a_graph_that_calls_a_layer_with_other_weights_leaves_no_cast_that_is_taken_for_its_own(
    recipe, others, own_inside, device
):
    """Teachers evaluated by one layer, and fast weights: the next call of the layer casts its own weight again."""

    def results(is_graphed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer = tg.Linear(WIDTH, WIDTH, device=device)
        weights = [{name: torch.randn_like(p) for name, p in layer.named_parameters()} for _ in range(others)]
        x, found = torch.randn(16, WIDTH, device=device), []

        def evaluate(x: Tensor) -> list[Tensor]:
            calls = [lambda x, given=given: torch.func.functional_call(layer, given, (x,)) for given in weights]
            if own_inside is not None:
                calls.insert(0 if own_inside == "first" else len(calls), layer)
            with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
                return [call(x).sum() for call in calls]

        def train() -> None:
            with tg.fp8_autocast(recipe=recipe):
                loss = layer(x).sum()
            loss.backward()
            found.append(loss.detach().clone())
            with torch.no_grad():
                layer.weight -= 0.01 * layer.weight.grad
            layer.zero_grad()

        train()
        call = tg.graphed(evaluate) if is_graphed else evaluate
        for _ in range(4):
            found += [one.clone() for one in call(x)]
            with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
                found.append(layer(x).sum())
            train()
        assert not is_graphed or call.info()["forward_replays"] > 0
        return found

    for got, expected in zip(results(True), results(False), strict=True):
        assert same_bits(got, expected)
