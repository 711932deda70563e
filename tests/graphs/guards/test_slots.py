"""Slots of modules, parameters and what derives from them are compared as attributes are.

Functions of graphed(), and callables of make_graphed_callables that call them.
"""

from __future__ import annotations

import random
import types

import pytest
import torch
from calls import replays
from text_cases import function_of_case, refuses_changes, sees_changes
from torch import Tensor, nn

from te_graph import CaptureError, make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")
_WITH_SLOT = "class S({}):\n __slots__ = ('k',)\ns = S({})\ns.k = 2.0"
CASES = {
    "of a module": (_WITH_SLOT.format("nn.Module", ""), "s.k", "s.k = 3.0"),
    "of a layer": (_WITH_SLOT.format("nn.Linear", "2, 2"), "s.k", "s.k = 3.0"),
    "of a list of modules": (_WITH_SLOT.format("nn.ModuleList", ""), "s.k", "s.k = 3.0"),
    "of a list of parameters": (_WITH_SLOT.format("nn.ParameterList", ""), "s.k", "s.k = 3.0"),
    "of a parameter": (_WITH_SLOT.format("nn.Parameter", "torch.ones(3)"), "s.k", "s.k = 3.0"),
    "of a module of Python": (
        "import types\nclass S(types.ModuleType):\n __slots__ = ('k',)\n"
        "s = S('made'); s.__file__ = '/nowhere/made.py'\ns.k = 2.0",
        "s.k",
        "s.k = 3.0",
    ),
    "of a base": (_WITH_SLOT.format("nn.Module", "") + "\nclass D(S): pass\ns = D(); s.k = 2.0", "s.k", "s.k = 3.0"),
    "that goes": (_WITH_SLOT.format("nn.Module", ""), "s.k if hasattr(s, 'k') else 3.0", "del s.k"),
    "that comes": (_WITH_SLOT.format("nn.Module", "") + "\ndel s.k", "getattr(s, 'k', 2.0)", "s.k = 3.0"),
    "with a list": (_WITH_SLOT.format("nn.Module", "") + "\ns.k = [2.0]", "s.k[0]", "s.k[0] = 3.0"),
    "behind a property": (
        "class S(nn.Module):\n __slots__ = ('_k',)\n @property\n def k(self): return self._k\ns = S()\ns._k = 2.0",
        "s.k",
        "s._k = 3.0",
    ),
}


test_a_change_is_seen = sees_changes(CASES)
test_a_callable_refuses_a_change = refuses_changes(CASES)


class Slotted(nn.Module):
    """Counts, or draws, by what is in its slot: [3, 4] -> [3, 4]."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        super().__init__()
        self.held = held


class Counting(Slotted):
    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        self.held += 1
        return x * self.held


class Drawing(Slotted):
    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x * self.held.random()


class Scaling(Slotted):
    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x * self.held


def test_a_counter_in_a_slot_is_refused(device: str) -> None:
    with pytest.raises(RuntimeError, match=r"changes held of 0 \(from \d to \d\)"):
        make_graphed_callables(nn.Sequential(Counting(0)), (torch.randn(3, 4, device=device),))


def test_a_capture_that_fails_leaves_slots_as_they_were(device: str) -> None:
    class Plain:
        __slots__ = ("steps", "told")

    class Failing(Slotted):
        def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            self.held, plain.steps, plain.told = self.held + 1, 5, True
            return x * x.sum().item()

    net, plain = Failing(0), Plain()
    plain.steps = 0
    with pytest.raises(RuntimeError):
        make_graphed_callables(lambda x: net(x) * plain.steps, (torch.randn(3, 4, device=device),))
    assert (net.held, plain.steps, hasattr(plain, "told")) == (0, 0, False)


def test_a_generator_in_a_slot_is_refused(device: str) -> None:
    with pytest.raises(RuntimeError, match="draws from held of 0"):
        make_graphed_callables(nn.Sequential(Drawing(random.Random(1))), (torch.randn(3, 4, device=device),))


def test_a_counter_in_a_slot_is_refused_by_a_function(module: types.ModuleType) -> None:
    setup = "class S(nn.Module):\n __slots__ = ('k',)\n def forward(self):\n  self.k += 1.0\n  return self.k\n"
    _, replayed, x = function_of_case(module, f"{setup}s = S(); s.k = 1.0", "s()")
    replayed(x)
    with pytest.raises(CaptureError, match=r"k of global variable s changed from 2\.0 to 3\.0"):
        replayed(x)


def test_a_tensor_in_a_slot_is_followed(device: str) -> None:
    held = torch.randn(4, device=device)
    net, x = nn.Sequential(Scaling(held)), torch.randn(3, 4, device=device)
    make_graphed_callables(net, (x,))
    assert torch.equal(net(x), x * held)
    assert replays(net) == 1
    held.mul_(2)
    assert torch.equal(net(x), x * held)
    net[0].held = held.clone()
    with pytest.raises(RuntimeError, match=r"held of 0 .* since capture"):
        net(x)
