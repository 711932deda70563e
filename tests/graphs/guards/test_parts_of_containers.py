"""What is found by its hash leads on to what can change, as items do: keys of dictionaries, members of sets, wherever
these stand.

Functions of graphed(), and callables of make_graphed_callables that call them.
"""

from __future__ import annotations

import types
import uuid
from collections.abc import Iterator

import pytest
import torch
from sequences import called, counts
from text_cases import refuses_changes, run_text, sees_changes

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
_OBJECT = "o = Plain(); o.v = 2.0\n"
_FIRST = "next(iter({}))"
_HOLDERS = {  # what holds a set, and where it is found there
    "a dictionary": ("{{'a': {}}}", "c['a']"),
    "a list": ("[1, {}]", "c[1]"),
    "a tuple": ("(1, {})", "c[1]"),
    "a named tuple": ("collections.namedtuple('N', 'a b')(1, {})", "c.b"),
    "a queue": ("collections.deque([{}])", "c[0]"),
    "UserDict": ("collections.UserDict(a={})", "c['a']"),
    "lists in lists": ("[[[{}]]]", "c[0][0][0]"),
    "a frozen set in a set": ("{{frozenset({})}}", _FIRST.format("c")),
    "a tuple in a set": ("{{(1, frozenset({}))}}", _FIRST.format("c") + "[1]"),
    "a key": ("{{frozenset({}): 1}}", _FIRST.format("c")),
    "a default": ("lambda s={}: s", "c()"),
    "arguments of a partial": ("functools.partial(lambda s: s, {})", "c()"),
}
CASES = {
    f"of an object in a set in {name}": (
        f"{_OBJECT}c = {put.format('{o}')}",
        f"{_FIRST.format(where)}.v",
        "o.v = 3.0",
    )
    for name, (put, where) in _HOLDERS.items()
}
for _name, (_made, _read, _change) in {
    "mode of a module": ("nn.Dropout(0.0)", "{}.training + 1.0", "o.train(False)"),
    "attribute of a module": ("nn.ELU(2.0)", "{}.alpha", "o.alpha = 3.0"),
    "hook of a module": (
        "nn.Identity()",
        "{}(torch.ones(3))",
        "o.register_forward_hook(lambda module, given, result: result * 2)",
    ),
    "setting of an optimizer": (
        "torch.optim.SGD([torch.ones(2)], lr=2.0)",
        "{}.defaults['lr']",
        "o.defaults['lr'] = 3.0",
    ),
    "object of a method": (
        "type('C', (), {'k': 2.0, 'f': lambda self: self.k})().f",
        "{}()",
        "o.__self__.k = 3.0",
    ),
    "argument of a partial": ("functools.partial(dict.get, {'k': 2.0}, 'k')", "{}()", "o.args[0]['k'] = 3.0"),
    "constant of a class": ("type('C', (), {'k': 2.0})", "{}.k", "o.k = 3.0"),
    "method of a class": (
        "type('C', (), {'f': staticmethod(lambda: 2.0)})",
        "{}.f()",
        "o.f = staticmethod(lambda: 3.0)",
    ),
}.items():
    CASES |= {
        f"{_name} in {place}": (f"o = {_made}\nc = {put}", _read.format(where), _change)
        for place, put, where in (
            ("a set", "{o}", _FIRST.format("c")),
            ("a set in a dictionary", "{'a': {o}}", _FIRST.format("c['a']")),
            ("keys", "{o: torch.ones(2)}", _FIRST.format("c")),
        )
    }

_ENUM = "class E(enum.Enum):\n A = 1\n def f(self): return self.w\n k = enum.nonmember(2.0)\no = E.A; o.w = 2.0\n"
_TABLES = {
    "beside tensors": ("{o: torch.ones(2)}", _FIRST.format("c")),
    "beside modules": ("{o: nn.ReLU()}", _FIRST.format("c")),
    "beside functions": ("{o: helper}", _FIRST.format("c")),
    "of defaultdict": ("collections.defaultdict(torch.Tensor, {o: torch.ones(2)})", _FIRST.format("c")),
    "of Counter": ("collections.Counter([o])", _FIRST.format("c")),
    "in tuples": ("{(1, o): torch.ones(2)}", _FIRST.format("c") + "[1]"),
    "in frozen sets": ("{frozenset([o]): torch.ones(2)}", _FIRST.format(_FIRST.format("c"))),
    "of weak values": ("weakref.WeakValueDictionary({o: helper})", _FIRST.format("c")),
    "in a weak set": ("weakref.WeakSet([o])", _FIRST.format("c")),
}
CASES |= {
    f"member of an enumeration as key, {name}": (f"{_ENUM}c = {made}", f"{where}.w", "o.w = 3.0")
    for name, (made, where) in _TABLES.items()
}
CASES |= {
    "method of an enumeration": (
        f"{_ENUM}c = {{o: torch.ones(2)}}",
        f"{_FIRST.format('c')}.f()",
        "E.f = lambda self: 3.0",
    ),
    "constant of an enumeration": (f"{_ENUM}c = {{o: torch.ones(2)}}", f"{_FIRST.format('c')}.k", "E.k = 3.0"),
    "attribute of a library's enumeration": (
        "import uuid\no = uuid.SafeUUID.safe; o.put_by_a_test = 2.0\nc = [o]",
        "c[0].put_by_a_test",
        "o.put_by_a_test = 3.0",
    ),
}
_TEXT = "class E(enum.StrEnum):\n A = 'a'\no = E.A; o.w = 2.0\n"
CASES |= {
    f"name in a table of {table}": (f"{_TEXT}c = nn.Module()\n{put}", f"{_FIRST.format(f'c.{table}')}.w", "o.w = 3.0")
    for table, put in {
        "_modules": "c.add_module(o, nn.ReLU())",
        "_buffers": "c.register_buffer(o, torch.ones(2))",
        "_parameters": "c.register_parameter(o, nn.Parameter(torch.ones(2)))",
    }.items()
}
test_a_change_is_seen = sees_changes(CASES)
test_a_callable_refuses_a_change = refuses_changes(CASES)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Nothing was put on what lives longer than a test."""
    yield
    vars(uuid.SafeUUID.safe).pop("put_by_a_test", None)


def test_equal_arguments_that_are_made_anew_are_no_change(module: types.ModuleType) -> None:
    run_text(module, f"import enum\n{_ENUM}def make(x): return {{1: ({{1, 2}}, frozenset([o])), (o, 1): x}}")
    replayed, x = tg.graphed(lambda x, held: x * len(held)), torch.ones(3)
    for _ in range(3):
        replayed(x, module.make(x))
    assert counts(replayed) == (1, 2, 0, 1)


def test_a_parameter_in_a_set_in_a_dictionary_is_written() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    groups = {"decay": {weight}, "none": set()}

    @torch.no_grad()
    def decay(x: torch.Tensor) -> torch.Tensor:  # [3] -> [3]
        for parameter in groups["decay"]:
            parameter.mul_(0.5)
        return x * 1

    replayed = tg.graphed(decay)
    called(replayed, 3, torch.ones(3))
    assert torch.equal(weight, torch.full((3,), 0.125))
    assert counts(replayed)[3] == 1


def test_a_counter_of_an_object_in_a_set_in_a_dictionary_is_refused() -> None:
    held = {"a": {torch.nn.ReLU()}}
    for module in held["a"]:
        module.calls = 0

    def fn(x: torch.Tensor) -> torch.Tensor:  # [3] -> [3]
        for module in held["a"]:
            module.calls += 1
            x = module(x) * module.calls
        return x

    replayed = tg.graphed(fn)
    with pytest.raises(tg.CaptureError, match="calls of a member of"):
        called(replayed, 3, torch.ones(3))
