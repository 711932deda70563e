"""Numbers that a function reads from its closure, its defaults, objects and global names are guarded by value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import replays
from mutations import assert_seen, batch
from torch import Tensor, nn

from te_graph import make_graphed_callables

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


VARIABLES = [
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
