"""Containers of classes with an ``__iter__`` or ``__len__`` of their own: what they hold is compared and put back.

Functions of graphed(), and callables of make_graphed_callables that call them.
"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from text_cases import function_of_case, outcome_of_callable, refuses_changes, sees_changes

from te_graph import graphed, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
_SKIPS = "class T({0}):\n def __iter__(self):\n  return (v for v in {0}.__iter__(self) if v > 0)\n"
_SHORT = "class T({0}):\n def __len__(self):\n  return 1\n"
_COUNTS = (
    "class T({0}):\n def __iter__(self):\n  self.looks = getattr(self, 'looks', 0) + 1\n  return {0}.__iter__(self)\n"
)
_RAISES = "class T({0}):\n def __iter__(self):\n  raise RuntimeError('no one may look')\n"
_DEQUE = "collections.deque"
_PLAINS = "t = T([Plain(), Plain()]); t[1].v = 2.0"
CASES = {
    "a member of a list that is passed over": (_SKIPS.format("list") + "t = T([2.0, -1.0])", "t[1]", "t[1] = -5.0"),
    "a member of a tuple": (_SKIPS.format("tuple") + "t = T([2.0, -1.0])", "t[1]", "t = T([2.0, -5.0])"),
    "a member of a deque": (_SKIPS.format(_DEQUE) + "t = T([2.0, -1.0])", "t[1]", "t[1] = -5.0"),
    "an object in a list that says to be short": (_SHORT.format("list") + _PLAINS, "t[1].v", "t[1].v = 3.0"),
    "an object in a deque": (_SHORT.format(_DEQUE) + _PLAINS, "t[1].v", "t[1].v = 3.0"),
    "a list that cannot be gone through": (_RAISES.format("list") + "t = T([2.0])", "t[0]", "t[0] = 3.0"),
    "a list that counts": (_COUNTS.format("list") + "t = T([2.0])", "t[0]", "t[0] = 3.0"),
    "a member of a set": (_RAISES.format("set") + "t = T([2.0])", "2.0 * (3.0 in t) + 1.0", "t.add(3.0)"),
}

test_a_change_is_seen = sees_changes(CASES)
test_a_callable_refuses_a_change = refuses_changes(CASES)


def test_a_list_without_end(module: types.ModuleType) -> None:
    setup = "class T(list):\n def __iter__(self):\n  while True:\n   yield from list.__iter__(self)\nt = T([2.0, 3.0])"
    assert outcome_of_callable(module, setup, "next(iter(t))", "t[0] = 3.0") == "refused"
    function, replayed, x = function_of_case(module, setup, "next(iter(t))")
    for _ in range(3):
        assert_bitwise_equal(replayed(x).clone(), function(x))


def scaled(kind: type) -> type:
    """A subclass of ``kind`` that shows twice what it holds, and puts in twice what it is given."""

    class Scaled(kind):
        def __iter__(self) -> Any:
            return (2 * v for v in kind.__iter__(self))

        def __setitem__(self, key: Any, value: float) -> None:
            kind.__setitem__(self, key, 2 * value)

        def clear(self) -> None:
            raise NotImplementedError

        extend = update = clear

    return Scaled


KINDS = {"list": list, "deque": deque, "set": set, "dict": dict, "OrderedDict": OrderedDict}
PUT = {list: list.append, deque: deque.append, set: set.add}


def put(kind: type, container: Any, number: float) -> None:
    """Put ``number`` into ``container``, without code of its class."""
    kind.__setitem__(container, number, number) if issubclass(kind, dict) else PUT[kind](container, number)


def contents(kind: type, container: Any) -> list[Any]:
    return list(kind.items(container) if issubclass(kind, dict) else kind.__iter__(container))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_refused_capture_leaves_contents_as_they_were(device: str, kind: type) -> None:
    class Net(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # [1, 2]
            put(kind, self.held, 5.0)
            return super().forward(x) * x.sum().item()

    net = Net(2, 2, device=device)
    net.held = scaled(kind)()
    for number in (3.0, 1.0):
        put(kind, net.held, number)
    before = contents(kind, net.held)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            make_graphed_callables(net, (torch.ones(1, 2, device=device),))
        assert contents(kind, net.held) == before


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_capture_of_a_function_that_is_refused_leaves_contents_alone(device: str, kind: type) -> None:
    held, x = scaled(kind)(), torch.ones(2, device=device)
    for number in (3.0, 1.0):
        put(kind, held, number)
    before = contents(kind, held)
    function = graphed(lambda x: x * len(held) * x.sum().item())
    function(x)
    with pytest.raises(RuntimeError):
        function(x)
    assert contents(kind, held) == before
