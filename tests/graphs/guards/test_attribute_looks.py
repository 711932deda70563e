"""Attributes that come later, of whatever kind of object, where code looks through the dictionary of attributes: each
kind of object with each way to look, for a graphed function and a graphed module beside eager execution."""

from __future__ import annotations

import types

import pytest
from text_cases import install, made_module, outcomes_of_changes

pytestmark = pytest.mark.usefixtures("repeatable")

_LATER = "import types\nc = types.ModuleType('c')\nc.__file__ = '/nowhere/c.py'"
HOLDERS = {  # what makes ``c``, and a change of its attributes
    "a module": ("class M(nn.Module): pass\nc = M()", "c.s = 3.0"),
    "a module whose class has it": ("class M(nn.Module):\n s = 5.0\nc = M()", "c.s = 3.0"),
    "a module of torch": ("c = nn.Linear(2, 2)", "c.s = 3.0"),
    "a module in another": ("n = nn.Sequential(nn.ReLU())\nc = n[0]", "n[0].s = 3.0"),
    "an object": ("c = Plain()", "c.s = 3.0"),
    "an object with a tensor": ("c = Plain()\nc.t = torch.ones(3)", "c.s = 3.0"),
    "a namespace": ("c = SimpleNamespace(t=1.0)", "c.s = 3.0"),
    "a parameter": ("c = nn.Parameter(torch.ones(2))", "c.s = 3.0"),
    "a tensor": ("c = torch.ones(2)", "c.s = 3.0"),
    "a function": ("def c(): pass", "c.s = 3.0"),
    "a lambda": ("c = lambda: None", "c.s = 3.0"),
    "a cached function": ("c = functools.cache(lambda: None)", "c.s = 3.0"),
    "a thread's own": ("import threading\nc = threading.local()", "c.s = 3.0"),
    "a partial": ("c = functools.partial(print)", "c.s = 3.0"),
    "a class": ("class c: pass", "c.s = 3.0"),
    "a class of modules": ("class c(nn.Module): pass", "c.s = 3.0"),
    "a class that loses it": ("class c: s = 7.0", "del c.s"),
    "an enumeration": ("class c(enum.Enum):\n A = 1", "c.s = 3.0"),
    "a module of Python": (_LATER, "c.s = 3.0"),
    "an optimizer": ("c = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)", "c.s = 3.0"),
    "a dictionary with attributes": ("class D(dict): pass\nc = D()", "c.s = 3.0"),
    "an exception": ("c = ValueError()", "c.s = 3.0"),
}
_ASK = "import inspect\ndef ask(o):\n try: vars(o)['s']; return 3.0\n except KeyError: return 2.0"
_TAKE = "def take(o):\n v = o.__dict__.get('s', 2.0)\n return v if isinstance(v, float) else 1.0"
LOOKS = {
    "get": "take(c)",
    "in": "3.0 if 's' in vars(c) else 2.0",
    "missing": "ask(c)",
    "len": "float(len(vars(c)))",
    "dir": "3.0 if 's' in dir(c) else 2.0",
    "getattr": "getattr(c, 's', 2.0)",
    "hasattr": "3.0 if hasattr(c, 's') else 2.0",
    "getattr_static": "3.0 if inspect.getattr_static(c, 's', None) else 2.0",
    "loop": "sum(1.0 for name in c.__dict__)",
    "a loop over their names": "sum(1.0 for name in dir(c))",
}
_OF_NO_NAME = ("len", "loop", "a loop over their names")
_MARKED = ("a parameter", "a tensor")  # torch.compile adds attributes to them: how many they have is not compared
_PAIRS = [
    pytest.param(*case, look, id=f"{name}-{how}", marks=[] if (number + place) % len(LOOKS) == 0 else pytest.mark.full)
    for number, (name, case) in enumerate(HOLDERS.items())
    for place, (how, look) in enumerate(LOOKS.items())
    if not (name in _MARKED and how in _OF_NO_NAME)
]


@pytest.mark.parametrize(("setup", "change", "look"), _PAIRS)
def test_attributes_that_come_later_are_seen(
    monkeypatch: pytest.MonkeyPatch, setup: str, change: str, look: str
) -> None:
    module: types.ModuleType = made_module()
    install(module, monkeypatch)
    assert not outcomes_of_changes(module, f"{setup}\n{_ASK}\n{_TAKE}", look, [change])
