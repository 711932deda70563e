"""graphed(): state that is kept in unusual places, comes later, or is found by its name."""

from __future__ import annotations

import ctypes
import decimal
import importlib
import sys
import types
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sequences import assert_follows, called, counts
from torch import Tensor, nn

from te_graph import CaptureError, graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
SCALE = 2.0


class Plain:
    pass


def test_attributes_of_a_function_that_was_decorated(device: str) -> None:
    """Its name leads to what replays it, which has the attributes that are set later."""

    @graphed
    def scaled(x: Tensor) -> Tensor:
        return x * scaled.scale * getattr(scaled, "gain", 1.0)

    scaled.scale, x = 2.0, torch.randn(3, device=device)
    assert_bitwise_equal(called(scaled, 3, x), x * 2.0)
    scaled.scale = 3.0
    assert_bitwise_equal(called(scaled, 3, x), x * 3.0)
    scaled.gain = 5.0
    assert_bitwise_equal(called(scaled, 3, x), x * 3.0 * 5.0)
    assert counts(scaled) == (3, 6, 2, 3)


def test_attributes_that_a_function_has_are_those_of_what_replays_it(device: str) -> None:
    def scaled(x: Tensor) -> Tensor:
        return x * scaled.scale

    scaled.scale = 2.0
    scaled, x = graphed(scaled), torch.randn(3, device=device)
    assert_bitwise_equal(called(scaled, 3, x), x * 2.0)
    scaled.scale = 3.0
    assert_bitwise_equal(called(scaled, 3, x), x * 3.0)


def test_a_counter_at_a_decorated_function_is_refused(device: str) -> None:
    @graphed
    def counted(x: Tensor) -> Tensor:
        counted.calls += 1
        return x * 2.0

    counted.calls, x = 0, torch.randn(3, device=device)
    counted(x)
    with pytest.raises(CaptureError, match=r"counted.calls changed from 1 to 2"):
        counted(x)
    assert counted.calls == 1


def test_a_variable_of_the_function_around_it_that_is_assigned_later_or_deleted() -> None:
    def make() -> tuple[Callable, Callable, Callable]:
        def scaled(x: Tensor) -> Tensor:
            try:
                return x * scale
            except NameError:
                return x

        def assign() -> None:
            nonlocal scale
            scale = 3.0

        def delete() -> None:
            nonlocal scale
            del scale

        if make is None:
            scale = 0.0
        return scaled, assign, delete

    scaled, assign, _ = make()
    assert_follows(scaled, assign)
    scaled, assign, delete = make()
    assign()
    assert_follows(scaled, delete)


SET_BY_A_TEST = None


def test_a_global_that_the_function_only_sets_is_set_again_after_others_changed_it(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    def step(x: Tensor) -> Tensor:
        global SET_BY_A_TEST
        SET_BY_A_TEST = 7.0
        return x * 2.0

    stepped, x = graphed(step), torch.randn(3, device=device)
    called(stepped, 3, x)
    monkeypatch.setattr(sys.modules[__name__], "SET_BY_A_TEST", 1.0)
    stepped(x)
    assert SET_BY_A_TEST == 7.0


def test_a_tensor_left_in_a_global_that_the_function_only_sets_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SET_BY_A_TEST", None)

    def step(x: Tensor) -> Tensor:
        global SET_BY_A_TEST
        SET_BY_A_TEST = x * 2.0
        return x * 3.0

    stepped, x = graphed(step), torch.randn(3, device=device)
    stepped(x)
    with pytest.raises(CaptureError, match="leaves a tensor that it computed in global variable SET_BY_A_TEST"):
        stepped(x)


READS = {
    "sys.modules": lambda x: x * sys.modules["settings_of_a_test"].scale,
    "import_module": lambda x: x * importlib.import_module("settings_of_a_test").scale,
    "__import__": lambda x: x * __import__("settings_of_a_test").scale,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_module_that_is_looked_up_by_its_name(read: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("settings_of_a_test")
    module.scale = 2.0
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert_follows(read, lambda: setattr(module, "scale", 3.0))


def test_the_module_itself_looked_up_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    change = lambda: monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)  # noqa: E731
    assert_follows(lambda x: x * sys.modules[__name__].SCALE, change)


def test_a_module_that_gets_there(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "module_of_a_test_that_gets_there"
    monkeypatch.delitem(sys.modules, name, raising=False)
    change = lambda: monkeypatch.setitem(sys.modules, name, types.ModuleType(name))  # noqa: E731
    assert_follows(lambda x: x * 2.0 if "module_of_a_test_that_gets_there" in sys.modules else x, change)


def test_code_of_a_module_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made by hand, or from text, and is the user's."""
    module = types.ModuleType("module_made_by_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    owner = "class Owner:\n    @property\n    def value(self): return scale\n"
    exec(f"scale = 2.0\n{owner}def read(x): return x * Owner().value", vars(module))
    assert_follows(module.read, lambda: setattr(module, "scale", 3.0))


@pytest.mark.parametrize("make", [nn.Linear, lambda *_: torch.ones(2), lambda *_: Plain()])
def test_what_a_weak_proxy_leads_to_is_not_compared(make: Callable, caplog: pytest.LogCaptureFixture) -> None:
    owner = make(2, 2)
    owner.scale = 2.0
    proxy, x = weakref.proxy(owner), torch.randn(2)
    scaled = graphed(lambda x: x * proxy.scale)
    assert_bitwise_equal(called(scaled, 4, x), x * 2.0)
    owner.scale = 3.0
    assert_bitwise_equal(called(scaled, 4, x), x * 3.0)
    assert counts(scaled) == (0, 0, 0, 8)
    assert "proxy is a weak proxy, which cannot be compared: use weakref.ref" in caplog.text


def test_a_gradient_that_appears_at_a_tensor_that_needs_none_is_a_change(device: str) -> None:
    """A master weight, say, whose gradient the user computes."""
    master = torch.ones(2, device=device)

    def step() -> None:
        if master.grad is not None:
            master.sub_(master.grad)

    stepped = graphed(step)
    called(stepped, 3)
    master.grad = torch.full_like(master, 2.0)
    called(stepped, 3)
    assert master.tolist() == [-5.0, -5.0]
    master.grad = None
    called(stepped, 3)
    assert master.tolist() == [-5.0, -5.0]
    assert counts(stepped) == (2, 7, 1, 2)


def test_one_tensor_where_there_are_two_later_is_a_change(device: str) -> None:
    x = torch.randn(3, device=device)
    scaled = graphed(lambda a, b: a * 2.0 if a is b else a * 3.0)
    assert_bitwise_equal(called(scaled, 3, x, x).clone(), x * 2.0)
    assert_bitwise_equal(called(scaled, 3, x, x.detach()), x * 3.0)
    assert counts(scaled) == (2, 4, 1, 2)


def test_one_list_that_becomes_two_is_a_change_to_code_that_tells_them_apart(device: str) -> None:
    held = types.SimpleNamespace(first=[1.0])
    held.second = held.first
    x = torch.randn(3, device=device)
    scaled = graphed(lambda x: x * 2.0 if held.first is held.second else x * 3.0)
    assert_bitwise_equal(called(scaled, 3, x).clone(), x * 2.0)
    held.second = [1.0]
    assert_bitwise_equal(called(scaled, 2, x), x * 3.0)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0
        self.register_buffer("shift", torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.shift


def _set_factor(module: nn.Module) -> None:
    module.factor = 5.0


def _set_shift(module: nn.Module) -> None:
    module.shift = torch.randn(3)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("change", [_set_factor, _set_shift])
def test_what_a_script_module_has_is_not_compared(change: Callable, caplog: pytest.LogCaptureFixture) -> None:
    module, x = torch.jit.script(Scripted()), torch.randn(3)
    replayed = graphed(lambda x: module(x))
    for number in range(8):
        if number == 4:
            change(module)
        assert_bitwise_equal(replayed(x), module(x))
    assert counts(replayed) == (0, 0, 0, 8)
    assert "closure variable module is a ScriptModule" in caplog.text


def test_a_context_of_decimal_numbers() -> None:
    context = decimal.Context(prec=20)
    assert_follows(
        lambda x: x.double() * float(context.divide(decimal.Decimal(1), decimal.Decimal(3))),
        lambda: setattr(context, "prec", 3),
    )


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_drawing_from_a_bit_generator_of_numpy_is_refused(kind: str) -> None:
    bits, x = getattr(np.random, kind)(1), torch.ones(3)
    replayed = graphed(lambda x: x * (bits.random_raw() % 7))
    replayed(x)
    with pytest.raises(CaptureError, match="draws random numbers from closure variable bits"):
        replayed(x)


def test_a_module_that_makes_up_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    module, held = types.ModuleType("made_up"), {"factor": 2.0}
    module.__getattr__ = lambda name: held[name]  # without an AttributeError
    assert_follows(lambda x: x * module.factor, lambda: held.update(factor=3.0))


def test_an_object_of_ctypes_that_holds_another_one() -> None:
    held, x = ctypes.py_object([2.0]), torch.ones(3)
    replayed = graphed(lambda x: x * held.value[0])
    for value in (2.0, 2.0, 2.0, 3.0, 3.0):
        held.value[0] = value
        assert_bitwise_equal(replayed(x).clone(), x * value)
