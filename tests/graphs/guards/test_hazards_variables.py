"""Numbers that a function reads from its closure, its defaults, objects and global names are guarded by value, what a
library has under global names by identity."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import replays
from mutations import assert_seen, batch
from torch import Tensor, nn

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


@dataclasses.dataclass
class Config:
    scale: float = 2.0


# ---- Functions ----

_scale = 2.0
_settings = {"scale": 2.0}


class Flags:
    """A class used as a namespace."""

    scale = 2.0


def by_closure(device: str) -> tuple[Callable, Callable[[float], None]]:
    scale = 2.0

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return lambda x: x * scale, change


def by_default(device: str) -> tuple[Callable, Callable[[float], None]]:
    def call(x: Tensor, scale: float = 2.0) -> Tensor:  # [3, 4] -> [3, 4]
        return x * scale

    return call, lambda value: setattr(call, "__defaults__", (value,))


def by_keyword_default(device: str) -> tuple[Callable, Callable[[float], None]]:
    def call(x: Tensor, *, scale: float = 2.0) -> Tensor:  # [3, 4] -> [3, 4]
        return x * scale

    return call, lambda value: call.__kwdefaults__.update(scale=value)


def by_attribute_of_the_function(device: str) -> tuple[Callable, Callable[[float], None]]:
    def call(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x * call.scale

    call.scale = 2.0
    return call, lambda value: setattr(call, "scale", value)


def by_list_in_a_closure(device: str) -> tuple[Callable, Callable[[float], None]]:
    scales = [2.0]
    return lambda x: x * scales[0], lambda value: scales.__setitem__(0, value)


def by_object_in_a_closure(device: str) -> tuple[Callable, Callable[[float], None]]:
    config = Config()
    return lambda x: x * config.scale, lambda value: setattr(config, "scale", value)


def by_another_function(device: str) -> tuple[Callable, Callable[[float], None]]:
    inner, change = by_closure(device)
    return lambda x: inner(x) + x, change


class Method:
    def __init__(self) -> None:
        self.scale = 2.0

    def call(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return self.scaled(x)

    def scaled(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x * self.scale


def by_self_of_a_method(device: str) -> tuple[Callable, Callable[[float], None]]:
    method = Method()
    return method.call, lambda value: setattr(method, "scale", value)


def by_cell_in_a_list(device: str) -> tuple[Callable, Callable[[float], None]]:
    held = [types.CellType(2.0)]
    return lambda x: x * held[0].cell_contents, lambda value: setattr(held[0], "cell_contents", value)


def by_cell_of_a_function(device: str) -> tuple[Callable, Callable[[float], None]]:
    scale = 2.0

    def holder() -> float:
        return scale

    cell = holder.__closure__[0]
    return lambda x: x * cell.cell_contents, lambda value: setattr(cell, "cell_contents", value)


VARIABLES = [
    by_cell_in_a_list,
    by_cell_of_a_function,
    by_closure,
    by_default,
    by_keyword_default,
    by_attribute_of_the_function,
    by_list_in_a_closure,
    by_object_in_a_closure,
    by_another_function,
    by_self_of_a_method,
]


@pytest.mark.parametrize("variable", VARIABLES, ids=lambda build: build.__name__)
def test_a_number_that_a_function_reads_is_seen(device, variable):
    assert_seen(lambda: variable(device), lambda change: change(3.0), "changed( from .*2.0.* to .*3.0.*)?", device)


@pytest.mark.parametrize("is_module", [True, False], ids=["module", "function"])
def test_an_empty_cell_that_is_filled_later_is_seen(device, is_module):
    cell = types.CellType()

    def call(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        try:
            return x * cell.cell_contents
        except ValueError:
            return x

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return call(x)

    x = batch(device)
    graphed = make_graphed_callables(Net() if is_module else call, (x,), on_mismatch="eager")
    for value in (None, 2.0, 3.0):
        if value is not None:
            cell.cell_contents = value
        assert_bitwise_equal(graphed(x).detach(), call(x).detach())
    assert replays(graphed) == 1


_operation: Callable[[Tensor], Tensor] = torch.relu
_library = torch
_layer = nn.Tanh


class Named(nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return _operation(_library.sin(_layer()(x)))


class Lookalike:
    """Takes the place of a library."""

    sin = torch.cos


@pytest.mark.parametrize(
    ("name", "other"), [("_operation", torch.sigmoid), ("_library", Lookalike), ("_layer", nn.Sigmoid)]
)
def test_what_a_library_has_is_seen_to_be_replaced_under_a_global_name(device, name, other, monkeypatch):
    net, twin = Named(), Named()
    graphed = make_graphed_callables(net, (batch(device),))
    graphed(batch(device))
    with monkeypatch.context() as patch:
        patch.setitem(globals(), name, other)
        with pytest.raises(RuntimeError, match=f"global variable {name} was replaced by another object"):
            graphed(batch(device))
    x = batch(device)
    assert_bitwise_equal(graphed(x).detach(), twin(x).detach())
    assert replays(graphed) == 2


def set_global(value: float) -> None:
    global _scale
    _scale = value


class ReadsGlobals(nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x * _scale * _settings["scale"] * Flags.scale * Doubled.apply(x)


class Doubled(torch.autograd.Function):
    """A function whose backward reads a global variable too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return grad * 2 * _backward_settings["scale"]


_backward_settings = {"scale": 1.0}

GLOBALS: dict[str, tuple[Callable[[float], Any], str]] = {
    "number": (set_global, "global variable _scale changed from 2.0 to 3.0"),
    "dict": (lambda value: _settings.update(scale=value), r"global variable _settings\['scale'\] changed"),
    "class": (lambda value: setattr(Flags, "scale", value), r"Flags\.scale changed from 2.0 to 3.0"),
}


@pytest.mark.parametrize("change", GLOBALS)
@pytest.mark.parametrize("is_module", [True, False], ids=["module", "function"])
def test_a_global_number_is_seen(device, change, is_module):
    call = ReadsGlobals()
    graphed = make_graphed_callables(call if is_module else call.forward, (batch(device),))
    graphed(batch(device))
    apply, words = GLOBALS[change]
    try:
        apply(3.0)
        with pytest.raises(RuntimeError, match=words):
            graphed(batch(device))
    finally:
        apply(2.0)
    graphed(batch(device))
    assert replays(graphed) == 2


def test_a_global_number_that_only_a_backward_reads_is_seen(device):
    graphed = make_graphed_callables(ReadsGlobals(), (batch(device),))
    graphed(batch(device)).sum().backward()
    try:
        _backward_settings["scale"] = 2.0
        with pytest.raises(RuntimeError, match=r"_backward_settings\['scale'\] changed"):
            graphed(batch(device))
    finally:
        _backward_settings["scale"] = 1.0
