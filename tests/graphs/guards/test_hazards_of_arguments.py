"""What arguments hold that are no tensors: classes, members of enumerations, values with attributes, containers of
classes of the user's. A callable compares them with its samples, and what its code reads of them at each call."""

from __future__ import annotations

import re
import types

import pytest
import torch
from text_cases import HEADER, Cases, run_text

from te_graph import graphed, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

_CONFIG = "class Config:\n k = 2.0\n @staticmethod\n def run(): return 2.0\n"
_MODE = (
    "class Mode(enum.Enum):\n A = 'a'\n B = 'b'\n def __init__(self, v): self.gain = 2.0\n def get(self): return 2.0\n"
)
_KIND = "class Kind({0}):\n def get(self): return 2.0\narg = Kind({1})\narg.gain = 2.0"
_DATA = (
    "@dataclasses.dataclass\nclass Data:\n k: object = 2.0\n extra = 1.0\n def get(self): return self.k * self.extra\n"
)
_PAIR = "class Pair(typing.NamedTuple):\n k: object = 2.0\n def get(self): return self.k\n"
_TABLE = "class Table(dict):\n base = 2.0\n def get_it(self): return self.base * self['k']\n"
_NODE = (
    "import torch.utils._pytree as pytree\nclass Node:\n scale = 2.0\n def __init__(self, k): self.k = k\n"
    "pytree.register_pytree_node(Node, lambda o: ([], o.k), lambda c, k: Node(k))\n"
)

_FUNCTION = "def make(k):\n def arg(): return 2.0\n arg.gain = k\n return arg\narg = make(2.0)\n"
_CLOSED = "def make(k, n=0.0):\n def arg(): return n\n arg.gain = k\n return arg\narg = make(2.0)\n"
_AROUND = (
    "def make(k):\n def inner(): return k\n @functools.wraps(inner)\n def arg(): return 1.0\n return arg\n"
    "arg = make(2.0)\n"
)
_ELSEWHERE = (
    "code = compile('def arg(): return K', '/nowhere/module_of_a_test.py', 'exec')\ndef make(k):\n"
    " scope = {'K': k, '__name__': MODULE_NAME}\n exec(code, scope)\n return scope['arg']\narg = make(2.0)\n"
).replace("MODULE_NAME", "'module_of_a_test'")

CASES: Cases = {  # the argument is ``arg``, which the function calls ``a``
    "class": (_CONFIG + "arg = Config", "a.k", "Config.k = 3.0"),
    "method of a class": (_CONFIG + "arg = Config", "a.run()", "Config.run = staticmethod(lambda: 3.0)"),
    "class below a class": (_CONFIG + "class Below(Config): pass\narg = Below", "a.k", "Config.k = 3.0"),
    "class whose attribute gets hidden": (_CONFIG + "class Below(Config): pass\narg = Below", "a.k", "Below.k = 3.0"),
    "class in a dictionary": (_CONFIG + "arg = {'c': Config}", "a['c'].k", "Config.k = 3.0"),
    "class in a tuple": (_CONFIG + "arg = (Config, 1)", "a[0].k", "Config.k = 3.0"),
    "class in a frozen set": (_CONFIG + "arg = frozenset({Config})", "next(iter(a)).k", "Config.k = 3.0"),
    "class in a set": (_CONFIG + "arg = {Config}", "next(iter(a)).k", "Config.k = 3.0"),
    "class in a dataclass": (_CONFIG + _DATA + "arg = Data(Config)", "a.k.k", "Config.k = 3.0"),
    "list of a class": (_CONFIG.replace("2.0", "[2.0]") + "arg = Config", "a.k[0]", "Config.k[0] = 3.0"),
    "member of an enumeration": (_MODE + "arg = Mode.A", "a.gain", "Mode.A.gain = 3.0"),
    "member as a key": (_MODE + "arg = {Mode.A: 1}", "next(iter(a)).gain", "Mode.A.gain = 3.0"),
    "method of an enumeration": (_MODE + "arg = Mode.A", "a.get()", "Mode.get = lambda self: 3.0"),
    "text with an attribute": (_KIND.format("str", "'a'"), "a.gain", "arg.gain = 3.0"),
    "another text with an attribute": (_KIND.format("str", "'a'"), "a.gain", "arg = Kind('a')\narg.gain = 3.0"),
    "method of a text": (_KIND.format("str", "'a'"), "a.get()", "Kind.get = lambda self: 3.0"),
    "number with an attribute": (_KIND.format("float", "1.0"), "a.gain", "arg.gain = 3.0"),
    "another number with an attribute": (_KIND.format("int", "1"), "a.gain", "arg = Kind(1)\narg.gain = 3.0"),
    "number with a slot": (
        "class S(float):\n __slots__ = ('gain', '__dict__')\narg = S(1.0)\narg.gain = 2.0",
        "a.gain",
        "arg = S(1.0)\narg.gain = 3.0",
    ),
    "class attribute of a dataclass": (_DATA + "arg = Data()", "a.get()", "Data.extra = 3.0"),
    "method of a dataclass": (_DATA + "arg = Data()", "a.get()", "Data.get = lambda self: 3.0"),
    "method of a named tuple": (_PAIR + "arg = Pair()", "a.get()", "Pair.get = lambda self: 3.0"),
    "class attribute of a dictionary": (_TABLE + "arg = Table(k=1.0)", "a.get_it()", "Table.base = 3.0"),
    "class of a registered node": (_NODE + "arg = Node(1.0)", "a.k * a.scale", "Node.scale = 3.0"),
    "function, its global variable": ("G = [2.0]\ndef arg(): return G[0]", "a()", "G[0] = 3.0"),
    "attribute of a function": (_FUNCTION, "a.gain", "arg.gain = 3.0"),
    "attribute of another function": (_FUNCTION, "a.gain", "arg = make(3.0)"),
    "attribute of a function that runs": (_FUNCTION, "a() * a.gain", "arg = make(3.0)"),
    "attribute of a function in a list": (_FUNCTION + "arg = [arg]", "a[0].gain", "arg[0].gain = 3.0"),
    "attribute of a function with variables": (_CLOSED, "a.gain", "arg.gain = 3.0"),
    "attribute of another function with variables": (_CLOSED, "a.gain", "arg = make(3.0)"),
    "attribute that a function gets": (_FUNCTION, "getattr(a, 'more', 2.0)", "arg.more = 3.0"),
    "name of a function": (_FUNCTION, "float(len(a.__name__))", "arg.__name__ = 'other'"),
    "name of another function": (_FUNCTION, "float(len(a.__name__))", "arg = make(2.0)\narg.__name__ = 'other'"),
    "function behind a function": (_AROUND, "a.__wrapped__()", "arg = make(3.0)"),
    "global variable of another function": (_ELSEWHERE, "a()", "arg = make(3.0)"),
    "class that a function's default is": (_CONFIG + "def arg(c=Config): return c.k", "a()", "Config.k = 3.0"),
}
_STEADY: Cases = {  # changes of what the code does not read, or of which it gets the same
    "class": (_CONFIG + "arg = Config", "a.k", "Config.other = 3.0"),
    "text made anew": (_KIND.format("str", "'a'"), "a.gain", "arg = Kind('a')\narg.gain = 2.0"),
    "dataclass made anew": (_DATA + "arg = Data()", "a.get()", "arg = Data()"),
    "path made anew": ("import pathlib\narg = pathlib.Path('a/b')", "len(str(a))", "arg = pathlib.Path('a') / 'b'"),
    "function with an attribute made anew": (_FUNCTION, "a.gain", "arg = make(2.0)"),
    "function with a variable and an attribute made anew": (_CLOSED, "a.gain", "arg = make(2.0)"),
    "function around a function made anew": (_AROUND, "a.__wrapped__()", "arg = make(2.0)"),
    "function made anew": ("def make():\n k = 2.0\n return lambda: k\narg = make()", "a()", "arg = make()"),
}


def _functions(module: types.ModuleType, setup: str, read: str) -> torch.Tensor:
    run_text(module, f"{HEADER}\n{setup}\ndef fn(x, a):\n v = {read}\n return torch.Tensor.mul(x, v)")
    run_text(module, "class Net(nn.Module):\n def forward(self, x, a): return fn(x, a)")
    return torch.full((3,), 0.5)


@pytest.mark.parametrize(("setup", "read", "change"), CASES.values(), ids=CASES)
def test_callables_refuse_changes_of_what_arguments_hold(
    module: types.ModuleType, setup: str, read: str, change: str
) -> None:
    x = _functions(module, setup, read)
    net = make_graphed_callables(module.Net(), (x, module.arg))
    before = module.fn(x, module.arg)
    assert_bitwise_equal(net(x, module.arg), before)
    assert net.te_graph.info()["forward_replays"] == 1
    run_text(module, change)
    assert not torch.equal(module.fn(x, module.arg), before)
    with pytest.raises((ValueError, RuntimeError), match="capture"):
        net(x, module.arg)


@pytest.mark.parametrize(("setup", "read", "change"), CASES.values(), ids=CASES)
def test_graphed_functions_see_changes_of_what_arguments_hold(
    module: types.ModuleType, setup: str, read: str, change: str
) -> None:
    x = _functions(module, setup, read)
    function = graphed(module.fn)
    for _ in range(3):
        assert_bitwise_equal(function(x, module.arg).clone(), module.fn(x, module.arg))
    run_text(module, change)
    assert_bitwise_equal(function(x, module.arg).clone(), module.fn(x, module.arg))


@pytest.mark.parametrize(("setup", "read", "change"), _STEADY.values(), ids=_STEADY)
def test_what_stays_as_it_is_for_the_code_replays(module: types.ModuleType, setup: str, read: str, change: str) -> None:
    x = _functions(module, setup, read)
    net = make_graphed_callables(module.Net(), (x, module.arg))
    run_text(module, change)
    assert_bitwise_equal(net(x, module.arg), module.fn(x, module.arg))
    assert net.te_graph.info()["forward_replays"] == 1


@pytest.mark.parametrize(
    ("setup", "change", "message"),
    [
        (_KIND.format("str", "'a'"), "arg = Kind('a')\narg.gain = 3.0", "gain of args[1] (a) to be 2.0 as"),
        (_KIND.format("str", "'a'"), "arg = Kind('a')", "gain of args[1] (a) to be 2.0 as at capture, got nothing"),
        (_KIND.format("str", "'a'"), "arg = Kind('b')", "args[1] (a) to be 'a' as at capture, got 'b'"),
        (_FUNCTION, "arg = make(3.0)", "gain of args[1] (a) to be 2.0 as at capture, got 3.0"),
    ],
    ids=("attribute", "no attribute", "value", "function"),
)
def test_messages_name_the_attribute_that_differs(
    module: types.ModuleType, setup: str, change: str, message: str
) -> None:
    x = _functions(module, setup, "2.0")
    net = make_graphed_callables(module.Net(), (x, module.arg))
    run_text(module, change)
    with pytest.raises(ValueError, match=re.escape(f"expected {message}")):
        net(x, module.arg)
