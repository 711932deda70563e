"""Attributes that code asks for by names which it puts together, or that are no identifiers, and those that only code
of Python or torch asks for: present and absent ones.

Functions of graphed(), and callables of make_graphed_callables that call them.
"""

from __future__ import annotations

import pytest
import torch
from sequences import counts
from text_cases import refuses_changes, sees_changes
from torch import Tensor, nn

from te_graph import graphed, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
_P, _M = "p = Plain()\nsetattr(p, {0!r}, 2.0)\n{1}", "p = nn.Module()\nsetattr(p, {0!r}, 2.0)\n{1}"
_SET = "setattr(p, {!r}, 3.0)"
_VISITOR = "import ast\nclass V(ast.NodeVisitor):\n k = 2.0\n def generic_visit(self, node): return {}\nw = V()"
CASES = {
    "a digit": (_P.format("1", "n = 1"), "getattr(p, str(n))", _SET.format("1")),
    "a digit, of a module": (_M.format("1", "n = 1"), "getattr(p, str(n))", _SET.format("1")),
    "a dot": (_P.format("layer.0", "n = 0"), "getattr(p, f'layer.{n}')", _SET.format("layer.0")),
    "a dash": (_P.format("lr-scale", ""), "getattr(p, 'lr-scale')", _SET.format("lr-scale")),
    "a blank": (_P.format("lr scale", "n = 'scale'"), "getattr(p, 'lr ' + n)", _SET.format("lr scale")),
    "a long name": (_P.format("x" * 80, "n = 40"), "getattr(p, 'xx' * n)", _SET.format("x" * 80)),
    "a dot that comes": ("p = Plain()\nn = 0", "getattr(p, f'layer.{n}', 2.0)", _SET.format("layer.0")),
    "a dash that comes": ("p = Plain()", "3.0 if hasattr(p, 'a-b') else 2.0", _SET.format("a-b")),
    "a dash in a dictionary": ("p = Plain()", "vars(p).get('a-b', 2.0)", _SET.format("a-b")),
    "a dash among the names": ("p = Plain()", "3.0 if 'a-b' in vars(p) else 2.0", _SET.format("a-b")),
    "a member of an enumeration": (
        _P.format("warm", "class E(str, enum.Enum):\n W = 'warm'\ne = E.W"),
        "getattr(p, e)",
        _SET.format("warm"),
    ),
    "a derived text": (_P.format("warm", "class S(str): pass\ns = S('wa')"), "getattr(p, S(s + 'rm'))", "p.warm = 3.0"),
    "a list of parameters": ("l = nn.ParameterList([1.0, 2.0])", "l[1]", "l[1] = 3.0"),
    "a dictionary of parameters": (
        "d = nn.ParameterDict({'a': 2.0, 'b': nn.Parameter(torch.ones(3))})\nk = 'a'",
        "d[k]",
        "d['a'] = 3.0",
    ),
    "a method that a visitor gets": (
        _VISITOR.format("self.k"),
        "w.visit(ast.Constant(1))",
        "w.visit_Constant = lambda node: 3.0",
    ),
    "a method of a visitor": (
        _VISITOR.format("self.k") + "\nw.visit_Constant = lambda node: 2.0",
        "w.visit(ast.Constant(1))",
        "w.visit_Constant = lambda node: 3.0",
    ),
    "a field of a format": (
        "import string\np = Plain(); p.k = 2.0\nf = string.Formatter()",
        "float(f.format('{0.' + 'k' + '}', p))",
        "p.k = 3.0",
    ),
}


test_a_change_is_seen = sees_changes(CASES)
test_a_callable_refuses_a_change = refuses_changes(CASES)


def test_what_a_scaler_puts_on_an_optimizer_is_seen(device: str) -> None:
    """A fused step asks for ``grad_scale`` and ``found_inf``, which nobody else names."""
    weights = [torch.ones(3, device=device, requires_grad=True) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1, fused=True) for weight in weights]
    steps = [graphed(optimizers[0].step), optimizers[1].step]

    def step_both() -> None:
        for weight, step in zip(weights, steps, strict=True):
            weight.grad = torch.full_like(weight, 0.5) if weight.grad is None else weight.grad.fill_(0.5)
            step()
        assert_bitwise_equal(*(weight.detach() for weight in weights))

    for _ in range(3):
        step_both()
    assert counts(steps[0])[1] == 2
    for found_inf, scale in ((1.0, 2.0), (0.0, 4.0), (0.0, 8.0)):
        for optimizer in optimizers:
            optimizer.found_inf = torch.full((), found_inf, device=device)
            optimizer.grad_scale = torch.full((), scale, device=device)
        step_both()
    for optimizer in optimizers:
        del optimizer.found_inf, optimizer.grad_scale
    step_both()
    assert counts(steps[0])[1] == 3


def test_a_counter_whose_name_is_no_identifier_is_refused(device: str) -> None:
    class Counting(nn.Module):
        """[3] -> [3]."""

        def __init__(self) -> None:
            super().__init__()
            self.kind = "x"
            setattr(self, "calls.x", 0)

        def forward(self, x: Tensor) -> Tensor:
            name = f"calls.{self.kind}"
            setattr(self, name, getattr(self, name) + 1)
            return x * 2

    with pytest.raises(RuntimeError, match=r"changes calls\.x \(from \d to \d\)"):
        make_graphed_callables(Counting(), (torch.ones(3, device=device),))
