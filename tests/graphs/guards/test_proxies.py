"""Objects that show attributes of others as their own, and slots behind properties: their classes are not asked."""

from __future__ import annotations

import types

import pytest
import torch
from text_cases import HEADER, Cases, refuses_changes, run_text, sees_changes
from torch import nn

from te_graph import graphed, make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")

_TARGET = "class Cfg:\n def __init__(self): self.gain = 2.0\n"
_INIT = " def __init__(self, target): object.__setattr__(self, '_target', target)\n"
_BY_DICT = (
    f"{_TARGET}class Proxy:\n{_INIT} @property\n"
    " def __dict__(self): return object.__getattribute__(self, '_target').__dict__\n"
    " def __getattr__(self, name): return getattr(object.__getattribute__(self, '_target'), name)\n"
    "t = Cfg()\np = Proxy(t)"
)
_BY_LOOK = (
    f"{_TARGET}class Proxy:\n{_INIT} def __getattribute__(self, name):\n"
    "  return getattr(object.__getattribute__(self, '_target'), name)\nt = Cfg()\np = Proxy(t)"
)
_SLOTTED = _BY_LOOK.replace("class Proxy:", "class Proxy:\n __slots__ = ('_target',)")
_SLOT = (
    "class A: __slots__ = ('g',)\nclass B(A):\n @property\n def g(self): return A.g.__get__(self) * 1.5\n"
    "b = B()\nA.g.__set__(b, 2.0)"
)
_OTHER = "t2 = Cfg()\nt2.gain = 3.0\nobject.__setattr__(p, '_target', t2)"

CASES: Cases = {
    "a property __dict__": (_BY_DICT, "p.gain", "t.gain = 3.0"),
    "a property __dict__, another object": (_BY_DICT, "p.gain", _OTHER),
    "__getattribute__": (_BY_LOOK, "p.gain", "t.gain = 3.0"),
    "__getattribute__, another object": (_BY_LOOK, "p.gain", _OTHER),
}
_REFUSING = (
    "class R:\n def __getattribute__(self, name):\n  if name == 'gain': return G\n  raise {}(name)\nG = 2.0\np = R()"
)
CASES |= {
    "no __class__": (_REFUSING.format("AttributeError"), "p.gain", "G = 3.0"),
    "a key of attributes that is no name": ("c = Plain(); vars(c)[3] = 1.0; c.gain = 2.0", "c.gain", "c.gain = 3.0"),
    "what stands under it": ("c = Plain(); vars(c)[3] = 1.0", "vars(c)[3]", "vars(c)[3] = 3.0"),
}
SLOTS: Cases = {
    "__getattribute__ with a slot": (_SLOTTED, "p.gain", "t.gain = 3.0"),
    "__getattribute__, another object in a slot": (_SLOTTED, "p.gain", _OTHER),
    "a slot behind a property": (_SLOT, "b.g", "A.g.__set__(b, 3.0)"),
}

test_graphed_functions_see_them = sees_changes(CASES)
test_callables_refuse_them = refuses_changes(CASES | SLOTS)


@pytest.mark.parametrize(("setup", "read", "change"), SLOTS.values(), ids=SLOTS)
def test_graphed_functions_run_eagerly_with_hidden_slots(
    module: types.ModuleType, setup: str, read: str, change: str
) -> None:
    run_text(module, f"{setup}\ndef fn(x): return x * {read}")
    x = torch.ones(2)
    function = graphed(module.fn)
    for _ in range(3):
        assert torch.equal(function(x), module.fn(x))
    run_text(module, change)
    assert torch.equal(function(x), module.fn(x))


@pytest.mark.parametrize(("setup", "read", "change"), (CASES | SLOTS).values(), ids=CASES | SLOTS)
def test_callables_replay_while_nothing_changes(module: types.ModuleType, setup: str, read: str, change: str) -> None:
    run_text(module, f"{HEADER}\n{setup}\ndef fn(x): return x * {read}")
    x = torch.ones(2)
    callable_ = make_graphed_callables(module.fn, (x,))
    assert torch.equal(callable_(x), module.fn(x))
    assert callable_.te_graph.info()["forward_replays"] == 1


def test_what_says_that_it_is_a_module_is_refused_by_name() -> None:
    class Proxy:
        def __init__(self, target: nn.Module) -> None:
            self.target = target

        __class__ = property(lambda self: nn.Linear)

    held = Proxy(nn.Linear(2, 2))

    def fn(x: torch.Tensor) -> torch.Tensor:
        return held.target(x)

    with pytest.raises(RuntimeError, match="closure variable held is a proxy"):
        make_graphed_callables(fn, (torch.ones(2, 2),))
    function = graphed(fn)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(function(torch.ones(2, 2)), fn(torch.ones(2, 2)))


def test_what_refuses_to_tell_its_class_is_refused_by_name(module: types.ModuleType) -> None:
    run_text(module, f"{_REFUSING.format('ValueError')}\ndef fn(x): return x * p.gain")
    with pytest.raises(RuntimeError, match=r"global variable p cannot be compared.*__class__"):
        make_graphed_callables(module.fn, (torch.ones(2),))
    function = graphed(module.fn)
    for _ in range(3):
        assert torch.equal(function(torch.ones(2)), module.fn(torch.ones(2)))


def test_a_queue_that_gives_another_object_at_each_look_is_compared_by_what_it_holds(module: types.ModuleType) -> None:
    run_text(
        module,
        "import collections\nclass Queue(collections.deque):\n"
        " def __getitem__(self, n): return [super().__getitem__(n)]\n"
        "class C: k = 2.0\nq = Queue([C()])\ndef fn(x): return x * q[0][0].k",
    )
    callable_ = make_graphed_callables(module.fn, (torch.ones(2),))
    assert torch.equal(callable_(torch.ones(2)), module.fn(torch.ones(2)))
    run_text(module, "q[0][0].k = 3.0")
    with pytest.raises(RuntimeError, match=r"k of global variable q\[0\] changed"):
        callable_(torch.ones(2))
