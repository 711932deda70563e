"""Converted layers whose weights are read by others are named at the first step of an optimizer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
RECIPE = tg.Float8CurrentScaling()
WIDTH = 32


class Attention(nn.Module):
    """Reads the weight of a layer, and calls the other one."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, 32]"""
        return self.proj(F.linear(x, self.qkv.weight, self.qkv.bias))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        """x [n, 32]"""
        return self.mlp(self.attention(x))


class Experts(nn.Module):
    """Calls one of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """x [n, 32]"""
        return self.experts[1](x)


class RegionEach(nn.Sequential):
    """Calls each of its modules in a region of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """x [n, 32]"""
        for module in self:
            with tg.fp8_autocast(recipe=RECIPE):
                x = module(x)
        return x


class Turns(nn.Module):
    """Has a head for each of two tasks, which come by turns, and calls body and head in regions of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = (Called() for _ in range(3))
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """x [n, 32]"""
        self._calls += 1
        head = self.first if self._calls % 2 else self.second
        with tg.fp8_autocast(recipe=RECIPE):
            y = self.body(x)
        with tg.fp8_autocast(recipe=RECIPE):
            return head(y)


class Called(nn.Module):
    """Calls both of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """x [n, 32]"""
        return self.b(torch.relu(self.a(x)))


def converted(model: nn.Module) -> nn.Module:
    tg.convert_to_fp8(model, min_features=16)
    return model


def step(model: nn.Module) -> None:
    with tg.fp8_autocast(recipe=RECIPE):
        y = model(torch.randn(4, WIDTH))
    if y.requires_grad:
        y.sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Callable[[nn.Module], list[str]]:
    """What a step of a model warns of."""
    gc.collect()  # models of other tests

    def run(model: nn.Module) -> list[str]:
        caplog.clear()
        with caplog.at_level("WARNING", "te_graph"):
            step(model)
        return [record.getMessage() for record in caplog.records]

    return run


def test_layers_whose_weights_are_read_are_named_once_behind_the_first_training(warnings_of: Callable) -> None:
    model = converted(nn.Sequential(*(Block() for _ in range(6))))
    other = converted(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    assert warnings_of(other) == []
    with torch.no_grad():
        assert warnings_of(model) == []
    (message,) = warnings_of(model)
    assert message == (
        "convert_to_fp8: 6 of 18 layers have a gradient and have not computed in FP8 (0.attention.qkv, "
        "1.attention.qkv, 2.attention.qkv, 3.attention.qkv, 4.attention.qkv, ...): their weights are read by other "
        "modules"
    )
    assert warnings_of(model) == []
    (message,) = warnings_of(converted(Attention()))  # another conversion
    assert "1 of 2 layers have a gradient and have not computed in FP8 (qkv): their weights" in message


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(Experts(), Experts()),
        lambda: RegionEach(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH))),
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
        Turns,
    ],
    ids=["experts", "a region each", "all run", "by turns"],
)
def test_layers_that_may_yet_run_are_not_named(warnings_of: Callable, make: Callable[[], nn.Module]) -> None:
    model = converted(make())
    assert [warnings_of(model) for _ in range(3)] == [[], [], []]


def test_layers_that_are_converted_back_are_not_named(warnings_of: Callable) -> None:
    model = converted(nn.Sequential(Attention(), nn.Linear(WIDTH, WIDTH)))
    tg.unconvert(model[0])
    assert warnings_of(model) == []


def test_models_are_not_kept_alive() -> None:
    model = converted(Attention())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
