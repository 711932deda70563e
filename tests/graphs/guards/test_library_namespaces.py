"""What was put into modules and classes of Python, torch and NumPy is compared where code names it.

Functions of graphed(), and callables of make_graphed_callables that call them.
"""

from __future__ import annotations

import builtins
import math
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from calls import replays
from text_cases import function_of_case, outcome_of_callable, refuses_changes, run_text, sees_changes
from torch import nn

from te_graph import CaptureError, make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")
_OWNERS = {
    **{one.__name__: one for one in (torch, torch.nn, torch.nn.functional, torch.backends)},
    **{one.__name__: one for one in (np, sys, math, threading, builtins)},
    **{"torch.Tensor": torch.Tensor, "torch.nn.Parameter": nn.Parameter, "torch.optim.SGD": torch.optim.SGD},
    **{"torch.nn.Module": nn.Module, "torch.nn.Linear": nn.Linear},
}
NAMESPACES = {
    name: (
        f"import {name.partition('.')[0]}\n{name}.put_by_a_test = 2.0",
        f"{name}.put_by_a_test",
        f"{name}.put_by_a_test = 3.0",
    )
    for name in _OWNERS
}
WAYS = {
    "of a tensor": ("torch.Tensor.put_by_a_test = 2.0", "x.put_by_a_test", "torch.Tensor.put_by_a_test = 3.0"),
    "of a parameter": (
        "p = nn.Parameter(torch.ones(3))\nnn.Parameter.put_by_a_test = 2.0",
        "p.put_by_a_test",
        "nn.Parameter.put_by_a_test = 3.0",
    ),
    "builtins": (
        "import builtins\nbuiltins.put_by_a_test = 2.0",
        "put_by_a_test",
        "builtins.put_by_a_test = 3.0",
    ),
    "by another name": ("t = torch\nt.put_by_a_test = 2.0", "t.put_by_a_test", "t.put_by_a_test = 3.0"),
    "getattr": ("torch.put_by_a_test = 2.0", "getattr(torch, 'put_by_a_test')", "torch.put_by_a_test = 3.0"),
    "imported inside": (
        "import torch.nn.functional\ndef read():\n from torch.nn import functional as f\n return f.put_by_a_test\n"
        "torch.nn.functional.put_by_a_test = 2.0",
        "read()",
        "torch.nn.functional.put_by_a_test = 3.0",
    ),
    "a dictionary": ("torch.put_by_a_test = {'k': 2.0}", "torch.put_by_a_test['k']", "torch.put_by_a_test['k'] = 3.0"),
    "a nest": (
        "torch.put_by_a_test = {'k': [2.0]}",
        "torch.put_by_a_test['k'][0]",
        "torch.put_by_a_test['k'][0] = 3.0",
    ),
    "a namespace": (
        "torch.put_by_a_test = SimpleNamespace(k=2.0)",
        "torch.put_by_a_test.k",
        "torch.put_by_a_test.k = 3.0",
    ),
    "an object": (
        "torch.put_by_a_test = Plain(); torch.put_by_a_test.k = 2.0",
        "torch.put_by_a_test.k",
        "torch.put_by_a_test.k = 3.0",
    ),
    "a class": (
        "class C:\n k = 2.0\ntorch.put_by_a_test = C",
        "torch.put_by_a_test.k",
        "torch.put_by_a_test.k = 3.0",
    ),
    "an object on a class": (
        "nn.Parameter.put_by_a_test = SimpleNamespace(k=2.0)",
        "nn.Parameter.put_by_a_test.k",
        "nn.Parameter.put_by_a_test.k = 3.0",
    ),
    "a function": (
        "torch.put_by_a_test = lambda: 2.0",
        "torch.put_by_a_test()",
        "torch.put_by_a_test = lambda: 3.0",
    ),
    "a number that goes": (
        "torch.put_by_a_test = 2.0",
        "torch.put_by_a_test if hasattr(torch, 'put_by_a_test') else 3.0",
        "del torch.put_by_a_test",
    ),
}
CASES = {**NAMESPACES, **WAYS}


@pytest.fixture
def module(module: types.ModuleType) -> Iterator[types.ModuleType]:
    yield module
    for owner in _OWNERS.values():
        if "put_by_a_test" in vars(owner):
            del owner.put_by_a_test


test_a_change_is_seen = sees_changes(CASES)
test_a_callable_refuses_a_change = refuses_changes(CASES)


_COUNTER = "torch.put_by_a_test = 0.0\ndef read():\n torch.put_by_a_test += 1.0\n return torch.put_by_a_test"


def test_a_counter_is_refused(module: types.ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"changes .*torch\.put_by_a_test \(from"):
        outcome_of_callable(module, _COUNTER, "read()", "")


def test_a_counter_is_refused_by_a_function(module: types.ModuleType) -> None:
    _, replayed, x = function_of_case(module, _COUNTER, "read()")
    replayed(x)
    with pytest.raises(CaptureError, match=r"torch\.put_by_a_test changed from 1\.0 to 2\.0"):
        replayed(x)


def test_what_a_callable_leaves_there_is_compared(module: types.ModuleType) -> None:
    run_text(module, "import torch\ndef fn(x):\n torch.put_by_a_test = x.shape[0]\n return x * 2")
    net = make_graphed_callables(module.fn, (torch.ones(3),))
    net(torch.ones(3))
    torch.put_by_a_test = None
    with pytest.raises(RuntimeError, match=r"torch\.put_by_a_test changed from 3 to None since capture"):
        net(torch.ones(3))


def test_a_tensor_that_was_put_there_is_followed(module: types.ModuleType, device: str) -> None:
    torch.put_by_a_test = torch.randn(3, device=device)
    net = make_graphed_callables(lambda x: x * torch.put_by_a_test, (torch.ones(3, device=device),))
    x = torch.randn(3, device=device)
    assert torch.equal(net(x), x * torch.put_by_a_test)
    torch.put_by_a_test.mul_(2)
    assert torch.equal(net(x), x * torch.put_by_a_test)
    assert replays(net) == 2


CHANGES: dict[str, Callable[[], Any]] = {
    "where modules are looked for": lambda: sys.path.append("/nowhere"),
    "filters of warnings": lambda: warnings.simplefilter("ignore"),
    "what no code names": lambda: setattr(torch, "put_by_a_test", object()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_libraries_keep_for_themselves_may_change(
    module: types.ModuleType, change: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    setup = "import sys, types, warnings\nc = types.SimpleNamespace(path=2.0, filters=1.0)"
    run_text(module, f"{setup}\ndef fn(x): return x * c.path * c.filters")
    graphed, x = make_graphed_callables(module.fn, (torch.ones(3),)), torch.ones(3)
    with warnings.catch_warnings():
        for count in (1, 2):
            graphed(x)
            assert replays(graphed) == count
            change()
