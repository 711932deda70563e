"""What code reads of objects in ways that a guard could pass over: by what hides something, by what stands behind
descriptors, of values that can change, of tensors that no operator uses. The reference is an eager twin."""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from calls import replays
from torch import Tensor, nn

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Slot:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Tagged(float):
    __slots__ = ("unit",)


class OwnSet(set):
    pass


class Factor:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, *_: Any) -> float:
        return self.factor


class Helper:
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class OwnProperty(property):
    def __get__(self, obj: Any, kind: Any = None) -> Any:
        return self if obj is None else self.scale


class Conf:
    scale = 2.0


_KEPT = [Conf(), Conf()]
_LOG = logging.getLogger("unseen_reads.of_a_test")
_LOG.parent = logging.getLogger("unseen_reads")


def with_scale(made: Any) -> Any:
    made.scale = 2.0
    return made


def tagged() -> Tagged:
    made = Tagged(1.0)
    made.unit = 2.0
    return made


def exchanged(table: dict, key: Any) -> None:
    """Put the item to the end."""
    table[key] = table.pop(key)


Forward = Callable[[Any, Tensor], Tensor]
Change = Callable[[Any], Any]
# What the module holds, or with `kind.` its class; how it is read, how it changes.
CASES: dict[str, tuple[dict[str, Callable[[], Any]], Forward, Change]] = {
    "items of a dictionary of tensors": (
        {"t": lambda: {"a": torch.ones(4)}},
        lambda s, x: x * sum(s.t.values()),
        lambda m: m.t.update(b=torch.ones(4)),
    ),
    "a key asked for in a dictionary of tensors": (
        {"t": lambda: {"a": torch.ones(4)}},
        lambda s, x: x * s.t["a"] * (3.0 if "off" in s.t else 1.0),
        lambda m: m.t.update(off=True),
    ),
    "order of a dictionary of tensors": (
        {"t": lambda: {"a": torch.ones(4), "b": torch.zeros(4)}},
        lambda s, x: functools.reduce(lambda y, t: y * 0.5 + t, s.t.values(), x),
        lambda m: exchanged(m.t, "a"),
    ),
    "order of a dictionary with functions as keys": (
        {"t": lambda: {torch.sin: 2.0, torch.exp: 3.0}},
        lambda s, x: functools.reduce(lambda y, pair: pair[0](y) * pair[1], s.t.items(), x),
        lambda m: exchanged(m.t, torch.sin),
    ),
    "shape of a tensor": (
        {"p": lambda: torch.ones(4)},
        lambda s, x: x * s.p.shape[0],
        lambda m: setattr(m, "p", torch.ones(5)),
    ),
    "dtype of a buffer": (
        {"p": lambda: nn.Buffer(torch.ones(4))},
        lambda s, x: (x.to(s.p.dtype) / 3).double(),
        lambda m: m.double(),
    ),
    "requires_grad of a tensor": (
        {"p": lambda: torch.ones(4)},
        lambda s, x: x * (2 if s.p.requires_grad else 3),
        lambda m: m.p.requires_grad_(),
    ),
    "an attribute that hides a parameter": (
        {"lin": lambda: nn.Linear(4, 4)},
        lambda s, x: s.lin(x),
        lambda m: vars(m.lin).update(weight=torch.ones(4, 4)),
    ),
    "an attribute that hides a buffer": (
        {"b": lambda: nn.Buffer(torch.ones(4))},
        lambda s, x: x * s.b,
        lambda m: object.__setattr__(m, "b", torch.zeros(4)),
    ),
    "an attribute that hides a submodule": (
        {"act": nn.Tanh},
        lambda s, x: s.act(x),
        lambda m: object.__setattr__(m, "act", nn.Identity()),
    ),
    "an attribute that hides a method of torch's": (
        {"conv": lambda: nn.Conv1d(3, 3, 1)},
        lambda s, x: s.conv(x[None])[0],
        lambda m: setattr(m.conv, "_conv_forward", lambda inputs, weight, bias: inputs * 7),
    ),
    "forward of an object that is no module": (
        {"h": Helper},
        lambda s, x: s.h.forward(x),
        lambda m: setattr(m.h, "forward", lambda x: x * 3),
    ),
    "a name with underscores at both ends": (
        {"o": lambda: SimpleNamespace(__scale__=2.0)},
        lambda s, x: x * s.o.__scale__,
        lambda m: setattr(m.o, "__scale__", 3.0),
    ),
    "a name with underscores at both ends, of a class": (
        {"kind.__scale__": lambda: 2.0},
        lambda s, x: x * s.__scale__,
        lambda m: setattr(m.__class__, "__scale__", 3.0),
    ),
    "what a property gets": (
        {"_gain": lambda: 2.0, "kind.gain": lambda: property(operator.attrgetter("_gain"))},
        lambda s, x: x * s.gain,
        lambda m: setattr(m, "_gain", 3.0),
    ),
    "what a partial behind a property holds": (
        {"kind.gain": lambda: property(functools.partial(lambda settings, s: settings["scale"], {"scale": 2.0}))},
        lambda s, x: x * s.gain,
        lambda m: type(m).gain.fget.args[0].update(scale=3.0),
    ),
    "an object behind a static method": (
        {"kind.gain": lambda: staticmethod(Factor(2.0))},
        lambda s, x: x * s.gain(),
        lambda m: setattr(m.gain, "factor", 3.0),
    ),
    "arguments of a partial method": (
        {"kind.gain": lambda: functools.partialmethod(lambda s, scales: scales[0], [2.0])},
        lambda s, x: x * s.gain(),
        lambda m: operator.setitem(inspect.getattr_static(m, "gain").args[0], 0, 3.0),
    ),
    "a property of a class of its own": (
        {"kind.gain": lambda: with_scale(OwnProperty(len))},
        lambda s, x: x * s.gain,
        lambda m: setattr(type(m).gain, "scale", 3.0),
    ),
    "an object without weak references in a set": (
        {"o": lambda: {Slot(2.0)}},
        lambda s, x: x * sum(one.scale for one in s.o),
        lambda m: [setattr(one, "scale", 3.0) for one in m.o],
    ),
    "another object without weak references in a set": (
        {"o": lambda: {Slot(2.0)}},
        lambda s, x: x * sum(one.scale for one in s.o),
        lambda m: setattr(m, "o", {Slot(3.0)}),
    ),
    "a derived set": (
        {"o": lambda: OwnSet([2.0])},
        lambda s, x: x * sum(s.o),
        lambda m: (m.o.discard(2.0), m.o.add(3.0)),
    ),
    "a record of NumPy": (
        {"o": lambda: np.array([(2.0,)], [("v", "f4")])[0]},
        lambda s, x: x * float(s.o["v"]),
        lambda m: operator.setitem(m.o, "v", 3.0),
    ),
    "a list in a slice": (
        {"o": lambda: slice([2.0])},
        lambda s, x: x * s.o.stop[0],
        lambda m: operator.setitem(m.o.stop, 0, 3.0),
    ),
    "a slot of a number": ({"o": tagged}, lambda s, x: x * s.o.unit, lambda m: setattr(m.o, "unit", 3.0)),
    "an attribute of a partial": (
        {"o": lambda: with_scale(functools.partial(float))},
        lambda s, x: x * s.o.scale,
        lambda m: setattr(m.o, "scale", 3.0),
    ),
    "an attribute of a function that torch wraps": (
        {"o": lambda: with_scale(torch.enable_grad()(lambda x: x))},
        lambda s, x: s.o(x) * s.o.scale,
        lambda m: setattr(m.o, "scale", 3.0),
    ),
    "an attribute of a function with a cache": (
        {"o": lambda: with_scale(functools.cache(lambda x: x))},
        lambda s, x: x * s.o(1.0) * s.o.scale,
        lambda m: setattr(m.o, "scale", 3.0),
    ),
    "the class behind a weak proxy": (
        {"o": lambda: weakref.proxy(with_own_class(_KEPT))},
        lambda s, x: x * s.o.scale,
        lambda m: setattr(m.o.__class__, "scale", 3.0),
    ),
}


@pytest.mark.parametrize("read", [lambda: _LOG.isEnabledFor(logging.DEBUG), lambda: _LOG.level == logging.DEBUG])
@pytest.mark.parametrize("owner", ["the logger", "the one above", "all"])
def test_a_level_of_a_logger_is_seen_where_code_asks_for_it(read: Callable[[], bool], owner: str) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if read() else x

    net, x = tg.make_graphed_callables(Net(), (torch.ones(2),), on_mismatch="eager"), torch.ones(2)
    changed = {"the logger": _LOG, "the one above": _LOG.parent}.get(owner)
    before = logging.root.manager.disable
    try:
        _LOG.setLevel(logging.NOTSET if owner == "the one above" else logging.INFO)
        for _ in range(2):
            assert_bitwise_equal(net(x), x * 2 if read() else x)
        changed.setLevel(logging.DEBUG) if changed else logging.disable(logging.CRITICAL)
        assert_bitwise_equal(net(x), x * 2 if read() else x)
    finally:
        _LOG.setLevel(logging.NOTSET)
        _LOG.parent.setLevel(logging.NOTSET)
        logging.disable(before)


def test_the_level_of_a_logger_that_code_only_logs_to_does_not_matter() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            _LOG.debug("called")
            return x * 2

    net = tg.make_graphed_callables(Net(), (torch.ones(2),))
    net(torch.ones(2))
    try:
        _LOG.setLevel(logging.DEBUG)
        net(torch.ones(2))
    finally:
        _LOG.setLevel(logging.NOTSET)
    assert replays(net) == 2


def with_own_class(kept: list) -> Any:
    kept.append(type("Conf", (), {"scale": 2.0})())
    return kept[-1]


def module_of(held: dict[str, Callable[[], Any]], forward: Forward) -> nn.Module:
    class Net(nn.Module):
        pass

    Net.forward = forward
    net = Net()
    for name, make in held.items():
        owner, _, attribute = name.rpartition(".")
        setattr(Net if owner else net, attribute, make())
    return net


@pytest.mark.parametrize(("held", "forward", "change"), CASES.values(), ids=CASES)
def test_a_change_is_seen_by_a_callable(held: dict[str, Callable[[], Any]], forward: Forward, change: Change) -> None:
    net, twin = module_of(held, forward), module_of(held, forward)
    twin.load_state_dict(net.state_dict())
    x = torch.randn(3, 4, requires_grad=True)
    tg.make_graphed_callables(net, (x,), on_mismatch="eager")
    for _ in range(2):
        assert_bitwise_equal(net(x).detach(), twin(x).detach())
    before = twin(x).detach()
    change(net)
    change(twin)
    assert not torch.equal(twin(x).detach(), before)
    assert_bitwise_equal(net(x).detach(), twin(x).detach())
    assert replays(net) == 2


FUNCTION_CASES = (
    "an attribute that hides a parameter",
    "an attribute that hides a buffer",
    "an attribute that hides a submodule",
    "an attribute of a function that torch wraps",
    "a list in a slice",
)


@pytest.mark.parametrize("name", FUNCTION_CASES)
def test_a_change_is_seen_by_a_function(name: str) -> None:
    held, forward, change = CASES[name]
    net, x = module_of(held, forward), torch.randn(3, 4)

    def function(x: Tensor) -> Tensor:
        return net.forward(x).detach()

    graphed = tg.graphed(function)
    for _ in range(4):
        assert_bitwise_equal(graphed(x).clone(), function(x))
    before = function(x)
    change(net)
    assert not torch.equal(function(x), before)
    for _ in range(4):
        assert_bitwise_equal(graphed(x).clone(), function(x))
