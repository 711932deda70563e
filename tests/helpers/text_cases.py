"""Cases that are text: what is there, the number that a function reads, and a change of it."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sequences import counts

from te_graph import graphed, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

Cases = dict[str, tuple[str, str, str]]  # by name: what is there, what a function reads, a change of it

HEADER = """
import argparse, array, collections, contextlib, copy, ctypes, dataclasses, enum, functools, inspect, math, operator
import pickle, queue, statistics, threading, typing, weakref
import numpy as np
import torch
from torch import nn
from types import MappingProxyType, SimpleNamespace
H = K = 2.0
class Plain:
    pass
def helper():
    return H
"""


def made_module() -> types.ModuleType:
    """A module of the user's that the text of a case is to run in."""
    made = types.ModuleType("module_of_a_test")
    made.__file__ = "/nowhere/module_of_a_test.py"
    return made


def run_text(module: types.ModuleType, text: str) -> None:
    exec(compile(text.replace("MODULE", module.__name__), "<case>", "exec"), vars(module))


def function_of_case(module: types.ModuleType, setup: str, read: str) -> tuple[Callable, Any, torch.Tensor]:
    """The function, itself and graphed, and its argument [3]."""
    run_text(module, f"{HEADER}\n{setup}\ndef fn(x):\n v = {read}\n return torch.Tensor.mul(x, v)")
    return module.fn, graphed(module.fn), torch.full((3,), 0.5)


def assert_change_is_seen(module: types.ModuleType, setup: str, read: str, change: str) -> None:
    """Three calls, of which the third replays; the change; another call."""
    function, replayed, x = function_of_case(module, setup, read)
    for _ in range(3):
        assert_bitwise_equal(replayed(x).clone(), function(x))
    assert counts(replayed) == (1, 2, 0, 1)
    before = function(x)
    run_text(module, change)
    assert not torch.equal(function(x), before)
    assert_bitwise_equal(replayed(x).clone(), function(x))
    assert counts(replayed)[2] == 1


def sees_changes(cases: Cases) -> Callable:
    """A test that a graphed function sees the change of each of ``cases``."""

    @pytest.mark.parametrize(("setup", "read", "change"), cases.values(), ids=cases)
    def test(module: types.ModuleType, setup: str, read: str, change: str) -> None:
        assert_change_is_seen(module, setup, read, change)

    return test


def refuses_changes(cases: Cases) -> Callable:
    """A test that a callable refuses to replay after the change of each of ``cases``."""

    @pytest.mark.parametrize(("setup", "read", "change"), cases.values(), ids=cases)
    def test(module: types.ModuleType, setup: str, read: str, change: str) -> None:
        assert outcome_of_callable(module, setup, read, change) == "refused"

    return test


def outcome_of_callable(module: types.ModuleType, setup: str, read: str, change: str) -> str:
    """What a module graphed by make_graphed_callables does after the change: "refused", "right" or "stale"."""
    run_text(module, f"{HEADER}\n{setup}\ndef fn(x):\n v = {read}\n return torch.Tensor.mul(x, v)")
    run_text(module, "class Net(nn.Module):\n def forward(self, x): return fn(x)")
    x = torch.full((3,), 0.5)
    net = make_graphed_callables(module.Net(), (x,))
    before = module.fn(x)
    assert_bitwise_equal(net(x), before)
    run_text(module, change)
    expected = module.fn(x)
    assert not torch.equal(expected, before)
    try:
        return "right" if torch.equal(net(x), expected) else "stale"
    except (ValueError, RuntimeError) as error:
        assert "since capture" in str(error)
        return "refused"


def install(module: types.ModuleType, monkeypatch: Any) -> None:
    """Make it importable by its name, for as long as a test runs."""
    monkeypatch.setitem(sys.modules, module.__name__, module)


@contextlib.contextmanager
def importable(module: types.ModuleType) -> Iterator[None]:
    """Make it importable by its name, inside. Other modules that are imported meanwhile stay."""
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        del sys.modules[module.__name__]


def outcomes_of_changes(module: types.ModuleType, setup: str, read: str, changes: list[str]) -> str:
    """Calls of a graphed function and of a graphed module, which captures anew at a mismatch, after each of
    ``changes``: how one differs from eager execution; empty where none does. Changes that raise an error count for
    nothing."""
    run_text(module, f"{HEADER}\n{setup}\ndef fn(x):\n v = {read}\n return torch.Tensor.mul(x, v)")
    run_text(module, "class Net(nn.Module):\n def forward(self, x): return fn(x)")
    x = torch.full((3,), 0.5)
    function = graphed(module.fn)
    options = {"num_warmup_iters": 2, "on_mismatch": "capture", "max_captures": 100}
    try:
        module.fn(x)
    except Exception:
        return ""  # no program
    try:
        net = make_graphed_callables(module.Net(), (x,), **options)
    except RuntimeError:  # refused by name
        net = module.fn
    for change in ["", *changes]:
        with contextlib.suppress(AttributeError, TypeError, KeyError, IndexError):
            run_text(module, change)
        for _ in range(2 if change else 3):
            expected, *seen = (_result(call, x) for call in (module.fn, function, net))
            for what, found in zip(("graphed function", "graphed module"), seen, strict=True):
                if found != expected:
                    return f"after {change!r} a {what} gives {found}, eager execution {expected}"
    return ""


def _result(call: Callable, x: torch.Tensor) -> Any:
    """The numbers of a result, or the class of an error."""
    try:
        return call(x).tolist()
    except Exception as error:
        return type(error).__name__
