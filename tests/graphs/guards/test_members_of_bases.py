"""What a class has of a base and another one hides: methods that Python calls by itself, and what super() finds.

Functions of graphed(), and callables of make_graphed_callables that call them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from te_graph import graphed, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def base_and_derived() -> tuple[type, type]:
    """Two classes, of which the second hides all that the first has."""

    class Schedule:
        def __init__(self, scale: float = 2.0) -> None:
            self.scale = scale

        def __call__(self) -> float:
            return self.scale

        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 3

        def __lt__(self, other: object) -> bool:
            return True

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            return iter((1.0, 2.0))

        def __repr__(self) -> str:
            return "four"

    class Warmup(Schedule):
        def __init__(self) -> None:
            self.scale = 3.0

        __call__ = functools.partial(lambda: 5.0)
        __eq__ = functools.partial(lambda other: other is None)
        __hash__ = None
        __iter__ = None

        def __lt__(self, other: object) -> bool:
            return False

        def __len__(self) -> int:
            return 7

        def __repr__(self) -> str:
            return "derived"

    return Schedule, Warmup


# By the method that runs: what a function reads by it of an object of the base, and of one of the derived class.
READ: dict[str, Callable[[Any], float]] = {
    "__init__": lambda one: type(one)().scale,
    "__call__": lambda one: one(),
    "__eq__": lambda one: 2.0 + (one == 4),
    "__lt__": lambda one: 2.0 + (one < 4),
    "__len__": lambda one: float(len(one)),
    "__repr__": lambda one: float(len(repr(one))),
}
OTHER: dict[str, Any] = {
    "__init__": lambda self: setattr(self, "scale", 11.0),
    "__call__": lambda self: 11.0,
    "__eq__": lambda self, other: False,
    "__lt__": lambda self, other: False,
    "__len__": lambda self: 11,
    "__repr__": lambda self: "eleven eleven",
}
WITHOUT_CODE = {"__call__": functools.partial(lambda: 11.0), "__eq__": functools.partial(lambda other: other == 4)}


def step_of(*read: Callable[[], float]) -> tuple[Callable, Callable]:
    """A graphed function that multiplies by what ``read`` gives, and the same for eager execution: [3] -> [3]."""

    def step(x: Tensor) -> Tensor:  # [3]
        for one in read:
            x = x * one()
        return x

    return graphed(step), step


def callable_of(*read: Callable[[], float]) -> tuple[nn.Module, Callable]:
    """The same as a graphed callable, which captures again where something has changed."""

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:  # [3]
            for one in read:
                x = x * one()
            return x

    net = Net()
    return make_graphed_callables(net, on_mismatch="capture"), Net().forward


@pytest.fixture
def x(device: str) -> Tensor:
    """[3]; one for all calls of a test."""
    return torch.randn(3, device=device)


def assert_followed(function: Callable, eager: Callable, x: Tensor) -> None:
    """Four calls with ``x`` [3] equal eager execution, and the last one is a replay."""
    for _ in range(3):
        assert_bitwise_equal(function(x), eager(x))
    before = replays(function)
    assert_bitwise_equal(function(x), eager(x))
    assert replays(function) == before + 1


def replays(function: Any) -> int:
    return getattr(function, "te_graph", function).info()["forward_replays"]


@pytest.mark.parametrize("name", READ)
def test_a_method_of_a_base_that_ran_is_found_behind_one_that_did_not(name: str, x: Tensor) -> None:
    base, derived = base_and_derived()
    one, other = base(), derived()
    function, eager = step_of(lambda: READ[name](one), lambda: other.scale)
    assert_followed(function, eager, x)
    assert replays(function) == 3
    setattr(base, name, OTHER[name])
    assert_followed(function, eager, x)


@pytest.mark.parametrize("make", [step_of, callable_of])
@pytest.mark.parametrize("name", WITHOUT_CODE)
def test_a_method_without_python_code_is_seen_to_be_replaced_and_to_go(name: str, make: Callable, x: Tensor) -> None:
    base, derived = base_and_derived()
    one, other = base(), derived()
    function, eager = make(lambda: READ[name](other), lambda: one.scale)
    assert_followed(function, eager, x)
    setattr(derived, name, WITHOUT_CODE[name])
    assert_followed(function, eager, x)
    delattr(derived, name)  # the base's shows
    assert_followed(function, eager, x)
    setattr(base, name, OTHER[name])
    assert_followed(function, eager, x)


@pytest.mark.parametrize("name", READ)
def test_a_method_that_goes_lets_the_one_of_the_base_show(name: str, x: Tensor) -> None:
    base, derived = base_and_derived()
    one, other = base(), derived()
    function, eager = step_of(lambda: READ[name](one), lambda: READ[name](other))
    assert_followed(function, eager, x)
    delattr(derived, name)
    assert_followed(function, eager, x)


@pytest.mark.parametrize("make", [step_of, callable_of])
def test_what_super_passes_by_is_seen_to_come_and_to_go(make: Callable, x: Tensor) -> None:
    class Scale:
        def scale(self) -> float:
            return 2.0

    class Between:
        pass

    class Own(Between, Scale):
        def scale(self) -> float:
            return super().scale() + 1.0

    own = Own()
    function, eager = make(lambda: own.scale())
    assert_followed(function, eager, x)
    Between.scale = lambda self: 5.0
    assert_followed(function, eager, x)
    del Between.scale
    assert_followed(function, eager, x)


def test_what_another_method_reaches_by_super_is_seen(x: Tensor) -> None:
    class Scale:
        def __init__(self, value: float = 2.0) -> None:
            self.value = value

    class Between(Scale):
        pass

    class Own(Between):
        def __init__(self) -> None:  # runs before the capture alone
            self.value = 7.0

        def begun_anew(self) -> float:
            super().__init__()
            return self.value

    def begin(self: Own, value: float = 0.0) -> None:
        self.value = 3.0

    own = Own()
    own.begun_anew()
    function, eager = step_of(own.begun_anew)
    assert_followed(function, eager, x)
    Between.__init__ = begin
    assert_followed(function, eager, x)
