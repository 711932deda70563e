"""Evaluations are pure, also those by another recipe than the training's."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH = 32
TRAINING = tg.DelayedScaling(amax_history_len=6)
OTHERS = {
    "current": tg.Float8CurrentScaling(),
    "shorter history": tg.DelayedScaling(amax_history_len=2),
    "margin": tg.DelayedScaling(amax_history_len=6, margin=2),
    "the same": TRAINING,
}
others = pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)


def new_model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(tg.Linear(WIDTH, WIDTH, device=device), nn.Tanh(), tg.Linear(WIDTH, WIDTH, device=device))


def evaluate(model: nn.Module, recipe: object, x: Tensor) -> Tensor:
    model.eval()
    with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
        y = model(x)
    model.train()
    return y


def train(model: nn.Module, device: str, steps: int, other: object = None) -> list[Tensor]:
    """Losses, and weights and states at the end; ``other`` is the recipe of evaluations between forward and backward,
    and after each step."""
    values, optimizer, losses = torch.Generator().manual_seed(1), torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(steps):
        x = torch.randn(5, WIDTH, generator=values).to(device) * 100
        with tg.fp8_autocast(recipe=TRAINING):
            loss = model(x).square().mean()
        if other is not None:
            evaluate(model, other, x * 3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if other is not None:
            before = tg.fp8_state_dict(model)
            before = {name: state[:, 8:] for name, state in before.items()}
            evaluate(model, other, x * 7)
            after = tg.fp8_state_dict(model)
            assert all(same_bits(state, after[name][:, 8:]) for name, state in before.items())
        losses.append(loss.detach())
    for layer in (model[0], model[2]):
        layer.fp8.update_if_due()
    return [*losses, *model.parameters(), *tg.fp8_state_dict(model).values()]


@others
def test_a_training_goes_on_as_without_evaluations(device: str, other: object) -> None:
    expected = train(new_model(device), device, 4)
    assert all(map(same_bits, train(new_model(device), device, 4, other), expected))


@others
def test_a_resumed_training_may_begin_with_an_evaluation(device: str, other: object) -> None:
    model = new_model(device)
    train(model, device, 3)
    state, results = copy.deepcopy(model.state_dict()), []
    for evaluates in (False, True):
        resumed = new_model(device)
        resumed.load_state_dict(state)
        if evaluates:
            evaluate(resumed, other, torch.ones(3, WIDTH, device=device))
            loaded = resumed.state_dict()
            assert all(same_bits(loaded[name], state[name]) for name in state)
        results.append(train(resumed, device, 3))
    assert all(map(same_bits, *results))


def test_an_evaluation_by_another_recipe_takes_the_scales_of_the_training(device: str) -> None:
    model, other = new_model(device), tg.DelayedScaling(amax_history_len=3)
    x = torch.randn(5, WIDTH, device=device) * 100
    for _ in range(2):
        train(model, device, 2)
        twin = copy.deepcopy(model)
        y = evaluate(model, other, x)
        assert same_bits(y, evaluate(model, TRAINING, x))
        assert same_bits(y, evaluate(twin, other, x))


def test_current_scales_of_an_evaluation_are_its_own(device: str) -> None:
    model, x = new_model(device), torch.randn(5, WIDTH, device=device)
    train(model, device, 2)
    twin = new_model(device)
    twin.load_state_dict({name: value for name, value in model.state_dict().items() if "extra" not in name})
    assert same_bits(evaluate(model, OTHERS["current"], x), evaluate(twin, OTHERS["current"], x))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_repeats_its_scales_after_an_evaluation(device: str, use_reentrant: bool) -> None:
    results = []
    for evaluates in (False, True):
        model, x = new_model(device), torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2)).to(device)
        x.requires_grad_()
        for _ in range(2):
            with tg.fp8_autocast(recipe=TRAINING):
                y = checkpoint(model, x, use_reentrant=use_reentrant)
            if evaluates:
                evaluate(model, OTHERS["current"], x.detach() * 5)
            y.sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(map(same_bits, *results))


def test_an_evaluation_takes_up_nothing_that_an_exception_left(device: str) -> None:
    layer, x = tg.Linear(WIDTH, WIDTH, device=device), torch.randn(5, WIDTH, device=device)
    with contextlib.suppress(KeyError), tg.fp8_autocast(recipe=TRAINING):
        layer(x)
        raise KeyError
    before = layer.get_extra_state()
    evaluate(layer, OTHERS["margin"], x * 2)
    assert same_bits(layer.get_extra_state(), before)


@others
def test_a_graph_of_an_evaluation_follows_the_training(device: str, other: object) -> None:
    results = []
    for graphed in (False, True):
        model, x = new_model(device), torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(3)).to(device)
        train(model, device, 2)
        call = model
        if graphed:
            with torch.no_grad(), tg.fp8_autocast(recipe=other):
                call = tg.make_graphed_callables(lambda x, model=model: model(x), (x,))
        found = []
        for _ in range(2):
            found += [evaluate_with(call, other, x * 50).clone(), *train(model, device, 2)]
        results.append(found)
    assert all(map(same_bits, *results))


def evaluate_with(call: Callable[[Tensor], Tensor], recipe: object, x: Tensor) -> Tensor:
    with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
        return call(x)


def trained_state(device: str, steps: int) -> dict[str, Tensor]:
    model = new_model(device)
    train(model, device, steps)
    return copy.deepcopy(model.state_dict())


def resumed_model(device: str, state: dict[str, Tensor], is_frozen: bool = False) -> nn.Sequential:
    model = new_model(device)
    model.load_state_dict(state)
    model[0].weight.requires_grad_(not is_frozen)
    return model


def captured_evaluation(model: nn.Module, recipe: object, device: str) -> Callable[[Tensor], Tensor]:
    with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
        return tg.make_graphed_callables(lambda x: model(x), (torch.ones(5, WIDTH, device=device),))


@pytest.mark.parametrize("other", [OTHERS["current"], OTHERS["the same"]], ids=["current", "the same"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_graph_of_a_resumed_evaluation_follows_the_training(device: str, other: object, is_frozen: bool) -> None:
    """It is captured before the training goes on, and replays behind loads of other states, too."""
    states, results = [trained_state(device, steps) for steps in (2, 4)], []
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(3)).to(device) * 50
    for graphed in (False, True):
        model = resumed_model(device, states[0], is_frozen)
        call = captured_evaluation(model, other, device) if graphed else model
        found = [evaluate_with(call, other, x).clone()]
        for state in (states[1], None, None, states[0], None):
            if state is not None:
                model.load_state_dict(state)
                found.append(evaluate_with(call, other, x).clone())
            found += [*train(model, device, 2), evaluate_with(call, other, x).clone()]
        results.append(found)
    assert call.te_graph.info()["forward_replays"] == 8
    assert all(map(same_bits, *results))


def test_a_graph_of_an_evaluation_that_is_to_take_other_scales_says_when_to_capture(device: str) -> None:
    model, other, x = (
        resumed_model(device, trained_state(device, 2)),
        OTHERS["margin"],
        torch.ones(5, WIDTH, device=device),
    )
    call = captured_evaluation(model, other, device)
    evaluate_with(call, other, x)
    train(model, device, 1)
    with pytest.raises(
        RuntimeError, match=r"Capture evaluations by another recipe .* after the first call that trains"
    ):
        evaluate_with(call, other, x)
    call.te_graph.reset()
    call = captured_evaluation(model, other, device)
    found = evaluate_with(call, other, x)
    assert same_bits(found, evaluate(copy.deepcopy(model), other, x))


def test_a_weight_that_moves_is_evaluated_as_the_loaded_state_says(device: str) -> None:
    """By the scale of its cast there, which is not the present one, also where the layer has evaluated before."""
    model, x = new_model(device), torch.ones(5, WIDTH, device=device)
    train(model, device, 3)
    with torch.no_grad():
        model[0].weight.mul_(3)
    with tg.fp8_autocast(recipe=TRAINING):
        model(x)
    state, results = copy.deepcopy(model.state_dict()), []
    for evaluates in (False, True):
        resumed = resumed_model(device, state)
        if evaluates:
            evaluate(resumed, TRAINING, x)
            with torch.no_grad(), tg.fp8_autocast(recipe=TRAINING):
                tg.make_graphed_callables(resumed, (x,))  # puts back what is recorded
            resumed.te_graph.reset()
        resumed._apply(torch.clone)
        results.append(evaluate(resumed, TRAINING, x))
    assert same_bits(*results)
