"""Captures, and trainings that they are none of the business of: by other recipes, on other threads, refused ones."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg
from te_graph.common.kept_state import state_kept

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH = 32
DELAYED = tg.DelayedScaling(amax_history_len=8)
OTHERS = {"current": tg.Float8CurrentScaling(), "shorter": tg.DelayedScaling(amax_history_len=2)}
others = pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)


def a_layer(device: str) -> tg.Linear:
    return tg.Linear(WIDTH, WIDTH, device=device)


def region(recipe: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if recipe is None else tg.fp8_autocast(recipe=recipe)


def train(model: nn.Module, recipe: Any, xs: list[Tensor]) -> list[float]:
    """Losses for xs [16, WIDTH] each."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for x in xs:
        with region(recipe):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_on_thread(*arguments: Any) -> list[float]:
    """As ``train``, by a thread of its own."""
    losses: list[float] = []
    thread = threading.Thread(target=lambda: losses.extend(train(*arguments)))
    thread.start()
    thread.join()
    return losses


def inputs(device: str, count: int) -> list[Tensor]:
    values = torch.Generator().manual_seed(1)
    scales = [1 + 3 * (number % 3 == 1) for number in range(count)]
    return [(scale * torch.randn(16, WIDTH, generator=values)).to(device) for scale in scales]


class Critic(nn.Module):
    """Holds a generator, which it never calls."""

    def __init__(self, generator: nn.Module, device: str) -> None:
        super().__init__()
        self.layer, self.generator = a_layer(device), [generator]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@others
@pytest.mark.parametrize("kind", ["callable", "function"])
def test_what_is_held_and_not_called_stays_where_it_is(device: str, other: Any, kind: str) -> None:
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        generator = a_layer(device)
        critic, xs, found = Critic(generator, device), inputs(device, 8), []
        for number, x in enumerate(xs):
            found += train(generator, DELAYED, [x])
            if is_graphed and number == 3 and kind == "callable":
                with tg.fp8_autocast(recipe=other):
                    tg.make_graphed_callables(critic, (xs[0],), allow_unused_input=True)
            with tg.fp8_autocast(recipe=other):
                called = tg.graphed(critic.forward) if kind == "function" and is_graphed else critic
                with torch.no_grad():
                    found += [called(x).sum().item() for _ in range(2)]
        results.append((found, tg.fp8_state_dict(nn.Sequential(generator))["0"]))
    assert results[0][0] == results[1][0]
    assert same_bits(results[0][1], results[1][1])


@others
def test_an_evaluation_by_another_recipe_is_captured(device: str, other: Any) -> None:
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        layer, xs = a_layer(device), inputs(device, 6)
        found = train(layer, DELAYED, xs)

        def evaluate(x: Tensor, layer: nn.Module = layer) -> Tensor:
            with torch.no_grad():
                return layer(x)

        called, given = tg.graphed(evaluate) if is_graphed else evaluate, torch.zeros(16, WIDTH, device=device)
        for x in xs:
            given.copy_(x)
            with tg.fp8_autocast(recipe=other):
                found.append(called(given).sum().item())
            found += train(layer, DELAYED, [x])
        if is_graphed:
            assert called.info()["forward_replays"] == 5
        results.append(found)
    assert results[0] == results[1]


@pytest.mark.parametrize("recipe", [DELAYED, tg.DelayedScaling(amax_history_len=7)], ids=["same recipe", "another"])
def test_a_thread_goes_on_training_while_a_capture_is_undone(device: str, recipe: Any) -> None:
    """The member is the main thread's until the other one calls it."""
    results = []
    for is_kept in (False, True):
        torch.manual_seed(0)
        mine, its, xs, found = a_layer(device), a_layer(device), inputs(device, 9), []
        train(mine, DELAYED, xs[:2])
        found += train(its, recipe, xs[:3])
        with state_kept() if is_kept else contextlib.nullcontext():
            found += train_on_thread(its, recipe, xs[3:6])
        found += train_on_thread(its, recipe, xs[6:])
        results.append(found)
    assert results[0] == results[1]


class LocalLoss(nn.Module):
    """With a loss of its own, once it is asked for."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer, self.is_local = a_layer(device), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.is_local:
            y.square().mean().backward()
            y = y.detach()
        return x + y


@pytest.mark.parametrize("recipe", [None, DELAYED, OTHERS["current"]], ids=["none", "delayed", "current"])
def test_a_refused_capture_leaves_no_gradients(device: str, recipe: Any) -> None:
    model, x = LocalLoss(device), torch.randn(16, WIDTH, device=device, requires_grad=True)
    model.is_local = True
    with region(recipe):
        model.layer(x.detach())
    for before in (None, torch.ones(WIDTH, WIDTH, device=device)):
        model.layer.weight.grad = before
        with region(recipe), pytest.raises(RuntimeError):
            tg.make_graphed_callables(model, (x,))
        assert model.layer.weight.grad is before
        assert before is None or same_bits(before, torch.ones_like(before))


def a_training_step(model: nn.Module, x: Tensor, is_graphed: bool) -> Callable[[], Tensor]:
    """Adds to the gradients of ``model`` for what is in x [16, WIDTH], and returns the loss."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return tg.graphed(step) if is_graphed else step


@pytest.mark.parametrize("text", ["NAAA", "AACAA", "ABBB", "NNBBA", "AABBAACC"])
def test_a_function_meets_other_regions(device: str, text: str) -> None:
    recipes = {"N": None, "A": DELAYED, "B": OTHERS["shorter"], "C": OTHERS["current"]}
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        layer, x = a_layer(device), torch.zeros(16, WIDTH, device=device)
        called, found = a_training_step(layer, x, is_graphed), []
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        for letter, given in zip(text, inputs(device, len(text)), strict=True):
            x.copy_(given)
            with region(recipes[letter]):
                found.append(called().clone())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        results.append([*found, layer.weight.detach()])
    assert all(map(same_bits, *results))


def test_a_graphed_function_goes_on_from_the_middle_of_an_accumulation(device: str) -> None:
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        layer, xs = a_layer(device), inputs(device, 12)
        for x in xs[:3]:
            with tg.fp8_autocast(recipe=DELAYED):
                layer(x).square().mean().backward()
        model = copy.deepcopy(layer)
        x = torch.zeros(16, WIDTH, device=device)
        called, found = a_training_step(model, x, is_graphed), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for number, given in enumerate(xs):
            x.copy_(given)
            with tg.fp8_autocast(recipe=DELAYED):
                found.append(called().clone())
            if number % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        results.append([*found, model.weight.detach()])
    assert all(map(same_bits, *results))


@others
def test_a_layer_that_has_only_evaluated_elsewhere_is_captured_where_it_trains(device: str, other: Any) -> None:
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model, xs = nn.Sequential(a_layer(device)), inputs(device, 6)
        with torch.no_grad(), tg.fp8_autocast(recipe=other):
            model(xs[0])
        if is_graphed:
            with tg.fp8_autocast(recipe=DELAYED):
                tg.make_graphed_callables(model, (xs[0],))
        results.append(train(model, DELAYED, xs))
        assert not is_graphed or model.te_graph.info()["forward_replays"] == 6
    assert results[0] == results[1]


@pytest.mark.parametrize("text", ["AAb", "Abab", "aBAB", "AAbbAA", "AABB"])
def test_updates_stay_due_for_layers_that_another_thread_has_called(device: str, text: str) -> None:
    """Blocks are captured one after the other, by another recipe on another thread (lower case), where the first one's
    capture updates the scales of a scope that the second one is in still."""
    recipes = {"a": DELAYED, "b": tg.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", margin=1)}
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model, xs, found = nn.Sequential(a_layer(device), a_layer(device)), inputs(device, len(text)), []
        if is_graphed:
            with tg.fp8_autocast(recipe=DELAYED):
                samples = ((xs[0],), (xs[0].clone().requires_grad_(),))
                tg.make_graphed_callables(tuple(model), samples, on_mismatch="capture")

        def accumulate(x: Tensor, recipe: Any, model: nn.Module = model, found: list[Tensor] = found) -> None:
            """Of x [16, WIDTH]."""
            with tg.fp8_autocast(recipe=recipe):
                model(x).square().mean().backward()
            found += [parameter.grad.clone() for parameter in model.parameters()]

        for letter, x in zip(text, xs, strict=True):
            thread = threading.Thread(target=accumulate, args=(x, recipes[letter.lower()]))
            if letter.isupper():
                thread.run()
            else:
                thread.start()
                thread.join()
        results.append(found)
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("recipe", [DELAYED, OTHERS["current"]], ids=["delayed", "current"])
@pytest.mark.parametrize("other_trains", [False, True])
def test_a_function_writes_a_weight_that_another_layer_has_as_well(
    device: str, recipe: Any, other_trains: bool
) -> None:
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        layer, other, x = a_layer(device), a_layer(device), torch.zeros(16, WIDTH, device=device)
        other.weight = layer.weight
        layer.weight.grad, layer.bias.grad = map(torch.zeros_like, layer.parameters())
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)

        def step(x: Tensor, layer: nn.Module = layer, optimizer: Any = optimizer) -> Tensor:
            with tg.fp8_autocast(recipe=recipe):
                layer(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
                return layer(x).sum()

        def evaluate(x: Tensor, other: nn.Module = other) -> Tensor:
            with tg.fp8_autocast(recipe=recipe), torch.set_grad_enabled(other_trains):
                return other(x).sum().detach()

        called, found = tg.graphed(step) if is_graphed else step, [evaluate(x)]
        for given in inputs(device, 5):
            x.copy_(given)
            found.append(called(x).clone())
        results.append([*found, evaluate(x), layer.weight.detach()])
        assert not is_graphed or called.info()["forward_replays"] >= 3
    assert all(map(same_bits, *results))


@others
def test_a_layer_that_was_captured_and_never_called_is_as_new(device: str, other: Any) -> None:
    """An evaluation in the region of its first training sees no other scales."""
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model, xs, found = nn.Sequential(a_layer(device), a_layer(device)), inputs(device, 4), []
        if is_graphed:
            with tg.fp8_autocast(recipe=other):
                tg.make_graphed_callables(model, (xs[0],), on_mismatch="eager")
        for x in xs:
            with tg.fp8_autocast(recipe=DELAYED):
                model(100 * x).square().mean().backward()
                with torch.no_grad():
                    found.append(model(x).sum())
        results.append(found)
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("around", [tg.Float8CurrentScaling(), DELAYED, None], ids=["current", "the same", "none"])
def test_a_refused_capture_leaves_evaluations_by_other_recipes_their_casts(device: str, around: Any) -> None:
    """They go on with the cast of their first one for as long as the weight stays as it is."""
    by, xs = tg.DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", margin=1), inputs(device, 6)
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(3)
        layer = a_layer(device)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)

        def evaluate_and_train(x: Tensor, layer: nn.Module = layer) -> tuple[Tensor, Tensor]:
            with torch.no_grad(), region(by):
                evaluated = layer(x).sum()
            with region(DELAYED):
                loss = layer(x).square().mean()
            loss.backward()
            return evaluated, loss.detach()

        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        place, seen, refusals = torch.empty_like(xs[0]), [], 0
        call = tg.graphed(evaluate_and_train) if is_graphed else evaluate_and_train
        for number, x in enumerate(xs):
            place.copy_(x)
            with region(around):
                try:
                    seen += map(torch.clone, call(place))
                except tg.CaptureError:
                    refusals += 1
                    seen += evaluate_and_train(place)
            if number == 0:
                optimizer.step()
        assert (refusals > 0) == is_graphed
        results.append([*seen, layer.weight.grad])
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("kind", ["callable", "function over a layer", "function"])
def test_layers_that_come_after_a_refused_capture_have_scales_of_their_own(device: str, kind: str) -> None:
    """The capture has moved layers to its scope, and back."""
    recipe, results = OTHERS["shorter"], []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        kept, xs = a_layer(device), inputs(device, 3)
        found = train(kept, recipe, xs)
        found += train_and_read_on_host(kind if is_graphed else None, recipe, xs, device)
        gc.collect()
        layers = [a_layer(device) for _ in range(12)]
        for number, layer in enumerate(layers * 2):
            found += train(layer, recipe, [(1 + 20 * (number % 3)) * xs[0]])
        results.append(found)
        del layers
        gc.collect()
    assert results[0] == results[1]


def train_and_read_on_host(kind: str | None, recipe: Any, xs: list[Tensor], device: str) -> list[float]:
    """Losses, for xs [16, WIDTH] each, of layers of which a capture of that ``kind`` by ``recipe`` is refused."""
    model = nn.Sequential(a_layer(device), a_layer(device))
    losses = train(model, DELAYED, xs)

    def scaled(x: Tensor) -> Tensor:
        y = model(x)
        return y * y.sum().item()

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return scaled(x)

    with region(recipe), pytest.raises(RuntimeError, match="on the host") if kind else contextlib.nullcontext():
        if kind == "function":
            call = tg.graphed(lambda x: scaled(x).detach(), on_mismatch="raise")
            for _ in range(2):
                call(xs[0])
        elif kind is not None:
            tg.make_graphed_callables(Scaled() if kind == "callable" else scaled, (xs[0],))
    return losses
