"""What wrappers of Python and torch hold for the user: decorators, transforms, context managers, methods as objects."""

from __future__ import annotations

import types

import pytest
import torch
from text_cases import Cases, refuses_changes, run_text, sees_changes

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

_SCALE = (
    "class Scale:\n def __init__(self, k): self.k = k\n def apply(self, x): return x * self.k\n"
    " def __call__(self, x): return x * self.k\no = Scale(2.0)\n"
)
_SLOTTED = _SCALE.replace("class Scale:\n", "class Scale:\n __slots__ = ('k', '__weakref__')\n")
_STACK = _SCALE + "stack = [1.0]\n"
_DECORATOR = (
    "class Using({0}):\n def __init__(self, k):\n  {1}self.k = k\n def __enter__(self): stack.append(self.k)\n"
    " def __exit__(self, *a): stack.pop()\n{2}u = Using(2.0)\n@u\ndef f(): return stack[-1]\n"
)
_OF_TORCH = "torch.utils._contextlib._DecoratorContextManager"
_MANAGER = (
    "@contextlib.contextmanager\ndef scaled(c):\n stack.append(c.k)\n try: yield\n finally: stack.pop()\n"
    "@scaled({0})\ndef f(): return stack[-1]\n"
)
_RAISE = "o.k = 3.0"
_APPLY = {
    "no_grad": "torch.no_grad()({0})",
    "enable_grad": "torch.enable_grad()({0})",
    "autocast": "torch.autocast('cpu', enabled=False)({0})",
    "compiler.disable": "torch.compiler.disable({0})",
    "vmap": "torch.vmap({0})",
    "compile": "torch.compile({0}, backend='eager')",
    "staticmethod": "staticmethod({0})",
    "context decorator": "contextlib.contextmanager(lambda: iter([None]))()({0})",
    "two wrappers": "torch.no_grad()(torch.vmap({0}))",
    "wrapper of a wrapper object": "staticmethod(torch.enable_grad()({0}))",
}
_WRAPPED = {"method": "o.apply", "partial": "functools.partial(lambda x, c: x * c.k, c=o)", "object": "o"}
_PARTIAL = "o = SimpleNamespace(k=2.0)\n"
# A call takes a tensor and multiplies it, so that the number 1 gives what the object holds.
_READ = "w(torch.ones(1))"

CASES: Cases = {
    **{
        f"{what} in {name}": (f"{_SCALE}w = {call.format(_WRAPPED[what])}", _READ, _RAISE)
        for name, call in _APPLY.items()
        for what in _WRAPPED
        if what == "method" or name in ("vmap", "staticmethod")
    },
    "method of an object with slots": (_SLOTTED + "w = torch.no_grad()(o.apply)", _READ, _RAISE),
    "wrapper as static method of a class": (
        _SCALE + "class C:\n a = staticmethod(torch.no_grad()(o.apply))",
        "C.a(torch.ones(1))",
        _RAISE,
    ),
    "wrapper as a method": (
        _SCALE + "class C:\n a = torch.no_grad()(lambda self, c=o: c.k)\nc = C()",
        "c.a()",
        _RAISE,
    ),
    "transform as a method": (
        _SCALE + "class C:\n @property\n def a(self): return w\nw = torch.vmap(o)\nc = C()",
        "c.a(torch.ones(1))",
        _RAISE,
    ),
    "decorator of the user's": (_STACK + _DECORATOR.format("contextlib.ContextDecorator", "", ""), "f()", "u.k = 3.0"),
    "decorator of the user's on torch's": (
        _STACK + _DECORATOR.format(_OF_TORCH, "super().__init__(); ", " def clone(self): return self\n"),
        "f()",
        "u.k = 3.0",
    ),
    "generator as a decorator": (_STACK + _MANAGER.format("o"), "f()", _RAISE),
    "generator with a dictionary": (
        _STACK
        + _MANAGER.format("{'k': 2.0}")
        .replace("c.k", "c['k']")
        .replace("@scaled({", "d = {")
        .replace("})\ndef f", "}\n@scaled(d)\ndef f"),
        "f()",
        "d['k'] = 3.0",
    ),
    "generator with a keyword": (_STACK + _MANAGER.format("c=o"), "f()", _RAISE),
    "closing": (
        _SCALE + "o.close = lambda: None\ndef f():\n with contextlib.closing(o) as c: return c.k",
        "f()",
        _RAISE,
    ),
    "nullcontext": (_SCALE + "n = contextlib.nullcontext(o)\ndef f():\n with n as c: return c.k", "f()", _RAISE),
    "nullcontext of a list": (
        _SCALE + "n = contextlib.nullcontext([o])\ndef f():\n with n as c: return c[0].k",
        "f()",
        _RAISE,
    ),
    "nullcontext, another object": (
        _SCALE + "n = contextlib.nullcontext(o)\ndef f():\n with n as c: return c.k",
        "f()",
        "n.enter_result = Scale(3.0)",
    ),
}

# What torch.compile made runs compiled in the first call of a function.
test_graphed_functions_see_them = sees_changes({key: case for key, case in CASES.items() if key != "method in compile"})
test_callables_refuse_them = refuses_changes(CASES)


def test_a_decorator_around_the_forward_of_a_module_is_followed(module: types.ModuleType) -> None:
    decorator = _DECORATOR.format("contextlib.ContextDecorator", "", "")
    run_text(module, f"import contextlib, torch\nfrom torch import nn\n{_STACK}{decorator}")
    run_text(module, "class Net(nn.Module):\n @u\n def forward(self, x): return x * stack[-1]")
    x = torch.ones(2)
    net = make_graphed_callables(module.Net(), (x,))
    assert torch.equal(net(x), 2 * x)
    module.u.k = 3.0
    with pytest.raises(RuntimeError, match=r"k changed from 2\.0 to 3\.0"):
        net(x)


def test_caches_of_wrappers_may_grow(module: types.ModuleType) -> None:
    run_text(
        module,
        "import functools\n@functools.singledispatch\ndef gain(c): return 2.0\n"
        "@gain.register\ndef _(c: int): return 3.0\n"
        "def fn(x): return x * gain(1)",
    )
    x = torch.ones(2)
    net = make_graphed_callables(module.fn, (x,))
    assert_bitwise_equal(net(x), 3 * x)
    module.gain("text")
    assert_bitwise_equal(net(x), 3 * x)
