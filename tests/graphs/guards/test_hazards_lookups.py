"""What code finds by name when it runs: modules, variables and attributes that come later. Weak proxies."""

from __future__ import annotations

import importlib
import sys
import types
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from te_graph import graphed, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def imported(x: Tensor) -> Tensor:
    import settings_of_a_test

    return x * settings_of_a_test.scale


READS = {
    "import": imported,
    "sys.modules": lambda x: x * sys.modules["settings_of_a_test"].scale,
    "import_module": lambda x: x * importlib.import_module("settings_of_a_test").scale,
    "__import__": lambda x: x * __import__("settings_of_a_test").scale,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_module_that_the_forward_imports_or_looks_up(
    read: Callable, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    module = types.ModuleType("settings_of_a_test")
    module.scale = 2.0
    monkeypatch.setitem(sys.modules, module.__name__, module)
    x = torch.randn(3, device=device, requires_grad=True)
    call = make_graphed_callables(read, (x,))
    assert_bitwise_equal(call(x), x * 2.0)
    module.scale = 3.0
    with pytest.raises(RuntimeError, match=r"settings_of_a_test.scale changed from 2.0 to 3.0"):
        call(x)


@pytest.mark.parametrize("is_filled", [True, False], ids=["filled", "empty"])
def test_a_slot_of_a_module_is_seen_to_change(is_filled: bool, device: str) -> None:
    class Settings(types.ModuleType):
        __slots__ = ("scale",)

    module, x = Settings("settings_of_a_test"), torch.ones(3, device=device, requires_grad=True)
    if is_filled:
        module.scale = 2.0

    def scaled(x: Tensor) -> Tensor:
        return x * getattr(module, "scale", 2.0)

    call, function = make_graphed_callables(scaled, (x,)), graphed(lambda x: scaled(x))
    with torch.no_grad():
        for _ in range(4):
            assert_bitwise_equal(function(x), x * 2.0)
    assert function.info()["forward_replays"] > 1
    assert_bitwise_equal(call(x), x * 2.0)
    module.scale = 3.0
    with torch.no_grad():
        assert_bitwise_equal(function(x), x * 3.0)
    with pytest.raises(RuntimeError, match=r"scale .*since capture"):
        call(x)


def test_a_variable_of_the_function_around_it_that_is_assigned_later(device: str) -> None:
    def scaled(x: Tensor) -> Tensor:
        try:
            return x * scale
        except NameError:
            return x * 1.0

    x = torch.randn(3, device=device, requires_grad=True)
    call = make_graphed_callables(scaled, (x,))
    assert_bitwise_equal(call(x), x)
    scale = 3.0
    with pytest.raises(RuntimeError, match="closure variable scale changed"):
        call(x)
    assert_bitwise_equal(scaled(x), x * scale)


COUNT_OF_A_TEST = None


def test_a_tensor_left_in_a_global_that_the_forward_only_sets_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "COUNT_OF_A_TEST", None)

    def forward(x: Tensor) -> Tensor:
        global COUNT_OF_A_TEST
        COUNT_OF_A_TEST = x.detach() * 2.0
        return x * 3.0

    with pytest.raises(RuntimeError, match="COUNT_OF_A_TEST"):
        make_graphed_callables(forward, (torch.randn(3, device=device, requires_grad=True),))


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 3), lambda: torch.ones(3)], ids=["module", "tensor"])
def test_a_weak_proxy_of_a_module_or_tensor_is_refused_by_name(make: Callable) -> None:
    owner = make()
    owner.scale = 2.0
    proxy, x = weakref.proxy(owner), torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"closure variable proxy is a weak proxy.*use weakref.ref"):
        make_graphed_callables(lambda x: x * proxy.scale, (x,))


@pytest.mark.parametrize("make", [nn.Identity, lambda: torch.ones(3)], ids=["module", "tensor"])
def test_an_attribute_comes_whose_absence_a_graphed_function_has_caught(make: Callable) -> None:
    owner = make()

    def scaled(x: Tensor) -> Tensor:  # [3]
        try:
            return x * owner.scale
        except AttributeError:
            return x * 1.0

    function, x = graphed(scaled), torch.randn(3)
    for _ in range(4):
        assert_bitwise_equal(function(x), scaled(x))
    assert function.info()["forward_replays"] > 1
    owner.scale = 3.0
    for _ in range(4):
        assert_bitwise_equal(function(x), x * 3.0)
