"""Silent hazards of graph replay in what a backward reads under other names than the forward has for it.

The forward hands objects over: to ``ctx``, to variables and defaults of hooks, to ``functools.partial``.
"""

from __future__ import annotations

import collections
import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hazards import batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

Read = Callable[[Any], Any]
Forward = Callable[["Net", Tensor], Tensor]
KEY = "scale"


class Net(nn.Module):
    """A layer that holds ``given`` for its backward, and things that its forward alone reads."""

    def __init__(self, forward: Forward, given: Any) -> None:
        super().__init__()
        self.run, self.given = forward, given
        self.steps, self.losses, self.options = 1, [1.0], {"scale": 1.0}

    def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        return self.run(self, x * self.steps * self.losses[0] * self.options["scale"])


def by_ctx(read: Read) -> Forward:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, given: Any) -> Tensor:  # [n, 4] -> [n, 4]
            ctx.held = given
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # [n, 4] -> [n, 4]
            return grad * read(ctx.held), None

    return lambda net, x: Scaled.apply(x, net.given)


def by_hook(make: Callable[[Any], Callable[[Tensor], Tensor]]) -> Forward:
    def forward(net: Net, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        hidden = x * 2
        hidden.register_hook(make(net.given))
        return hidden * 3

    return forward


def first(held: Any) -> Any:
    return held[0]


def scaled(held: Any, grad: Tensor) -> Tensor:
    return grad * held[0]


def getter_of(held: dict[str, float]) -> Callable[[str], float]:
    return held.get


def unpacking(net: Net, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, functools.partial(scaled, net.given)):
        return x * x


def run_again(net: Net, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
    return checkpoint(lambda held, x: x * (x * held[0]), net.given, x, use_reentrant=False)


class Gain:
    scale = 2.0

    def __call__(self, grad: Tensor) -> Tensor:
        return grad * self.scale


class OtherGain(Gain):
    pass


def put(key: Any) -> Callable[[Any], None]:
    return lambda held: held.__setitem__(key, 3.0)


# How the forward hands it over, what that is, and how it changes.
HELD: dict[str, tuple[Forward, Callable[[], Any], Callable[[Any], None]]] = {
    "dictionary in ctx": (by_ctx(lambda held: held["scale"]), lambda: {"scale": 2.0}, put("scale")),
    "key that comes later": (by_ctx(lambda held: held.get("scale", 2.0)), dict, put("scale")),
    "variable key": (by_ctx(lambda held: held[KEY[:]]), lambda: {"scale": 2.0}, put("scale")),
    "key that is a number": (by_ctx(lambda held: held[3]), lambda: {3: 2.0}, put(3)),
    "number of keys": (by_ctx(len), lambda: {"any": 2.0}, put("other")),
    "method that is returned": (by_ctx(lambda held: getter_of(held)("any")), lambda: {"any": 2.0}, put("any")),
    "all values": (by_ctx(lambda held: sum(held.values())), lambda: {"any": 2.0}, put("any")),
    "dictionary in a dictionary": (
        by_ctx(lambda held: held["inner"]["scale"]),
        lambda: {"inner": {"scale": 2.0}},
        lambda held: held["inner"].update(scale=3.0),
    ),
    "list in ctx": (by_ctx(first), lambda: [2.0], put(0)),
    "length of a list": (by_ctx(len), lambda: [2.0, 2.0], lambda held: held.append(2.0)),
    "tensor in a list": (
        by_ctx(lambda held: held[0].numel()),
        lambda: [torch.ones(4)],
        lambda held: held.__setitem__(0, torch.ones(5)),
    ),
    "array in ctx": (by_ctx(lambda held: float(held[0])), lambda: np.array([2.0]), put(0)),
    "part of an array": (by_ctx(lambda held: float(held[0])), lambda: np.array([1.0, 2.0])[1:], put(0)),
    "deque in ctx": (by_ctx(first), lambda: collections.deque([2.0]), put(0)),
    "view of a dictionary": (
        by_ctx(lambda held: held["scale"]),
        lambda: types.MappingProxyType({"scale": 2.0}),
        lambda held: gc.get_referents(held)[0].update(scale=3.0),
    ),
    "set behind a weak reference": (
        by_ctx(lambda held: sum(held["set"]())),
        lambda: {"kept": (kept := {2.0}), "set": weakref.ref(kept)},
        lambda held: held["kept"].add(3.0),
    ),
    "list in an object": (
        by_ctx(lambda held: held.table[0]),
        lambda: SimpleNamespace(table=[2.0]),
        lambda held: put(0)(held.table),
    ),
    "attribute that hides one of the class": (
        by_ctx(lambda held: held.scale),
        Gain,
        lambda held: setattr(held, "scale", 3.0),
    ),
    "class that hides what one below it has": (
        by_ctx(lambda held: held.scale),
        lambda: type("Above", (OtherGain,), {})(),
        lambda held: setattr(type(held), "scale", 3.0),
    ),
    "object as a hook": (by_hook(lambda given: given), Gain, lambda held: setattr(held, "scale", 3.0)),
    "variable of a hook": (by_hook(lambda other: lambda grad: grad * other[0]), lambda: [2.0], put(0)),
    "default of a hook": (by_hook(lambda given: lambda grad, o=given: grad * o["k"]), lambda: {"k": 2.0}, put("k")),
    "partial as a hook": (by_hook(functools.partial(functools.partial, scaled)), lambda: [2.0], put(0)),
    "partial in ctx": (
        by_ctx(lambda held: held(torch.ones(()))),
        lambda: functools.partial(scaled, [2.0]),
        lambda held: put(0)(held.args[0]),
    ),
    "unpacking of saved tensors": (unpacking, lambda: [2.0], put(0)),
    "argument of a checkpoint": (run_again, lambda: [2.0], put(0)),
}
UNREAD: dict[str, tuple[Forward, Callable[[], Any], Callable[[Net], None]]] = {
    "number in ctx": (by_ctx(lambda held: held), lambda: 2.0, lambda net: setattr(net, "given", 3.0)),
    "tuple in ctx": (by_ctx(first), lambda: (2.0, 1.0), lambda net: setattr(net, "given", (3.0, 1.0))),
    "other key": (
        by_ctx(lambda held: held["scale"]),
        lambda: {"scale": 2.0, "step": 1},
        lambda net: net.given.update(step=net.given["step"] + 1),
    ),
    "other attribute": (
        by_ctx(lambda held: held.table[0]),
        lambda: SimpleNamespace(table=[2.0], step=1),
        lambda net: vars(net.given).update(step=2),
    ),
    "counter and list of the module": (
        by_ctx(first),
        lambda: [2.0],
        lambda net: (setattr(net, "steps", 2), net.losses.append(1.0), net.options.update(scale=2.0)),
    ),
}


def built(forward: Forward, given: Any, device: str) -> Net:
    moved = [one.to(device) if isinstance(one, Tensor) else one for one in given] if isinstance(given, list) else given
    return Net(forward, moved)


def gradient_after(net: nn.Module, x: Tensor, change: Callable[[], Any]) -> Tensor:
    """The gradient of ``x`` [n, 4], with ``change`` between forward and backward."""
    result = net(x)
    change()
    return torch.autograd.grad(result.sum(), x)[0]


@pytest.fixture(
    params=[
        pytest.param(("cpu", True), id="cpu-monitoring"),
        pytest.param(("cpu", False), id="cpu-profile"),
        pytest.param(("cuda", True), id="cuda-monitoring", marks=pytest.mark.gpu),
    ]
)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What runs is known by events of Python 3.12, or, before, by a profile function, which sees its own thread alone:
    not that on which a backward on a GPU runs."""
    device, has_events = request.param
    if not has_events:
        monkeypatch.delattr(sys, "monitoring", raising=False)
    return device


@pytest.mark.parametrize("case", HELD)
def test_a_change_of_what_a_backward_holds_is_refused(case: str, device: str) -> None:
    forward, given, change = HELD[case]
    net, twin = (built(forward, given(), device) for _ in range(2))
    held = net.given
    make_graphed_callables(net, (batch(device),))
    x = batch(device)
    before = gradient_after(twin, x, lambda: None)
    for _ in range(2):
        assert_bitwise_equal(gradient_after(net, x, lambda: None), before)
    assert net.te_graph.info()["backward_replays"] == 2
    assert not torch.equal(gradient_after(twin, x, lambda: change(twin.given)), before)
    with pytest.raises(RuntimeError, match=r" since the forward, and code that the backward runs reads it"):
        gradient_after(net, x, lambda: change(held))


@pytest.mark.parametrize("case", UNREAD)
def test_what_a_backward_does_not_read_may_change(case: str, device: str) -> None:
    forward, given, change = UNREAD[case]
    net, twin = (built(forward, given(), device) for _ in range(2))
    make_graphed_callables(net, (batch(device),))
    x = batch(device)
    found = [gradient_after(one, x, functools.partial(change, one)) for one in (net, twin)]
    assert_bitwise_equal(*found)
    assert net.te_graph.info()["backward_replays"] == 1
