"""What code reads without saying its name, or library code on its behalf. The reference is the function.

Functions of graphed(), and callables of make_graphed_callables that call them.
"""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from sequences import counts
from text_cases import (
    assert_change_is_seen,
    function_of_case,
    install,
    outcome_of_callable,
    refuses_changes,
    run_text,
    sees_changes,
)

from te_graph import graphed

pytestmark = pytest.mark.usefixtures("repeatable")

# Kept: torch.export and inductor look at all operators that torch.ops has had, and fail if one is gone.
_LIBRARY = torch.library.Library("te_graph_test_of_names", "DEF")

_PARTS = "class Mode(enum.Enum):\n A = 1\n B = 2\nMode.A.k = Mode.B.k = 2.0"
_POINT = "class P(typing.NamedTuple):\n a: float\n k = 2.0\np = P(1.0)"
IN_CONTAINERS = {
    "a member in a list": (_PARTS + "\nm = [Mode.A]", "m[0].k", "Mode.A.k = 3.0"),
    "a member in a tuple": (_PARTS + "\nm = (1, (Mode.A,))", "m[1][0].k", "Mode.A.k = 3.0"),
    "a member in a frozen set": (_PARTS + "\nm = frozenset([Mode.A])", "next(iter(m)).k", "Mode.A.k = 3.0"),
    "a member as a value": (_PARTS + "\nm = {'a': Mode.A}", "m['a'].k", "Mode.A.k = 3.0"),
    "a member as a key": (_PARTS + "\nm = {Mode.A: 1.0}", "sum(e.k for e in m)", "Mode.A.k = 3.0"),
    "members of an enumeration": (_PARTS, "sum(e.k for e in Mode)", "Mode.B.k = 3.0"),
    "a method of members": (
        "class Mode(enum.Enum):\n A = 1\n def f(self): return H\nm = [Mode.A]",
        "m[0].f()",
        "Mode.f = lambda self: 5.0",
    ),
    "a named tuple in a list": (_POINT + "\nm = [p]", "m[0].k", "P.k = 3.0"),
    "a named tuple in a dictionary": (_POINT + "\nm = {1: p}", "m[1].k", "P.k = 3.0"),
    "how long a queue of tensors may be": (
        "q = collections.deque([torch.ones(3)], maxlen=3)",
        "float(q.maxlen)",
        "q = collections.deque(q, maxlen=5)",
    ),
    "a text with attributes": ("class S(str): pass\ns = S('a'); s.k = 2.0\nm = [s]", "m[0].k", "s.k = 3.0"),
}
MADE_INSIDE = {
    "of a generic class": (
        "T = typing.TypeVar('T')\nclass C(typing.Generic[T]):\n def __init__(self): self.v = H",
        "C[int]().v",
        "H = 3.0",
    ),
    "all of another object": (
        "c = SimpleNamespace(a=2.0)\nclass C:\n def __init__(self): self.v = sum(vars(c).values())",
        "C().v",
        "c.a = 3.0",
    ),
    "all fields of another object": (
        "@dataclasses.dataclass\nclass D:\n a: float = 2.0\nc = D()\n"
        "class C:\n def __init__(self): self.v = dataclasses.asdict(c)['a']",
        "C().v",
        "c.a = 3.0",
    ),
    "with keywords": (
        "c = SimpleNamespace(a=2.0)\nclass C:\n def __init__(self, *, o=c): self.v = sum(vars(o).values())",
        "C().v",
        "c.a = 3.0",
    ),
    "new keys, beside itself": (
        "c = Plain(); c.a = 2.0\nclass C:\n def __init__(self): vars(self)['v'] = sum(vars(c).values())",
        "C().v",
        "c.b = 3.0",
    ),
}
_READER = "c = Plain()\ndef read(): return c.k\n"
SWALLOWED = {
    "in another function": (
        _READER + "def tried():\n try: return read()\n except AttributeError: return 2.0",
        "tried()",
        "c.k = 3.0",
    ),
    "classes in a variable": (
        "errors = (AttributeError, KeyError)\nc = Plain()\ndef tried():\n try: return c.k\n except errors: return 2.0",
        "tried()",
        "c.k = 3.0",
    ),
    "hasattr of a property": (
        "class C:\n @property\n def p(self): return self.k\nc = C()",
        "2.0 + hasattr(c, 'p')",
        "c.k = 3.0",
    ),
    "a default for a property": (
        "class C:\n @property\n def p(self): return self.k\nc = C()",
        "getattr(c, 'p', 2.0)",
        "c.k = 3.0",
    ),
}
BY_LIBRARIES = {
    "a format": ("c = Plain(); c.kind = 2.0", "float('{0.kind}'.format(c))", "c.kind = 3.0"),
    "asdict by another name": (
        "from dataclasses import asdict as told\n@dataclasses.dataclass\nclass D:\n a: float = 2.0\nc = D()",
        "sum(told(c).values())",
        "c.a = 3.0",
    ),
    "inspect": (
        "c = SimpleNamespace(a=2.0)",
        "dict(inspect.getmembers(c))['a']",
        "c.a = 3.0",
    ),
    "pickle": ("c = Plain(); c.a = 2.0", "float(len(pickle.dumps(c)))", "c.a = 'no'"),
    "copy": ("c = Plain(); c.a = 2.0\nother = 'a'", "sum(copy.copy(c).__dict__.values())", "c.a = 3.0"),
    "getattr by another name": (
        "get = getattr\nc = Plain(); c.key = 2.0",
        "get(c, 'k' + str(x.dim() == 1)[4:] + 'ey'[:2])",
        "c.key = 3.0",
    ),
    "a part of getattr": (
        "c = Plain(); c.key = 2.0\nget = functools.partial(getattr, c)",
        "get('k' + 'EY'.lower())",
        "c.key = 3.0",
    ),
    "a getter": ("c = Plain(); c.key = 2.0\nag = operator.attrgetter", "ag('k' + 'EY'.lower())(c)", "c.key = 3.0"),
}
_C = "c = Plain(); c.a = 2.0\n"
_SAVED = "import io\n" + _C + "def length():\n b = io.BytesIO(); {}; return float(len(b.getvalue()))"
FOR_PICKLE = {
    "__getstate__": (_C, "sum(c.__getstate__().values())", "c.a = 3.0"),
    "__getstate__ in a variable": (_C + "get = c.__getstate__", "sum(get().values())", "c.a = 3.0"),
    "__getstate__ of object": (_C + "get = object.__getstate__", "sum(get(c).values())", "c.a = 3.0"),
    "__reduce__": (_C, "sum(c.__reduce__()[2].values())", "c.a = 3.0"),
    "__reduce_ex__": (_C, "sum(c.__reduce_ex__(4)[2].values())", "c.a = 3.0"),
    "pickle.dump": (_SAVED.format("pickle.dump(c, b)"), "length()", "c.a = 'no'"),
    "pickle.dump by another name": (_SAVED.format("put(c, b)") + "\nput = pickle.dump", "length()", "c.a = 'no'"),
    "a Pickler": (_SAVED.format("pickle.Pickler(b).dump(c)"), "length()", "c.a = 'no'"),
    "torch.save": (_SAVED.format("torch.save(c, b)"), "length()", "c.a = 1000 * 'no'"),
    "__dir__": (_C, "sum(getattr(c, n) for n in c.__dir__() if not n.startswith('_'))", "c.b = 3.0"),
    "__dir__ of object": (
        _C + "names = object.__dir__",
        "sum(getattr(c, n) for n in names(c) if not n.startswith('_'))",
        "c.b = 3.0",
    ),
}
if not hasattr(object, "__getstate__"):  # before Python 3.11
    FOR_PICKLE = {name: case for name, case in FOR_PICKLE.items() if "__getstate__" not in name}
OF_PYTHON = {
    "slots of a class of Python's": ("c = statistics.NormalDist(2.0)", "c.mean", "c = statistics.NormalDist(3.0)"),
    "a parameter": (
        "def named(n): return inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY)\nc = named('a')",
        "float(len(c.name))",
        "c = named('aaa')",
    ),
}
ABOUT_CODE = {
    "the name of a function": ("def g(): pass", "float(len(g.__name__))", "g.__name__ = 'aaaa'"),
    "the text of a function": ("def g(): 'a'", "float(len(g.__doc__))", "g.__doc__ = 'aaaa'"),
    "annotations": ("def g(a: int): pass", "float(len(g.__annotations__))", "g.__annotations__['b'] = int"),
    "the name of a class": ("class C: pass", "float(len(C.__name__))", "C.__name__ = 'aaaa'"),
    "the text of a class": ("class C: 'a'", "float(len(C.__doc__))", "C.__doc__ = 'aaaa'"),
    "annotations of a class": ("class C:\n a: int", "float(len(C.__annotations__))", "C.__annotations__['b'] = int"),
    "the module of a class": ("class C: pass", "float(len(C.__module__))", "C.__module__ = 'aaaa'"),
}
_NUMBERS = "sum(v for n, v in list({}.items()) if type(v) is float and n < 'a')"
THROUGH_ALL = {
    "of a module": ("import sys\nme = sys.modules['MODULE']", _NUMBERS.format("vars(me)"), "J = 3.0"),
    "of a function": ("def g(): pass\ng.A = 2.0", "sum(vars(g).values())", "g.B = 3.0"),
    "of a class": ("class C:\n A = 2.0", _NUMBERS.format("vars(C)"), "C.B = 3.0"),
    "dir of a class": ("class C:\n A = 2.0", "float(len(dir(C)))", "C.B = 3.0"),
    "dir of a module": ("import sys\nme = sys.modules['MODULE']", "float(len(dir(me)))", "J = 3.0"),
}
ALL_NAMES = {
    "globals": ("H = K = 2.0", _NUMBERS.format("globals()"), "J = 3.0"),
    "a value of globals": ("A1 = 2.0", _NUMBERS.format("globals()"), "A1 = 3.0"),
    "bases": (
        "class A: pass\nclass B(A): pass\nclass C(A): pass\nclass D(C): pass",
        "float(len(D.__mro__))",
        "D.__bases__ = (B, C)",
    ),
}
_FROZEN = "@dataclasses.dataclass(frozen=True)\nclass C:\n a: float = 1.0\nc = C(); d = C()"
IDENTITY = {
    "two apart that become one": (_FROZEN, "2.0 if c is d else 3.0", "d = c"),
    "with slots": (
        "class C:\n __slots__ = ('a',)\n def __init__(self): self.a = 1.0\nc = C(); d = C()",
        "2.0 if c is d else 3.0",
        "d = c",
    ),
}
NOT_SEEN = {
    **ALL_NAMES,
    **IDENTITY,
    "which of two equal numbers": ("a = float('1.5'); b = a", "2.0 if a is b else 3.0", "b = float('1.5')"),
    "a slot, by its descriptor": (
        "class A: __slots__ = ('k',)\na = A(); a.k = 2.0\nget = A.k.__get__",
        "get(a)",
        "setattr(a, 'k', 3.0)",
    ),
    "classes that derive from one": (
        "class A: pass\nclass B(A): pass",
        "float(len(A.__subclasses__()))",
        "class C(A): pass",
    ),
}
CASES = {**IN_CONTAINERS, **MADE_INSIDE, **SWALLOWED, **BY_LIBRARIES, **FOR_PICKLE, **OF_PYTHON}
CASES |= {**ABOUT_CODE, **THROUGH_ALL}


_TWO = "c = Plain(); c.m, c.l = torch.ones(3), torch.zeros(3)\n"
_NET = "m = nn.Linear(2, 2)\n"
_PARAMETER = "m.weight = nn.Parameter(torch.ones(2, 2))"
TOLD_APART = {
    "id": (_NET + "s = {id(p) for p in m.parameters()}", "float(sum(id(p) in s for p in m.parameters()))", _PARAMETER),
    "id under another name": (
        _NET + "name = id\ns = {id(p) for p in m.parameters()}",
        "float(sum(name(p) in s for p in m.parameters()))",
        _PARAMETER,
    ),
    "id of a parameter in the same memory": (
        _NET + "s = {id(p) for p in m.parameters()}",
        "float(sum(id(p) in s for p in m.parameters()))",
        "m.weight = nn.Parameter(m.weight.data)",
    ),
    "hash": (
        _NET + "s = {hash(p) for p in m.parameters()}",
        "float(sum(hash(p) in s for p in m.parameters()))",
        _PARAMETER,
    ),
    "data_ptr": (
        _NET + "s = {p.data_ptr() for p in m.parameters()}",
        "float(sum(p.data_ptr() in s for p in m.parameters()))",
        _PARAMETER,
    ),
    "is": (_TWO, "2.0 if c.m is c.l else 3.0", "c.l = c.m"),
    "is not": (_TWO, "2.0 if c.m is not c.l else 3.0", "c.l = c.m"),
    "operator.is_": (_TWO, "2.0 if operator.is_(c.m, c.l) else 3.0", "c.l = c.m"),
    "a function": (
        "def make(): return lambda: 2.0\nc, other = Plain(), make()\nc.f = make()",
        "2.0 if c.f is other else 3.0",
        "c.f = other",
    ),
    "a key": (_TWO + "d = {c.m: 2.0}", "d.get(c.l, 3.0)", "c.l = c.m"),
    "a key of weak references": (
        "from torch.utils.weak import WeakIdKeyDictionary\n" + _TWO + "d = WeakIdKeyDictionary(); d[c.m] = 2.0",
        "d.get(c.l, 3.0)",
        "c.l = c.m",
    ),
    "a member": (_TWO + "s = {c.m}", "2.0 if c.l in s else 3.0", "c.l = c.m"),
}
MODULES = {
    "__getattr__": ("V = {'k': 2.0}\ndef __getattr__(name): return V[name]\nimport MODULE as m", "m.k", "k = 3.0"),
    "what __getattr__ reads": (
        "V = {'k': 2.0}\ndef __getattr__(name): return V[name]\nimport MODULE as m",
        "m.k",
        "V['k'] = 3.0",
    ),
    "another __getattr__": (
        "def __getattr__(name): return 2.0\nimport MODULE as m",
        "m.k",
        "def __getattr__(name): return 3.0",
    ),
    "a class of modules": (
        "import sys, types\nclass M(types.ModuleType):\n def __getattr__(self, name): return 2.0\n"
        "m = M('made'); m.__file__ = '/nowhere/made.py'",
        "m.k",
        "m.k = 3.0",
    ),
    "getattr": ("import MODULE as m", "getattr(m, 'k', 2.0)", "k = 3.0"),
}
_FAMILY = "class A:\n k = 2.0\nclass B(A): pass\nclass C(B):\n k = 5.0\n"
ABOVE = {  # a class gets what it had from the one above it, and the one below it hides
    "__mro__": (_FAMILY, "C.__mro__[1].k", "B.k = 3.0"),
    "mro()": (_FAMILY, "C.mro()[1].k", "B.k = 3.0"),
    "__bases__": (f"{_FAMILY}c = C()", "type(c).__bases__[0].k", "B.k = 3.0"),
    "__base__": (f"{_FAMILY}c = C()", "type(c).__base__.k", "B.k = 3.0"),
}
CASES = {**CASES, **TOLD_APART, **MODULES, **ABOVE}


test_a_change_is_seen = sees_changes(CASES)
test_a_callable_refuses_a_change = refuses_changes({**CASES, **IDENTITY})


@pytest.mark.parametrize(("setup", "read", "change"), ALL_NAMES.values(), ids=ALL_NAMES)
def test_what_a_callable_does_not_see(module: types.ModuleType, setup: str, read: str, change: str) -> None:
    """As docs/limits.md says."""
    assert outcome_of_callable(module, setup, read, change) == "stale"


def installed_package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A package that looks installed, with an empty module `config`."""
    package = types.ModuleType("installed_by_a_test")
    package.config = types.ModuleType("installed_by_a_test.config")
    package.__path__ = []
    for made in (package, package.config):
        made.__file__ = f"/nowhere/site-packages/{made.__name__.replace('.', '/')}.py"
        install(made, monkeypatch)
    return package


@pytest.mark.parametrize("import_it", ["", "import installed_by_a_test.config"])
def test_a_constant_of_an_installed_package(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, import_it: str
) -> None:
    module.p = installed_package(monkeypatch)
    module.p.config.SCALE = 2.0
    setup = f"def read():\n {import_it or 'pass'}\n return {'installed_by_a_test' if import_it else 'p'}.config.SCALE"
    assert_change_is_seen(module, setup, "read()", "p.config.SCALE = 3.0")


STATE_OF_PACKAGES = {
    "a dictionary": ("c.OPTS = {'s': 2.0}", "p.config.OPTS['s']", "p.config.OPTS['s'] = 3.0"),
    "a list": ("c.OPTS = [2.0]", "p.config.OPTS[0]", "p.config.OPTS[0] = 3.0"),
    "an object": ("c.opt = c.Opt(); c.opt.lr = 2.0", "p.config.opt.lr", "p.config.opt.lr = 3.0"),
    "a namespace": ("c.args = SimpleNamespace(lr=2.0)", "p.config.args.lr", "p.config.args.lr = 3.0"),
    "arguments": ("c.args = argparse.Namespace(lr=2.0)", "p.config.args.lr", "p.config.args.lr = 3.0"),
    "another object": (
        "c.opt = c.Opt(); c.opt.lr = 2.0",
        "p.config.opt.lr",
        "p.config.opt = p.config.Opt(); p.config.opt.lr = 3.0",
    ),
    "what a method reads": ("c.opt = c.Opt(); c.opt.on = False", "p.config.opt.read()", "p.config.opt.on = True"),
}


@pytest.mark.parametrize(("setup", "read", "change"), STATE_OF_PACKAGES.values(), ids=STATE_OF_PACKAGES)
@pytest.mark.parametrize("check", [assert_change_is_seen, outcome_of_callable])
def test_state_of_an_installed_package(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, setup: str, read: str, change: str, check: Any
) -> None:
    module.p = package = installed_package(monkeypatch)
    text = "class Opt:\n lr, on = 2.0, False\n def read(self): return 3.0 if self.on else 2.0"
    exec(compile(text, package.config.__file__, "exec"), vars(package.config))
    assert check(module, f"c = p.config\n{setup}", read, change) in (None, "refused")


def test_operators_that_are_looked_up_later_are_no_change(module: types.ModuleType) -> None:
    for name in ("once", "twice"):
        _LIBRARY.define(f"{name}(Tensor x) -> Tensor")
        _LIBRARY.impl(name, torch.Tensor.clone, "CompositeImplicitAutograd")
    setup = "ops = torch.ops.te_graph_test_of_names"
    run_text(module, f"import torch\n{setup}\ndef fn(x): return ops.once(x)")
    function, x = graphed(module.fn), torch.ones(3)
    for _ in range(4):
        function(x)
    module.ops.twice  # noqa: B018
    function(x)
    assert counts(function) == (1, 4, 0, 1)


@pytest.mark.parametrize(("setup", "read", "change"), NOT_SEEN.values(), ids=NOT_SEEN)
def test_what_is_not_seen(module: types.ModuleType, setup: str, read: str, change: str) -> None:
    """As docs/limits.md says."""
    function, replayed, x = function_of_case(module, setup, read)
    for _ in range(3):
        before = replayed(x).clone()
    run_text(module, change)
    assert not torch.equal(function(x), before)
    assert torch.equal(replayed(x), before)
