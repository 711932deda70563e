"""Objects that die, and others that take their places in memory: seen by the guards of callables and of functions.

The reference is eager execution.
"""

from __future__ import annotations

import enum
import functools
import gc
import operator
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_graph as tg
from te_graph import _C
from te_graph.graphs.guards.callable_guard import CallableGuard
from te_graph.graphs.guards.sources import Source


class Slots:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class Pair(tuple):
    """A tuple of a class of its own."""


SCALE = {
    "a tuple": (lambda value: (value,), lambda held: held[0]),
    "a tuple in a tuple": (lambda value: ((value,), 1), lambda held: held[0][0]),
    "a tuple of a class": (lambda value: Pair([value]), lambda held: held[0]),
    "slots in a tuple": (lambda value: (Slots(value),), lambda held: held[0].held),
    "a default": (lambda value: lambda scale=value: scale, lambda held: held()),
    "a closure": (lambda value: lambda: value, lambda held: held()),
    "a partial": (lambda value: functools.partial(float, value), lambda held: held()),
    "slots": (Slots, lambda held: held.held),
    "a method to call": (lambda value: operator.methodcaller("__add__", value), lambda held: held(1.0)),
    "a cell": (types.CellType, lambda held: held.cell_contents),
}
KINDS = pytest.mark.parametrize(("make", "read"), SCALE.values(), ids=SCALE)


class Scaled(nn.Module):
    """x [n] -> [n], times what is found in a list."""

    def __init__(self, held: Any, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.held, self.read = [held], read

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read(self.held[0])


def exchange(held: list[Any], make: Callable[[float], Any], value: float) -> None:
    """Let the old one go before the new one is made."""
    held[0] = None
    held[0] = make(value)


@KINDS
def test_callables_see_what_took_the_place_of_another(make: Callable[[float], Any], read: Callable[[Any], Any]) -> None:
    x = torch.ones(2, requires_grad=True)
    module = Scaled(make(2.0), read)
    graphed = tg.make_graphed_callables(module, (x,), on_mismatch="eager")
    for value in (3.0, 4.0, 5.0):
        for _ in range(2):
            assert torch.equal(graphed(x), x * read(module.held[0]))
        exchange(module.held, make, value)
        assert torch.equal(graphed(x), x * read(module.held[0]))


@KINDS
def test_functions_see_what_took_the_place_of_another(make: Callable[[float], Any], read: Callable[[Any], Any]) -> None:
    held = [make(2.0)]

    def function(x: Tensor) -> Tensor:
        return x * read(held[0])

    graphed, x = tg.graphed(function), torch.ones(2)
    for value in (3.0, 4.0, 5.0):
        for _ in range(4):
            assert torch.equal(graphed(x), x * read(held[0]))
        exchange(held, make, value)
        assert torch.equal(graphed(x), x * read(held[0]))


def test_functions_see_tensors_in_what_took_the_place_of_another() -> None:
    held = [(torch.ones(3),)]

    def function(x: Tensor) -> Tensor:
        return x * held[0][0]

    graphed, x = tg.graphed(function), torch.ones(3)
    for value in (2.0, 3.0, 4.0):
        for _ in range(4):
            expected = x * held[0][0]
            assert torch.equal(graphed(x), expected)
        new = torch.full((3,), value)
        held[0] = None
        held[0] = (new,)
        assert torch.equal(graphed(x), x * value)


def test_names_that_a_metaclass_makes_up_stay_as_they_are() -> None:
    class Meta(type):
        def __getattribute__(cls, name: str) -> Any:
            return "another" if name == "__name__" else super().__getattribute__(name)

    class Named(metaclass=Meta):
        pass

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * len(Named.__name__)

    x = torch.ones(2, requires_grad=True)
    net = tg.make_graphed_callables(Net(), (x,))
    for _ in range(3):
        assert torch.equal(net(x), x * len("another"))
    assert net.te_graph.info()["eager_calls"] == {}


def test_what_a_guard_knows_without_a_weak_reference_stays_alive() -> None:
    """Else a guard would go on from where it was."""
    held = tuple([object()])
    source = Source(nn.Module(), "root").child(held, "held", _C.StepKind.KNOWN)
    callable_guard = CallableGuard()
    before = sys.getrefcount(held)
    callable_guard.enter(source)
    assert sys.getrefcount(held) == before + 1
    del callable_guard
    gc.collect()
    assert sys.getrefcount(held) == before


class Owner(nn.Module):
    """Held by something without weak references that it holds and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.held = [Slots(self)]
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:  # [2] -> [2]
        return self.linear(x) * self.held[0].held.scale

    def evaluate(self, x: Tensor) -> Tensor:  # [2] -> [2]
        return self.forward(x).detach()


@pytest.mark.parametrize("kind", ["module", "method", "function"])
def test_what_a_guard_keeps_alive_is_garbage_once_nobody_else_has_it(kind: str) -> None:
    owner, x = Owner(), torch.ones(2, requires_grad=True)
    if kind == "module":
        tg.make_graphed_callables(owner, (x,))
    else:
        owner.graphed = (
            tg.graphed(owner.evaluate) if kind == "function" else tg.make_graphed_callables(owner.forward, (x,))
        )
    for _ in range(4):
        result = (owner if kind == "module" else owner.graphed)(x)
        assert torch.equal(result, owner.linear(x) * 2.0)
        if result.requires_grad:
            result.sum().backward()
    del result
    dead = weakref.ref(owner)
    gc.collect()
    assert dead() is owner
    del owner
    gc.collect()
    assert dead() is None


class OfAnEnumeration:
    """Makes classes of a program that is over, whose values lead to its module."""

    @staticmethod
    def member(net: nn.Module) -> Any:
        return enum.Enum("Mode", {"FAST": 1, "net": enum.nonmember(lambda _: net)}).FAST

    @staticmethod
    def key(net: nn.Module) -> Any:
        return {OfAnEnumeration.member(net): 2.0}

    @staticmethod
    def string(net: nn.Module) -> Any:
        return type("Text", (str,), {"net": lambda _: net})("fast")

    @staticmethod
    def tuple(net: nn.Module) -> Any:
        return (OfAnEnumeration.member(net), 1.0)


def without_gradients(net: nn.Module, x: Tensor) -> Tensor:  # [2] -> [2]
    return net(x).detach()


@pytest.mark.parametrize("make", ["member", "key", "string", "tuple"])
@pytest.mark.parametrize("is_function", [False, True])
def test_values_of_classes_that_lead_to_the_module_keep_nothing_alive(make: str, is_function: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.value = getattr(OfAnEnumeration, make)(self)

        def forward(self, x: Tensor) -> Tensor:  # [2] -> [2]
            return self.linear(x) * (2.0 if self.value == self.value else 1.0) * len(str(self.value))

    net, x = Net(), torch.ones(2)
    expected = without_gradients(net, x)
    if is_function:
        call = tg.graphed(functools.partial(without_gradients, net))
    else:
        call = functools.partial(without_gradients, tg.make_graphed_callables(net, (x,)))
    for _ in range(4):
        assert torch.equal(call(x), expected)
    dead = weakref.ref(net)
    del net, call, Net
    gc.collect()
    assert dead() is None


@pytest.mark.parametrize("assigned", [1, 2])
def test_callables_see_functions_in_what_took_the_place_of_another(assigned: int) -> None:
    """Tuples that are no values: each is looked into."""

    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = [("first", torch.relu), ("second", torch.tanh)]

        def forward(self, x: Tensor) -> Tensor:
            for _, function in self.stages:
                x = function(x)
            return x

    x = torch.tensor([-2.0, 0.5], requires_grad=True)
    module = tg.make_graphed_callables(Stages(), (x,), on_mismatch="eager")
    for function in (torch.sigmoid, torch.sin, torch.exp):
        for _ in range(2):
            module(x)
        module.stages[0] = None
        for _ in range(assigned):
            module.stages[0] = ("first", function)
        assert torch.equal(module(x), torch.tanh(function(x)))
        module.stages[0] = ("first", torch.relu)
