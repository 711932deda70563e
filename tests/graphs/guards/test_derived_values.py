"""Values of derived classes, and containers that hold them, are compared by value; those that hold fields besides by
identity, and the containers by their members.

Functions of graphed(), and callables of make_graphed_callables that call them.
"""

from __future__ import annotations

import types

import pytest
import torch
from calls import replays
from sequences import called, counts
from text_cases import function_of_case, refuses_changes, run_text, sees_changes

from te_graph import make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")
_IMPORTS = "import datetime, decimal, pathlib\n"
_CLASS = _IMPORTS + "class V({}): pass\n"
_DEEP = "t = 1.0\nfor _ in range({}): t = (t,)\n"
CASES = {
    "beside a text": (_CLASS.format("str") + "d = {'k': 2.0, 'n': V('x')}", "d['k']", "d['k'] = 3.0"),
    "beside a version": ("d = {'k': 2.0, 'n': torch.__version__}", "d['k']", "d['k'] = 3.0"),
    "beside a key": (_CLASS.format("str") + "d = {V('k'): 2.0}", "d['k']", "d['k'] = 3.0"),
    "beside a date": (_CLASS.format("datetime.date") + "l = [2.0, V(2020, 1, 1)]", "l[0]", "l[0] = 3.0"),
    "beside a path": (_CLASS.format("pathlib.PurePosixPath") + "l = [2.0, V('a')]", "l[0]", "l[0] = 3.0"),
    "beside slots": (
        "class V(float):\n __slots__ = ('unit',)\nl = [2.0, V(1.0)]",
        "l[0]",
        "l[0] = 3.0",
    ),
    "beside a deep tuple": (_DEEP.format(40) + "l = [2.0, t]", "l[0]", "l[0] = 3.0"),
    "in a dictionary": (
        _CLASS.format("str") + "d = {'a': {'k': 2.0, 'n': V('x')}}",
        "d['a']['k']",
        "d['a']['k'] = 3.0",
    ),
    "in a tuple": (_CLASS.format("str") + "t = ({'k': 2.0, 'n': V('x')},)", "t[0]['k']", "t[0]['k'] = 3.0"),
    "in a list of a class": (_CLASS.format("float") + "class C: l = [2.0, V(1.0)]", "C.l[0]", "C.l[0] = 3.0"),
    "in a queue": (_CLASS.format("str") + "q = collections.deque([2.0, V('x')])", "q[0]", "q[0] = 3.0"),
    "in a queue that grows": (
        _CLASS.format("str") + "q = collections.deque([V('x'), V('y')])",
        "float(len(q))",
        "q.append(V('z'))",
    ),
    "of a class": (_CLASS.format("str") + "class C: n = V('ab')", "float(len(C.n))", "C.n = V('abc')"),
    "in a list": (_CLASS.format("float") + "l = [V(2.0)]", "float(l[0])", "l[0] = V(3.0)"),
    "a number that comes": (_CLASS.format("float") + "l = [V(2.0)]", "float(l[-1])", "l.append(V(3.0))"),
    "a time": (
        _CLASS.format("datetime.datetime") + "l = [V(2020, 1, 1, 2)]",
        "float(l[0].hour)",
        "l[0] = V(2020, 1, 1, 3)",
    ),
}


_NOTED = _CLASS + "def made(w):\n v = V({})\n v.w = w\n return v\n"
_SLOTS = "class V({}):\n __slots__ = ('w',)\ndef made(w):\n v = V({})\n v.w = w\n return v\n"
for _base, _equal in {"int": "1", "str": "1", "float": "1", "bytes": "1", "frozenset": "[1]"}.items():
    CASES |= {
        f"another {_base} with another attribute, in {place}": (
            _NOTED.format(_base, _equal) + f"c = {put.format('made(2.0)')}",
            read,
            f"c = {put.format('made(3.0)')}",
        )
        for place, put, read in (
            ("a list", "[1, {}]", "c[1].w"),
            ("a tuple", "(1, {})", "c[1].w"),
            ("a tuple in a list", "[1, (2, {})]", "c[1][1].w"),
            ("a dictionary", "dict(a={})", "c['a'].w"),
            ("keys", "{{{}: 1}}", "next(iter(c)).w"),
            ("a set", "{{{}}}", "next(iter(c)).w"),
            ("a frozen set", "frozenset({{{}}})", "next(iter(c)).w"),
            ("a queue", "collections.deque([{}])", "c[0].w"),
        )
    }
CASES |= {
    "an item of a list with another attribute": (
        _NOTED.format("str", "1") + "c = [made(2.0)]",
        "c[0].w",
        "c[0] = made(3.0)",
    ),
    "an attribute of a key": (
        _NOTED.format("str", "1") + "c = {made(2.0): 1}",
        "next(iter(c)).w",
        "next(iter(c)).w = 3.0",
    ),
    "a slot in a set": (_SLOTS.format("float", "1") + "c = {made(2.0)}", "next(iter(c)).w", "next(iter(c)).w = 3.0"),
    "a slot of a key": (_SLOTS.format("float", "1") + "c = {made(2.0): 1}", "next(iter(c)).w", "next(iter(c)).w = 3.0"),
    "a slot of a set in a list": (_SLOTS.format("frozenset", "[1]") + "c = [made(2.0)]", "c[0].w", "c[0].w = 3.0"),
    "time zones of one name": (
        _IMPORTS + "def zone(h): return datetime.timezone(datetime.timedelta(hours=h), 'LOCAL')\nc = [zone(1)]",
        "float(c[0].utcoffset(None).seconds)",
        "c = [zone(2)]",
    ),
    "times in zones of one name": (
        _IMPORTS + "def time(h): return datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone(\n"
        " datetime.timedelta(hours=h), 'LOCAL'))\nc = time(1)",
        "float(c.utcoffset().seconds)",
        "c = time(2)",
    ),
    "how safe an identifier is": (
        "import uuid\nc = [uuid.UUID(int=1)]",
        "float(c[0].is_safe is uuid.SafeUUID.safe) + 1",
        "c = [uuid.UUID(int=1, is_safe=uuid.SafeUUID.safe)]",
    ),
}


test_a_change_is_seen = sees_changes(CASES)
test_a_callable_refuses_a_change = refuses_changes(CASES)


_MAKE = _CLASS + "c = Plain()\ndef make(): c.n = {}\nmake()"
EQUAL = {  # what is made anew, and equal
    "a text": (_MAKE.format("str", "V('ab')"), "float(len(c.n))"),
    "bytes": (_MAKE.format("bytes", "V(b'ab')"), "float(len(c.n))"),
    "a whole number": (_MAKE.format("int", "V(10**30)"), "float(c.n)"),
    "a number": (_MAKE.format("float", "V(2.5)"), "float(c.n)"),
    "a complex number": (_MAKE.format("complex", "V(2.5)"), "abs(c.n)"),
    "a decimal": (_MAKE.format("decimal.Decimal", "V('2.5')"), "float(c.n)"),
    "a path": (_MAKE.format("pathlib.PurePosixPath", "V('ab')"), "float(len(c.n.name))"),
    "a date": (_MAKE.format("datetime.date", "V(2020, 1, 2)"), "float(c.n.day)"),
    "a list": (_MAKE.format("str", "[V('ab'), 1.0]"), "float(len(c.n[0]))"),
    "a list of those with attributes": (
        _CLASS.format("str") + "c = Plain()\ndef make():\n v = V('ab')\n v.w = 2.0\n c.n = [(v, 1.0)]\nmake()",
        "c.n[0][0].w",
    ),
}


@pytest.mark.parametrize(("setup", "read"), EQUAL.values(), ids=EQUAL)
def test_equal_ones_that_are_made_anew_are_no_change(module: types.ModuleType, setup: str, read: str) -> None:
    function, replayed, x = function_of_case(module, setup, read)
    net = make_graphed_callables(lambda x: function(x), (x,))
    for _ in range(3):
        assert torch.equal(replayed(x), function(x))
        assert torch.equal(net(x), function(x))
        run_text(module, "make()")
    assert counts(replayed) == (1, 2, 0, 1)
    assert replays(net) == 3


def test_two_zeros_of_a_derived_class_differ(module: types.ModuleType) -> None:
    function, replayed, x = function_of_case(
        module, _CLASS.format("float") + "l = [V(0.0)]", "math.copysign(2.0, l[0])"
    )
    called(replayed, 3, x)
    run_text(module, "l[0] = V(-0.0)")
    assert torch.equal(replayed(x), function(x))
