"""Evaluations with other weights in place of a model's, such as their averages, in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor, nn
from torch.func import functional_call

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH, BATCH = 32, 8
RECIPE = tg.DelayedScaling(amax_history_len=3)


def new_model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    first, second, third = (tg.Linear(WIDTH, WIDTH, device=device) for _ in range(3))
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), third)


def averages_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() * 0.25 for name, parameter in model.named_parameters()}


def by_functional_call(model: nn.Module, averages: dict[str, Tensor], x: Tensor) -> Tensor:
    return functional_call(model, averages, (x,))


def by_data(model: nn.Module, averages: dict[str, Tensor], x: Tensor) -> Tensor:
    own = {name: parameter.data for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.data = averages[name]
    y = model(x)
    for name, parameter in model.named_parameters():
        parameter.data = own[name]
    return y


WAYS = {"functional_call": by_functional_call, "data": by_data}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


class Training:
    """Steps of two micro-batches."""

    def __init__(self, device: str) -> None:
        self.device, self.model = device, new_model(device)
        self.averages = averages_of(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.losses: list[Tensor] = []

    def batch(self, number: int) -> Tensor:
        return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(number)).to(self.device)

    def micro_batch(self, number: int) -> None:
        with tg.fp8_autocast(recipe=RECIPE):
            loss = self.model(self.batch(number) * (1 + number)).square().mean()
        loss.backward()
        self.losses.append(loss.detach())

    def evaluate(self, way: Callable[..., Tensor]) -> None:
        with torch.no_grad(), tg.fp8_autocast(recipe=RECIPE):
            way(self.model, self.averages, self.batch(99))

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, between: Callable[[Training], Any]) -> list[Tensor]:
        """What comes of it, with calls of ``between`` in the middle of each step."""
        for number in range(0, 8, 2):
            self.micro_batch(number)
            between(self)
            self.micro_batch(number + 1)
            self.step()
        scales = [state[:, 8:] for state in tg.fp8_state_dict(self.model).values()]
        return [*self.losses, *self.model.parameters(), *scales]


def captures(training: Training) -> None:
    """What writes weights, which are put back."""
    model = training.model

    def program(x: Tensor) -> Tensor:
        y = model(x)
        for parameter in model.parameters():
            parameter.mul_(0.5)
        return y

    with torch.no_grad(), tg.fp8_autocast(recipe=RECIPE):
        tg.make_graphed_callables(program, (training.batch(98),))


def resumes(training: Training) -> None:
    state = {name: value.clone() for name, value in training.model.state_dict().items()}
    gradients = [parameter.grad for parameter in training.model.parameters()]
    training.model = new_model(training.device)
    training.model.load_state_dict(state)
    training.optimizer = torch.optim.SGD(training.model.parameters(), lr=0.5)
    for parameter, gradient in zip(training.model.parameters(), gradients, strict=True):
        parameter.grad = gradient


@ways
@pytest.mark.parametrize("then", [lambda training: None, captures, resumes], ids=["", "captures", "resumes"])
def test_they_change_nothing_of_a_training(device: str, way: Callable[..., Tensor], then: Callable) -> None:
    expected = Training(device).run(lambda training: None)

    def between(training: Training) -> None:
        training.evaluate(way)
        then(training)

    assert all(map(same_bits, Training(device).run(between), expected))


@ways
def test_they_change_nothing_of_a_training_from_graphs(device: str, way: Callable[..., Tensor]) -> None:
    expected = Training(device).run(lambda training: None)
    training = Training(device)
    with tg.fp8_autocast(recipe=RECIPE):
        graphed = tg.make_graphed_callables(training.model, (training.batch(0),))
    assert all(map(same_bits, training.run(lambda training: training.evaluate(way)), expected))
    assert graphed.te_graph.info()["forward_replays"] >= 8


@pytest.mark.parametrize("captured", ["evaluation", "forward", "step"])
def test_graphs_with_such_evaluations_are_bit_equal(device: str, captured: str) -> None:
    """Of the evaluation alone, beside the forwards around it, or a whole step."""
    results = []
    for is_graphed in (False, True):
        training, x, found = Training(device), torch.empty(BATCH, WIDTH, device=device), []
        model, averages, optimizer = training.model, training.averages, training.optimizer
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)

        def evaluate(model: nn.Module = model, averages: dict = averages, x: Tensor = x) -> Tensor:
            with torch.no_grad(), tg.fp8_autocast(recipe=RECIPE):
                return functional_call(model, averages, (x,)).sum()

        def train(model: nn.Module = model, x: Tensor = x) -> Tensor:
            with tg.fp8_autocast(recipe=RECIPE):
                loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        evaluation = tg.graphed(evaluate) if is_graphed and captured == "evaluation" else evaluate

        def forwards(train: Callable = train, evaluation: Callable = evaluation) -> tuple[Tensor, ...]:
            return train(), evaluation().clone(), train()

        def step(forwards: Callable = forwards, optimizer: Any = optimizer) -> tuple[Tensor, ...]:
            losses = forwards()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return *losses, *forwards()

        call = {"evaluation": forwards, "forward": forwards, "step": step}[captured]
        call = tg.graphed(call) if is_graphed and captured != "evaluation" else call
        for number in range(6):
            x.copy_(training.batch(number) * (1 + number))
            found += [value.clone() for value in call()]
            training.optimizer.step()
            training.optimizer.zero_grad(set_to_none=False)
        results.append([*found, *model.parameters(), *(s[:, 8:] for s in tg.fp8_state_dict(model).values())])
        if is_graphed:
            graph = evaluation if captured == "evaluation" else call
            assert graph.info()["forward_replays"] >= 3
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("between", ["region", "calibration"])
def test_averages_are_cast_by_the_present_scale_as_graphs_do(device: str, between: str) -> None:
    """Unchanged ones, before and after an update of scales: which a region has in which they are evaluated, and a
    calibration."""
    results = []
    for is_graphed in (False, True):
        training, found = Training(device), []
        model, averages, x = training.model, training.averages, training.batch(99)

        def evaluate(model: nn.Module = model, averages: dict = averages, x: Tensor = x) -> Tensor:
            with torch.no_grad(), tg.fp8_autocast(recipe=RECIPE):
                return functional_call(model, averages, (x,)).sum()

        call = tg.graphed(evaluate) if is_graphed else evaluate
        for number in range(5):
            training.micro_batch(number)
            training.step()
            if between == "region":
                with tg.fp8_autocast(recipe=RECIPE):
                    model(x).square().mean().backward()
                    found.append(call().clone())
            else:
                found.append(call().clone())
                with tg.fp8_autocast(enabled=False, calibrating=True, recipe=RECIPE):
                    model(x)
            found.append(call().clone())
        results.append(found)
        assert not is_graphed or call.info()["forward_replays"] >= 8
    assert all(map(same_bits, *results))
