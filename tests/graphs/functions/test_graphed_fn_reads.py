"""graphed(): Python state is seen in whatever way the code gets to it. The reference is the function itself.

A case is text: what is there, the number that the function reads, and a change of it.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator

import pytest
import torch
from sequences import counts
from text_cases import function_of_case, run_text, sees_changes
from torch.autograd import forward_ad

from te_graph import graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

MADE_INSIDE = {
    "__init__": ("class C:\n def __init__(self): self.v = H", "C().v", "H = 3.0"),
    "__init__ exchanged": (
        "class C:\n def __init__(self): self.v = H",
        "C().v",
        "C.__init__ = lambda self: setattr(self, 'v', 7.0)",
    ),
    "a class attribute": ("class C:\n k = 2.0\n def __init__(self): self.v = self.k", "C().v", "C.k = 3.0"),
    "__new__": ("class C:\n def __new__(cls): o = object.__new__(cls); o.v = H; return o", "C().v", "H = 3.0"),
    "__post_init__": (
        "@dataclasses.dataclass\nclass C:\n a: float = 1.0\n def __post_init__(self): self.v = H",
        "C().v",
        "H = 3.0",
    ),
    "a default factory": (
        "@dataclasses.dataclass\nclass C:\n b: list = dataclasses.field(default_factory=lambda: [H])",
        "C().b[0]",
        "H = 3.0",
    ),
    "a module": ("class C(nn.Module):\n def __init__(self): super().__init__(); self.v = H", "C().v", "H = 3.0"),
    "through a helper": ("class C:\n def __init__(self): self.v = helper()", "C().v", "H = 3.0"),
    "by a method": (
        "class I:\n def __init__(self): self.v = H\nclass C:\n def make(self): return I()\nc = C()",
        "c.make().v",
        "H = 3.0",
    ),
    "a metaclass": ("class M(type):\n def __call__(cls): return H\nclass C(metaclass=M): pass", "C()", "H = 3.0"),
    "a property of a metaclass": (
        "class M(type):\n k = 2.0\n @property\n def v(cls): return cls.k\nclass C(metaclass=M): pass",
        "C.v",
        "M.k = 3.0",
    ),
    "shown": ("class C:\n def __repr__(self): return 'a' * int(H)\nc = C()", "len(repr(c))", "H = 3.0"),
    "__init_subclass__": (
        "class C:\n def __init_subclass__(cls): cls.v = H\ndef made():\n class D(C): pass\n return D",
        "made().v",
        "H = 3.0",
    ),
    "a named tuple": (
        "class P(typing.NamedTuple):\n a: float\n def both(self): return self.a + H\np = P(1.0)",
        "p.both()",
        "P.both = lambda self: 9.0",
    ),
    "an enumeration": (
        "class E(enum.Enum):\n A = 1\n def f(self): return H * self.value\ne = E.A",
        "e.f()",
        "E.f = lambda self: 9.0",
    ),
    "what an enumeration holds": ("class E(enum.Enum):\n A = [2.0]\ne = E.A", "e.value[0]", "E.A.value[0] = 3.0"),
}
CLASSES_OF_TORCH = {
    "a global": (
        "class L(nn.Identity):\n def forward(self, x): return super().forward(x) * H\nl = L()",
        "l(x)",
        "H = 3.0",
    ),
    "a class attribute": (
        "class L(nn.Identity):\n k = 2.0\n def forward(self, x): return x * self.k\nl = L()",
        "l(x)",
        "L.k = 3.0",
    ),
    "a method": (
        "class L(nn.Identity):\n def forward(self, x): return self.help(x)\n def help(self, x): return x * H\nl = L()",
        "l(x)",
        "L.help = lambda self, x: x * 5",
    ),
    "forward of the class": (
        "class L(nn.Identity):\n def forward(self, x): return x * 2\nl = L()",
        "l(x)",
        "L.forward = lambda self, x: x * 5",
    ),
    "forward of the object": ("l = nn.Identity()", "l(x)", "l.forward = lambda x: x * 5"),
    "_call_impl of the object": ("l = nn.Identity()", "l(x)", "l._call_impl = lambda x: x * 5"),
    "forward below": ("l = nn.Sequential(nn.Identity())", "l(x)", "l[0].forward = lambda x: x * 5"),
    "forward of a class of torch": (
        "kept = nn.Identity.forward\nl = nn.Identity()",
        "l(x)",
        "nn.Identity.forward = lambda self, x: x * 5",
    ),
    "the class of a module": ("l = nn.Identity()", "l(x)", "l.__class__ = nn.Tanh"),
    "a Function": (
        "class F(torch.autograd.Function):\n @staticmethod\n def forward(ctx, x): return x * H",
        "F.apply(x)",
        "H = 3.0",
    ),
    "forward of a Function": (
        "class F(torch.autograd.Function):\n @staticmethod\n def forward(ctx, x): return x * H",
        "F.apply(x)",
        "F.forward = staticmethod(lambda ctx, x: x * 3)",
    ),
    "an optimizer": (
        "w = nn.Parameter(torch.ones(3)); w.grad = torch.zeros(3)\nclass S(torch.optim.SGD):\n"
        " def step(self):\n  with torch.no_grad(): w.fill_(H)\no = S([w], lr=1.0)\n"
        "def stepped():\n o.step()\n return w.detach() * 1.0",
        "stepped()",
        "H = 3.0",
    ),
    "step of an optimizer": (
        "w = nn.Parameter(torch.ones(3)); w.grad = torch.ones(3); o = torch.optim.SGD([w], lr=1.0)\n"
        "def stepped():\n with torch.no_grad(): w.fill_(1.0)\n o.step()\n return w.detach() * 1.0",
        "stepped()",
        "o.step = lambda: None",
    ),
    "a tensor": (
        "class T(torch.Tensor):\n k = 2.0\n def scaled(self): return self.as_subclass(torch.Tensor) * self.k\n"
        "t = torch.ones(3).as_subclass(T)",
        "t.scaled()",
        "T.k = 3.0",
    ),
    "a hook of all modules": (
        "l = nn.Identity()",
        "l(x)",
        "kept = nn.modules.module.register_module_forward_hook(lambda m, i, o: o * 3)",
    ),
    "a hook of all optimizers": (
        "w = nn.Parameter(torch.ones(3)); w.grad = torch.ones(3); o = torch.optim.SGD([w], lr=1.0)\n"
        "def stepped():\n with torch.no_grad(): w.fill_(1.0)\n o.step()\n return w.detach() * 1.0",
        "stepped()",
        "from torch.optim.optimizer import register_optimizer_step_post_hook as put\n"
        "kept = put(lambda *_: (w.data.add_(3), None)[1])",
    ),
    "a hook of a parameter": (
        "p = nn.Parameter(torch.ones(3)); p.grad = torch.zeros(3)\n"
        "def grad(x):\n p.grad.zero_()\n (p * x).sum().backward()\n return p.grad * 1.0",
        "grad(x)",
        "p.register_hook(lambda g: g * 3)",
    ),
    "the default device": ("", "torch.ones(3).is_meta + 1.0", "torch.set_default_device('meta')"),
}
NAMES = {
    "a namespace": ("n = SimpleNamespace()", "getattr(n, 'k', 2.0)", "n.k = 3.0"),
    "arguments": ("n = argparse.Namespace()", "'k' in n", "n.k = 3.0"),
    "a module": ("n = nn.Identity()", "getattr(n, 'k', 2.0)", "n.k = 3.0"),
    "an optimizer": (
        "n = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0)",
        "getattr(n, 'k', 2.0)",
        "n.k = 3.0",
    ),
    "a tensor": ("t = torch.ones(3)", "getattr(t, 'k', 2.0)", "t.k = 3.0"),
    "any exception": (
        "c = Plain()\ndef f():\n try: return c.k\n except Exception: return 2.0",
        "f()",
        "c.k = 3.0",
    ),
    "all exceptions": ("c = Plain()\ndef f():\n try: return c.k\n except: return 2.0", "f()", "c.k = 3.0"),
    "a slot that is filled": ("class C: __slots__ = ('k',)\nc = C()", "getattr(c, 'k', 2.0)", "c.k = 3.0"),
    "a slot that is emptied": ("class C: __slots__ = ('k',)\nc = C(); c.k = 3.0", "getattr(c, 'k', 2.0)", "del c.k"),
    "a module of Python": ("import MODULE as m", "getattr(m, 'k', 2.0)", "k = 3.0"),
    "globals()": ("", "globals()['H']", "H = 3.0"),
    "globals().get": ("", "globals().get('LATER', 2.0)", "LATER = 3.0"),
    "attrgetter": ("c = Plain(); c.k = 2.0; get = operator.attrgetter('k')", "get(c)", "c.k = 3.0"),
    "attrgetter with a dot": (
        "c = Plain(); c.d = Plain(); c.d.k = 2.0; get = operator.attrgetter('d.k')",
        "get(c)",
        "c.d.k = 3.0",
    ),
    "methodcaller": (
        "class C:\n def m(self): return H\nc = C(); get = operator.methodcaller('m')",
        "get(c)",
        "C.m = lambda self: 7.0",
    ),
    "an argument of methodcaller": (
        "class C:\n def m(self, o): return o.v\nc, o = C(), Plain(); o.v = 2.0; get = operator.methodcaller('m', o)",
        "get(c)",
        "o.v = 3.0",
    ),
    "a pattern": (
        "class C:\n __match_args__ = ('k',)\n k, j = 2.0, 3.0\nc = C()\ndef f():\n match c:\n  case C(v): return v",
        "f()",
        "C.__match_args__ = ('j',)",
    ),
    "what a pattern reads": (
        "class C:\n __match_args__ = ('k',)\nc = C(); c.k = 2.0\ndef f():\n match c:\n  case C(v): return v",
        "f()",
        "c.k = 3.0",
    ),
    "what a pattern does not find": (
        "c = Plain()\ndef f():\n match c:\n  case Plain(k=v): return v\n return 2.0",
        "f()",
        "c.k = 3.0",
    ),
    "a name in a table": (
        "class C:\n def m(self): return H\nc, t = C(), {'op': 'm'}",
        "getattr(c, t['op'])()",
        "H = 3.0",
    ),
    "a function in a table": ("t = {'a': (helper, 1)}", "t['a'][0]()", "H = 3.0"),
    "partialmethod": (
        "class C:\n def m(self, k): return H * k\n p = functools.partialmethod(m, 1.0)\nc = C()",
        "c.p()",
        "H = 3.0",
    ),
    "singledispatch": (
        "@functools.singledispatch\ndef f(x): return x\n@f.register(torch.Tensor)\ndef _(x): return x * H",
        "f(x)",
        "f.register(torch.Tensor, lambda x: x * 9)",
    ),
    "what singledispatch calls": (
        "@functools.singledispatch\ndef f(x): return x\n@f.register(torch.Tensor)\ndef _(x): return x * H",
        "f(x)",
        "H = 3.0",
    ),
    "singledispatchmethod": (
        "class C:\n @functools.singledispatchmethod\n def f(self, x): return x * H\nc = C()",
        "c.f(x)",
        "H = 3.0",
    ),
    "super()": (
        "class A:\n def f(self): return H\nclass B(A):\n def f(self): return super().f()\nb = B()",
        "b.f()",
        "A.f = lambda self: 9.0",
    ),
    "an attribute of super()": (
        "class A:\n k = 2.0\nclass B(A):\n k = 5.0\n def f(self): return super().k\nb = B()",
        "b.f()",
        "A.k = 3.0",
    ),
}
CONTAINERS = {
    "an object in a set": ("c = Plain(); c.k = 2.0; s = {c}", "sum(c.k for c in s)", "c.k = 3.0"),
    "a function in a set": ("s = frozenset([helper])", "sum(f() for f in s)", "H = 3.0"),
    "a key": ("c = Plain(); c.k = 2.0; d = {c: 1.0}", "sum(c.k for c in d)", "c.k = 3.0"),
    "the value of a key": ("c = Plain(); d = {c: 2.0}", "sum(d.values())", "d[c] = 3.0"),
    "the value of a type": ("d = {int: 2.0, float: 1.0}", "d[int]", "d[int] = 3.0"),
    "the function of a type": ("d = {torch.Tensor: helper}", "d[type(x)]()", "H = 3.0"),
    "a parameter as key": ("p = nn.Parameter(torch.ones(3)); d = {p: 2.0}", "sum(d.values())", "d[p] = 3.0"),
    "WeakSet": ("c = Plain(); c.k = 2.0; s = weakref.WeakSet([c])", "sum(c.k for c in s)", "c.k = 3.0"),
    "a new object in a WeakSet": ("c = Plain(); s = weakref.WeakSet([c])", "len(s)", "b = Plain(); s.add(b)"),
    "WeakKeyDictionary": ("c = Plain(); d = weakref.WeakKeyDictionary({c: 2.0})", "d[c]", "d[c] = 3.0"),
    "WeakValueDictionary": (
        "c = Plain(); c.k = 2.0; d = weakref.WeakValueDictionary({1: c})",
        "d[1].k",
        "b = Plain(); b.k = 3.0; d[1] = b",
    ),
    "complex numbers": ("a = np.array([2.0 + 1j])", "float(a[0].real)", "a[0] = 3.0"),
    "single complex numbers": ("a = np.array([2.0 + 1j], dtype=np.complex64)", "float(a[0].real)", "a[0] = 3.0"),
    "complex numbers in records": (
        "a = np.zeros(1, dtype=[('k', 'c16'), ('l', 'i4')])\na['k'] = 2.0",
        "float(a['k'][0].real)",
        "a['k'] = 3.0",
    ),
    "np.matrix": ("m = np.matrix([[2.0]])", "float(m[0, 0])", "m[0, 0] = 3.0"),
    "a class of arrays": ("class A(np.ndarray): pass\nm = np.array([2.0]).view(A)", "float(m[0])", "m[0] = 3.0"),
    "an attribute of an array": (
        "class A(np.ndarray): pass\nm = np.array([2.0]).view(A); m.k = 2.0",
        "m.k",
        "m.k = 3.0",
    ),
    "np.recarray": ("m = np.rec.array([(2.0, 1.0)], dtype=[('a', 'f8'), ('z', 'f8')])", "m.a[0]", "m.a[0] = 3.0"),
    "a part of an array": ("b = np.ones((4, 4)); m = b[::2, 1]", "m.sum()", "b[2, 1] = 3.0"),
    "array.array": ("b = array.array('d', [2.0])", "b[0]", "b[0] = 3.0"),
    "a class of bytearrays": ("class B(bytearray): pass\nb = B(b'ab')", "b[0]", "b[0] = 1"),
    "memoryview": ("b = bytearray(b'ab'); m = memoryview(b)", "m[0]", "b[0] = 1"),
    "ctypes": ("b = ctypes.c_double(2.0)", "b.value", "b.value = 3.0"),
    "a struct of ctypes": (
        "class S(ctypes.Structure): _fields_ = [('a', ctypes.c_double)]\nb = S(2.0)",
        "b.a",
        "b.a = 3.0",
    ),
    "an event": ("e = threading.Event()", "1.0 + e.is_set()", "e.set()"),
    "an attribute of an event": ("e = threading.Event(); e.k = 2.0", "e.k", "e.k = 3.0"),
    "a queue": ("q = queue.Queue(); q.put(2.0)", "q.qsize()", "q.put(3.0)"),
}
NOT_COMPARED = {
    "a large array": ("m = np.ones(2**17 + 1)", "float(m[0])", "m[0] = 3.0"),
    "an array of objects": ("c = Plain(); c.k = 2.0; m = np.array([c], dtype=object)", "m[0].k", "c.k = 3.0"),
    "a pointer": ("v = ctypes.c_double(2.0); p = ctypes.pointer(v)", "p.contents.value", "v.value = 3.0"),
}
CASES = {**MADE_INSIDE, **CLASSES_OF_TORCH, **NAMES, **CONTAINERS}


@pytest.fixture
def module(module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The module that the text of a case is run in; what it changes about torch is put back."""
    monkeypatch.setattr(torch.nn.Identity, "forward", torch.nn.Identity.forward)
    yield module
    torch.set_default_device(None)
    for kept in vars(module).values():
        if hasattr(kept, "remove") and hasattr(kept, "hooks_dict_ref"):
            kept.remove()


test_a_change_is_seen = sees_changes(CASES)


@pytest.mark.parametrize(("setup", "read", "change"), NOT_COMPARED.values(), ids=NOT_COMPARED)
def test_what_cannot_be_compared_runs_eagerly(module: types.ModuleType, setup: str, read: str, change: str) -> None:
    function, replayed, x = function_of_case(module, setup, read)
    for _ in range(3):
        assert_bitwise_equal(replayed(x).clone(), function(x))
    run_text(module, change)
    assert_bitwise_equal(replayed(x).clone(), function(x))
    assert counts(replayed) == (0, 0, 0, 4)


def test_what_the_garbage_collector_runs_is_no_part_of_the_function() -> None:
    """Its callbacks and finalizers run at any time, and change what they read."""
    times, x = [0.0], torch.ones(2)

    class Garbage:
        def __del__(self) -> None:
            times.append(times.pop() + 1)

    def on_collection(phase: str, info: dict[str, int]) -> None:
        times.append(times.pop() + 1)

    def function(x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        return x * 2

    replaying = graphed(function)
    gc.callbacks.append(on_collection)
    try:
        for _ in range(5):
            garbage = Garbage()
            garbage.own = garbage
            del garbage
            assert_bitwise_equal(replaying(x), x * 2)
    finally:
        gc.callbacks.remove(on_collection)
    assert times[0] > 2
    assert counts(replaying)[:2] == (1, 4)


def test_modes_of_functions_are_honoured() -> None:
    class Doubles(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.add else result

    def ones(x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, torch.ones(3))

    replayed, x = graphed(ones), torch.ones(3)
    for _ in range(3):
        replayed(x)
    with torch.device("meta"):
        assert graphed(lambda: torch.ones(3))().is_meta
        assert counts(replayed)[2] == 0
        with pytest.raises(RuntimeError):
            replayed(x)
    with Doubles():
        assert_bitwise_equal(replayed(x), ones(x))
    assert_bitwise_equal(replayed(x), ones(x))
    assert replayed.info()["forward_replays"] == 3


def _doubled(x: torch.Tensor) -> torch.Tensor:  # [3]
    return torch.mul(x, 2)


def test_forward_mode_derivatives_pass_through() -> None:
    replayed, x = graphed(_doubled), torch.randn(3)
    with torch.no_grad():
        for _ in range(3):
            replayed(x)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(replayed(forward_ad.make_dual(x, torch.ones(3)))).tangent
        assert_bitwise_equal(tangent, torch.full((3,), 2.0))
        replayed(x)
    assert replayed.info()["forward_replays"] == 3


def test_hooks_on_what_autograd_saves_are_honoured() -> None:
    """They may exchange it, here for a half of it."""
    y, expected = (torch.randn(3, requires_grad=True) for _ in range(2))

    def step(x: torch.Tensor) -> None:  # [3]
        (y * x).square().sum().backward()

    replayed, start = graphed(step), torch.randn(3)
    y.grad, expected.grad = torch.zeros(3), torch.zeros(3)
    for _ in range(3):
        replayed(start)
    with torch.no_grad():
        y.grad.zero_(), expected.copy_(y)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t / 2, lambda t: t):
        replayed(start)
        (expected * start).square().sum().backward()
    assert_bitwise_equal(y.grad, expected.grad)
    assert replayed.info()["forward_replays"] == 2


def test_a_trace_sees_the_operations() -> None:
    replayed, x = graphed(_doubled), torch.randn(3)
    for _ in range(3):
        replayed(x)
    traced = torch.jit.trace(replayed, (x,), check_trace=False)
    other = torch.randn(3)
    assert_bitwise_equal(traced(other), _doubled(other))


def test_a_transform_sees_the_operations() -> None:
    y = torch.randn(3)
    replayed = graphed(lambda: _doubled(y))
    for _ in range(3):
        replayed()
    x = torch.randn(2, 3)
    assert_bitwise_equal(torch.func.vmap(lambda x: x + replayed())(x), x + _doubled(y))
    assert replayed.info()["forward_replays"] == 2
