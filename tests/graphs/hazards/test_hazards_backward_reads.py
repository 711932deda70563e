"""Silent hazards of graph replay in what Python code reads that runs in a backward: it may change after the forward.

Eager execution on copies of the same callables tells what code in a backward sees; a replay says so instead.
"""

from __future__ import annotations

import collections
import contextvars
import copy
import enum
import functools
import gc
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hazards import batch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

GAIN = 1.0
TABLE = {"gains": [1.0, 1.0]}


class GlobalGain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        return grad * GAIN * TABLE["gains"][1]


class Gained(nn.Module):
    """A layer whose gradient is scaled by what its ``gain`` is when the backward runs."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, device=device)
        self.gain, self.calls = 1.0, 0
        self.register_buffer("shift", torch.ones(4, device=device))

    def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        hidden = self.inner(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * self.gain * self.shift)
        return hidden.tanh()


class OfGlobals(Gained):
    def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        return GlobalGain.apply(self.inner(x))


class Checkpointed(Gained):
    """Computes its hidden layer again in the backward, with what ``gain`` and the flags of ``inner`` are by then."""

    def _hidden(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        return self.inner(x * self.gain + self.shift).tanh()

    def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        return checkpoint(self._hidden, x, use_reentrant=False)


class Steady(Gained):
    """Has code in its backward that reads nothing but what the forward gave it."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, gain: float) -> Tensor:  # [n, 4] -> [n, 4]
            ctx.factor = gain
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # [n, 4] -> [n, 4]
            return grad * 2 * ctx.factor, None

    def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        return self.Doubled.apply(self.inner(x), self.gain)


@dataclass
class Change:
    """What is changed after a forward, as it can be put back, and what a message calls it."""

    kind: type[Gained]
    do: Callable[[Gained, pytest.MonkeyPatch], None]
    name: str


CHANGES = {
    "an attribute that a hook reads": Change(Gained, lambda net, patch: patch.setattr(net, "gain", 3.0), "gain"),
    "a buffer that a hook reads": Change(
        Gained, lambda net, patch: patch.setitem(net._buffers, "shift", net.shift * 3), "shift"
    ),
    "a global number": Change(OfGlobals, lambda net, patch: patch.setitem(globals(), "GAIN", 3.0), "GAIN"),
    "a list in a global": Change(OfGlobals, lambda net, patch: patch.setitem(TABLE, "gains", [1.0, 3.0]), "gains"),
    "an attribute in a checkpoint": Change(Checkpointed, lambda net, patch: patch.setattr(net, "gain", 3.0), "gain"),
    "a layer in a checkpoint": Change(
        Checkpointed, lambda net, patch: patch.setitem(net._modules, "inner", copy.deepcopy(net.inner)), "inner"
    ),
    "a flag in a checkpoint": Change(
        Checkpointed, lambda net, patch: patch.setattr(net.inner, "training", False), "training flag of inner"
    ),
}


def gradients_after(net: nn.Module, x: Tensor, change: Callable[[], None]) -> list[Tensor | None]:
    """Gradients of the parameters of ``net`` [...] for ``x`` [n, 4], with ``change`` between forward and backward."""
    net.zero_grad()
    result = net(x)
    change()
    result.square().sum().backward()
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


@pytest.mark.parametrize("case", CHANGES)
@pytest.mark.parametrize("is_chain", [False, True], ids=["alone", "chain"])
def test_a_change_after_the_forward_is_refused_by_name(device, case, is_chain):
    change = CHANGES[case]
    net = change.kind(device)
    twin = copy.deepcopy(net)
    if is_chain:
        behind = [nn.Linear(4, 4, device=device) for _ in range(2)]
        sample = batch(device)
        make_graphed_callables((behind[0], net, behind[1]), ((sample,),) * 3, chain=True)
        net, twin = nn.Sequential(behind[0], net, behind[1]), nn.Sequential(behind[0], twin, behind[1])
        twin = copy.deepcopy(twin)
    else:
        make_graphed_callables(net, (batch(device, False),))
    changed = net[1] if is_chain else net
    for _ in range(3):
        x = batch(device, is_chain)
        assert_bitwise_equal(gradients_after(net, x, lambda: None), gradients_after(twin, x, lambda: None))
        words = rf"{change.name}.* since the forward, and code that the backward runs reads it"
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match=words):
            gradients_after(net, x, functools.partial(change.do, changed, patch))
        assert all(parameter.grad is None for parameter in changed.parameters())


def test_the_backward_can_be_run_once_the_change_is_undone(device):
    net = Gained(device)
    twin = copy.deepcopy(net)
    make_graphed_callables(net, (batch(device, False),))
    x = batch(device, False)
    result = net(x)
    net.gain = 3.0
    with pytest.raises(RuntimeError, match=r"gain changed from 1.0 to 3.0"):
        result.square().sum().backward(retain_graph=True)
    net.gain = 1.0
    result.square().sum().backward()
    assert_bitwise_equal([p.grad for p in net.parameters()], gradients_after(twin, x, lambda: None))


@pytest.mark.parametrize("kind", [Gained, OfGlobals, Checkpointed, Steady])
def test_what_the_backward_does_not_read_may_change(device, kind):
    net = kind(device)
    twin = copy.deepcopy(net)
    make_graphed_callables(net, (batch(device, False),))

    def change(one: Gained) -> None:
        one.calls += 1
        if kind is not Checkpointed:
            one.eval()
        if kind is Steady:
            one.gain = 5.0

    for _ in range(3):
        x = batch(device, False)
        found = [gradients_after(one, x, functools.partial(change, one)) for one in (net, twin)]
        assert_bitwise_equal(*found)
        for one in (net, twin):
            one.train().gain = 1.0
    assert net.te_graph.info()["backward_replays"] == 3


def test_a_backward_that_reads_python_outlives_its_callable(device):
    net = Gained(device)
    twin = copy.deepcopy(net)
    make_graphed_callables(net, (batch(device, False),))
    x = batch(device, False)
    parameters, result = list(net.parameters()), net(x)
    del net
    result.square().sum().backward()
    assert_bitwise_equal([p.grad for p in parameters], gradients_after(twin, x, lambda: None))


class CheckpointedLambda(Gained):
    def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        return checkpoint(lambda t: self.inner(t).tanh() * self.gain, x, use_reentrant=False)


class OfLocalFunction(Gained):
    def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
                return grad * self.gain

        return Scaled.apply(self.inner(x))


@pytest.mark.parametrize("kind", [Gained, Checkpointed, CheckpointedLambda, OfLocalFunction])
@pytest.mark.parametrize("how", ["reset", "captured again"])
def test_a_backward_whose_capture_is_retired_runs_and_still_sees_changes(device, kind, how):
    net = kind(device)
    twin = copy.deepcopy(net)
    make_graphed_callables(net, (batch(device, False),), on_mismatch="capture")
    x = batch(device, False)
    result = net(x)
    if how == "reset":
        net.te_graph.reset()
    else:
        net.gain = 2.0
        net(batch(device, False))
        assert net.te_graph.info()["recaptures"] == 1
    gc.collect()
    net.gain = 3.0
    with pytest.raises(RuntimeError, match=r"gain.* changed from 1.0 to 3.0 since the forward"):
        result.square().sum().backward(retain_graph=True)
    net.gain = 1.0
    result.square().sum().backward()
    assert_bitwise_equal([p.grad for p in net.parameters()], gradients_after(twin, x, lambda: None))


def test_a_retired_capture_frees_what_its_backward_needed(device):
    net = CheckpointedLambda(device)
    make_graphed_callables(net, (batch(device, False),))
    result, module = net(batch(device, False)), weakref.ref(net)
    net.te_graph.reset()
    result.sum().backward()
    del result, net
    assert module() is None


def test_a_callable_that_its_own_functions_refer_to_is_garbage(device):
    net = CheckpointedLambda(device)
    make_graphed_callables(net, (batch(device, False),))
    net(batch(device, False)).sum().backward()
    module = weakref.ref(net)
    del net
    gc.collect()
    assert module() is None


def test_a_variable_of_a_function_that_only_its_backward_reads(device):
    gain = 1.0

    def scaled(x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        result = x * 2
        result.register_hook(lambda grad: grad * gain)
        return result * 3

    graphed = make_graphed_callables(scaled, (batch(device),))
    x = batch(device)
    assert_bitwise_equal(*(torch.autograd.grad(one(x).sum(), x) for one in (graphed, scaled)))
    result = graphed(x)
    gain = 2.0
    with pytest.raises(RuntimeError, match=r"closure variable gain changed from 1.0 to 2.0 since the forward"):
        result.sum().backward()
    with pytest.raises(RuntimeError, match=r"closure variable gain changed"):
        graphed(x)


def test_a_method_or_setting_that_changed_after_the_forward_is_not_seen_a_documented_limit(device):
    class Methodical(Gained):
        def scaled(self, grad: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
            return grad * self.gain

        def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
            hidden = self.inner(x)
            if hidden.requires_grad:
                hidden.register_hook(lambda grad: self.scaled(grad))
            return hidden

    net = Methodical(device)
    twin = copy.deepcopy(net)
    make_graphed_callables(net, (batch(device, False),))
    x = batch(device, False)
    expected = gradients_after(twin, x, lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        change = functools.partial(patch.setattr, Methodical, "scaled", lambda self, grad: grad * 3)
        assert_bitwise_equal(gradients_after(net, x, change), expected)
    with torch.backends.mkldnn.flags(enabled=False), pytest.raises(RuntimeError, match=r"mkldnn.enabled changed"):
        net(x)
    result = net(x)
    net.zero_grad()
    with torch.backends.mkldnn.flags(enabled=False):
        result.square().sum().backward()
    assert_bitwise_equal([p.grad for p in net.parameters()], expected)


class Held:
    scale = 2.0

    def gain(self) -> float:
        return 2.0


Modes = enum.Enum("Modes", {"ONE": [2.0]})


VARIABLE = contextvars.ContextVar("scale", default=2.0)
HELD = [Held() for _ in range(3)]
TABLES = collections.UserDict(scale=2.0), collections.ChainMap({"scale": 2.0}), Modes.ONE.value
IN_LIBRARY_OBJECTS: dict[str, tuple[Callable[[], float], Callable[[], Any], Callable[[], Any]]] = {
    "an attribute that hides one of the class": (
        lambda: HELD[1].scale,
        lambda: setattr(HELD[1], "scale", 3.0),
        lambda: vars(HELD[1]).clear(),
    ),
    "an attribute that hides a method": (
        lambda: HELD[2].gain(),
        lambda: setattr(HELD[2], "gain", lambda: 3.0),
        lambda: vars(HELD[2]).clear(),
    ),
    "an attribute with a default": (
        lambda: getattr(HELD[0], "more", 2.0),
        lambda: setattr(HELD[0], "more", 3.0),
        lambda: vars(HELD[0]).clear(),
    ),
    "a UserDict": (
        lambda: TABLES[0]["scale"],
        lambda: TABLES[0].update(scale=3.0),
        lambda: TABLES[0].update(scale=2.0),
    ),
    "a ChainMap": (
        lambda: TABLES[1]["scale"],
        lambda: TABLES[1].maps[0].update(scale=3.0),
        lambda: TABLES[1].maps[0].update(scale=2.0),
    ),
    "the value of a member of an enumeration": (
        lambda: Modes.ONE.value[0],
        lambda: operator.setitem(Modes.ONE.value, 0, 3.0),
        lambda: operator.setitem(Modes.ONE.value, 0, 2.0),
    ),
}


def scaled_in_backward(read: Callable[[], float]) -> nn.Module:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
            return grad * read()

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
            return Scaled.apply(x)

    return Net()


def test_a_variable_of_a_context_that_changed_after_the_forward_is_not_seen_a_documented_limit(device):
    net, x = make_graphed_callables(scaled_in_backward(VARIABLE.get), (batch(device),)), batch(device)
    y = net(x)
    token = VARIABLE.set(3.0)
    try:
        (grad,) = torch.autograd.grad(y.sum(), x)
    finally:
        VARIABLE.reset(token)
    assert_bitwise_equal(grad, torch.full_like(grad, 2.0))


@pytest.mark.parametrize(("read", "change", "undo"), IN_LIBRARY_OBJECTS.values(), ids=IN_LIBRARY_OBJECTS)
def test_what_a_backward_reads_of_objects_is_seen_between_forward_and_backward(device, read, change, undo):
    net, x = make_graphed_callables(scaled_in_backward(read), (batch(device),)), batch(device)
    for _ in range(2):
        (grad,) = torch.autograd.grad(net(x).sum(), x)
        assert_bitwise_equal(grad, torch.full_like(grad, read()))
    y = net(x)
    try:
        change()
        with pytest.raises(RuntimeError, match=r"changed.* since the forward, and code that the backward runs"):
            y.sum().backward()
    finally:
        undo()
