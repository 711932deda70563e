"""What code in a backward looks up in classes, containers and globals, changed after the forward: a replay refuses."""

from __future__ import annotations

import types

import pytest
import torch
from text_cases import HEADER, run_text

from te_graph import make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")
_NET = """
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 1
    @staticmethod
    def backward(ctx, grad): return grad * read()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
    def forward(self, x): return Scaled.apply(x * self.weight)
"""
_CLASSES = "class A: k = [2.0]\nclass B(A): pass\n"
_META = "class Q(type): k = 2.0\nclass A(metaclass=Q): pass\nclass B(A): pass\nb = B()\n"
_PATTERN = "class P:\n __match_args__ = ('k',)\n def __init__(self, k): self.k = k\np = P(2.0)\n"
CASES = {
    "a dictionary in a list": (
        "class D(dict): __getattr__ = dict.__getitem__\nl = [D(k=2.0)]\ndef read(): return l[0].k",
        "l[0]['k'] = 3.0",
    ),
    "an object in a list of lists": ("p = Plain(); p.k = 2.0; l = [[p]]\ndef read(): return l[0][0].k", "p.k = 3.0"),
    "an attribute that comes": ("p = Plain()\ndef read(): return getattr(p, 'k', 2.0)", "p.k = 3.0"),
    "one that its class gets": ("p = Plain()\ndef read(): return getattr(p, 'k', 2.0)", "Plain.k = 3.0"),
    "a list that a class gets": (_CLASSES + "def read(): return B.k[0]", "B.k = [3.0]"),
    "a list that the class of an object gets": (_CLASSES + "b = B()\ndef read(): return b.k[0]", "B.k = [3.0]"),
    "a number of a class": ("class A: k = 2.0\nclass B(A): pass\ndef read(): return B.k", "B.k = 3.0"),
    "a number of a metaclass": (_META + "def read(): return B.k", "Q.k = 3.0"),
    "one that a class comes to hide": (_META + "def read(): return B.k", "A.k = 3.0"),
    "one of an object's metaclass": (_META + "def read(): return type(b).k", "Q.k = 3.0"),
    "one that its class comes to hide": (_META + "def read(): return type(b).k", "A.k = 3.0"),
    "a field of a pattern": (
        _PATTERN + "def read():\n match p:\n  case P(k): return k",
        "p.k = 3.0",
    ),
    "an attribute by a getter": (
        "p = Plain(); p.zz = 2.0; get = operator.attrgetter('z' + 'z')\ndef read(): return get(p)",
        "p.zz = 3.0",
    ),
    "a global variable that comes": (
        "def read():\n try: return GAIN\n except NameError: return 2.0",
        "GAIN = 3.0",
    ),
}


@pytest.mark.parametrize("changes", [False, True], ids=["same", "changed"])
@pytest.mark.parametrize(("setup", "change"), CASES.values(), ids=CASES)
def test_a_change_after_the_forward_is_refused(
    module: types.ModuleType, setup: str, change: str, changes: bool
) -> None:
    run_text(module, f"{HEADER}\n{setup}\n{_NET}")
    net = make_graphed_callables(module.Net(), (torch.ones(2, requires_grad=True),))
    x = torch.ones(2, requires_grad=True)
    y = net(x).sum()
    if changes:
        run_text(module, change)
        with pytest.raises(RuntimeError, match="since the forward"):
            y.backward()
    else:
        y.backward()
        assert x.grad.tolist() == [2.0, 2.0]
