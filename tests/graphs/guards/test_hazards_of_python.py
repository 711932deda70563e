"""What Python's own objects lead to that nothing else holds: defaults, wrapped functions, classes of modules.

Functions of graphed(), and callables of make_graphed_callables that call them.
"""

from __future__ import annotations

import types

import pytest
import torch
from mutations import assert_seen, batch
from text_cases import refuses_changes, run_text, sees_changes
from torch import Tensor

from te_graph import make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")
_MODULE = "import sys, types\nm = types.ModuleType('made'); m.__file__ = '/nowhere/made.py'; m._k = 2.0\n"
_WITH_PROPERTY = (
    "import sys, types\nclass M(types.ModuleType):\n @property\n def k(self): return self._k\n"
    "m = M('made'); m.__file__ = '/nowhere/made.py'; m._k = 2.0\n"
)
_WRAPPED = (
    "def wrap(f):\n @functools.wraps(f)\n def w(): return w.__wrapped__()\n return w\n@wrap\ndef g(): return 2.0\n"
)
CASES = {
    "another default of a defaultdict": (
        "d = collections.defaultdict(lambda: 2.0)\ndef read():\n d.clear()\n v = d['k']\n d.clear()\n return v",
        "read()",
        "d.default_factory = lambda: 3.0",
    ),
    "what a default of a defaultdict reads": (
        "def make(): return H\nd = collections.defaultdict(make)\ndef read():\n v = d['k']\n del d['k']\n return v",
        "read()",
        "H = 3.0",
    ),
    "another wrapped function": (_WRAPPED, "g()", "g.__wrapped__ = lambda: 3.0"),
    "what a property of a module reads": (_WITH_PROPERTY, "m.k", "m._k = 3.0"),
    "another property of a module": (_WITH_PROPERTY, "m.k", "M.k = property(lambda self: 3.0)"),
    "another class of a module": (
        f"{_MODULE}m.k = 2.0\nclass M(types.ModuleType):\n @property\n def k(self): return 3.0",
        "m.k",
        "m.__class__ = M",
    ),
    "hints of types": ("class C:\n a: int", "float(len(typing.get_type_hints(C)))", "C.__annotations__['b'] = int"),
}


test_a_change_is_seen = sees_changes(CASES)
test_a_callable_refuses_a_change = refuses_changes(CASES)


def test_another_derivative_of_a_custom_op_is_seen(device: str) -> None:
    made = iter(range(2))

    def build() -> tuple:
        @torch.library.custom_op(f"te_graph_test_of_derivatives::op{next(made)}", mutates_args=())
        def op(x: Tensor) -> Tensor:
            return x * 2

        op.register_autograd(lambda ctx, grad: grad * 2)
        return (lambda x: op(x)), op

    assert_seen(build, lambda op: op.register_autograd(lambda ctx, grad: grad * 7), "backward_fn of .* ", device)


def test_a_module_that_gets_more_variables_is_as_it_was(module: types.ModuleType) -> None:
    run_text(module, f"{_WITH_PROPERTY}def fn(x): return x * m.k")
    net, x = make_graphed_callables(module.fn, (batch("cpu"),)), batch("cpu")
    run_text(module, "m.other = 1.0\nM.more = 1.0")
    assert torch.equal(net(x), x * 2)
