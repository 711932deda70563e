"""Modules that are containers, too: what they hold is compared.

Functions of graphed(), and callables of make_graphed_callables that call them.
"""

from __future__ import annotations

import types

import pytest
import torch
from calls import replays
from text_cases import function_of_case, outcome_of_callable, refuses_changes, sees_changes
from torch import Tensor, nn

from te_graph import CaptureError, make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")
_MADE = (
    "class T({0}):\n __hash__ = object.__hash__\n"
    " def __init__(self, *given):\n  nn.Module.__init__(self)\n  {1}.__init__(self, *given)\n"
)
_DICT, _LIST = _MADE.format("dict, nn.Module", "dict"), _MADE.format("list, nn.Module", "list")
_USER_DICT = _MADE.format("nn.Module, collections.UserDict", "collections.UserDict")
_USER_LIST = _MADE.format("nn.Module, collections.UserList", "collections.UserList")
_DEQUE, _SET = _MADE.format("collections.deque, nn.Module", "collections.deque"), _MADE.format("set, nn.Module", "set")
CASES = {
    "an item of a dictionary": (_DICT + "t = T({'k': 2.0})", "t['k']", "t['k'] = 3.0"),
    "another key": (_DICT + "t = T({'k': 2.0})", "2.0 + len(t)", "t['l'] = 3.0"),
    "a list in a dictionary": (_DICT + "t = T({'k': [2.0]})", "t['k'][0]", "t['k'][0] = 3.0"),
    "an object in a dictionary": (_DICT + "t = T({'k': Plain()}); t['k'].v = 2.0", "t['k'].v", "t['k'].v = 3.0"),
    "an attribute of a dictionary": (_DICT + "t = T({'k': 2.0}); t.v = 2.0", "t.v", "t.v = 3.0"),
    "a number in a list": (_LIST + "t = T([2.0])", "t[0]", "t[0] = 3.0"),
    "a list that grows": (_LIST + "t = T([2.0])", "2.0 + len(t)", "t.append(3.0)"),
    "an object in a list": (_LIST + "t = T([Plain()]); t[0].v = 2.0", "t[0].v", "t[0].v = 3.0"),
    "UserDict": (_USER_DICT + "t = T({'k': 2.0})", "t['k']", "t['k'] = 3.0"),
    "UserList": (_USER_LIST + "t = T([2.0])", "t[0]", "t[0] = 3.0"),
    "deque": (_DEQUE + "t = T([2.0])", "t[0]", "t[0] = 3.0"),
    "set": (_SET + "t = T([2.0])", "2.0 + len(t)", "t.add(3.0)"),
    "a module inside a module": (
        f"{_DICT}t = nn.Sequential(T()); t[0]['k'] = 2.0",
        "t[0]['k']",
        "t[0]['k'] = 3.0",
    ),
}


test_a_change_is_seen = sees_changes(CASES)
test_a_callable_refuses_a_change = refuses_changes(CASES)


COUNTERS = {"dict": f"{_DICT}t = T({{'k': 0.0}})", "UserDict": f"{_USER_DICT}t = T({{'k': 0.0}})"}
_COUNT = "\ndef read():\n t['k'] += 1.0\n return t['k']"


@pytest.mark.parametrize("setup", COUNTERS.values(), ids=COUNTERS)
def test_a_counter_is_refused(module: types.ModuleType, setup: str) -> None:
    with pytest.raises(RuntimeError, match=r"changes global variable t.* \(from"):
        outcome_of_callable(module, setup + _COUNT, "read()", "")


@pytest.mark.parametrize("setup", COUNTERS.values(), ids=COUNTERS)
def test_a_counter_is_refused_by_a_function(module: types.ModuleType, setup: str) -> None:
    _, replayed, x = function_of_case(module, setup + _COUNT, "read()")
    replayed(x)
    with pytest.raises(CaptureError, match="changes the state of Python objects"):
        replayed(x)


class Table(dict, nn.Module):
    """[3] -> [3]: by the tensor [3] that it holds."""

    __hash__ = object.__hash__

    def __init__(self, scale: Tensor) -> None:
        nn.Module.__init__(self)
        self["scale"] = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self["scale"]


def test_a_tensor_that_a_module_has_as_an_item_is_followed(device: str) -> None:
    table, x = Table(torch.randn(3, device=device)), torch.randn(3, device=device)
    make_graphed_callables(table, (x,))
    assert torch.equal(table(x), x * table["scale"])
    table["scale"].mul_(2)
    assert torch.equal(table(x), x * table["scale"])
    assert replays(table) == 2
    table["scale"] = table["scale"].clone()
    with pytest.raises(RuntimeError, match=r"\['scale'\] .* since capture"):
        table(x)


class Marked(Table):
    def forward(self, x: Tensor) -> Tensor:
        self.mark, self["mark"] = True, True
        return x * self["scale"] * x.sum().item()


def test_a_capture_that_fails_leaves_items_and_attributes_as_they_were(device: str) -> None:
    table = Marked(torch.randn(3, device=device))
    with pytest.raises(RuntimeError):
        make_graphed_callables(table, (torch.randn(3, device=device),))
    assert list(table) == ["scale"]
    assert not hasattr(table, "mark")
