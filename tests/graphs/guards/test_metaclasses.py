"""What code reads of classes and these have of their metaclass, until something hides it: seen by graphed functions and
modules."""

from __future__ import annotations

import pytest
import torch
from text_cases import function_of_case, made_module, refuses_changes, sees_changes
from torch import Tensor, nn

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

_BELOW = "class A({0}metaclass=Q): pass\nclass C(A): pass\nc = C()"
_NUMBER = "class Q(type):\n s = 2.0\n"
_META = _NUMBER + _BELOW.format("")
_METHOD = "class Q(type):\n def f(cls): return 2.0\n" + _BELOW.format("")
_PROPERTY = (
    "class Q(type):\n @property\n def s(cls): return cls.k\nclass A(metaclass=Q):\n k = 2.0\nclass C(A): pass\nc = C()"
)
_GETATTR = "class Q(type):\n def __getattr__(cls, name): return 2.0\n" + _BELOW.format("")
_DESCRIPTOR = "class D:\n def __get__(self, obj, kind=None): return 2.0\nclass Q(type):\n s = D()\n" + _BELOW.format("")
_OWN = "class Q(type): pass\nclass A(metaclass=Q):\n s = 2.0\nclass C(A): pass\nc = C()"
_ENUM = "class Q(enum.EnumMeta):\n s = 2.0\nclass E(enum.{0}, metaclass=Q):\n X = 1\nm = E.X"
_ABC = "import abc\nclass Q(abc.ABCMeta):\n s = 2.0\n" + _BELOW.format("")
_OTHERS = "\nclass R(type):\n s = 3.0\nclass B(metaclass=R): pass\nclass D(metaclass=Q):\n s = 3.0\nclass E(A): pass"
_IN_METHOD = _NUMBER + "class A(metaclass=Q):\n def f(self): return type(self).s\nclass C(A): pass\nc = C()"
_LATER_DESCRIPTOR = "Q.s = property(lambda cls: 3.0)"

_READS = {"type": "type(c).s", "__class__": "c.__class__.s", "a class": "C.s", "a base": "type(c).__mro__[1].s"}
_HIDE = {"the class": "C.s = 3.0", "a base": "A.s = 3.0"}
_GIVERS = {"a number": _META, "__getattr__": _GETATTR, "a descriptor": _DESCRIPTOR, "ABCMeta": _ABC}

CASES = {
    **{
        f"{giver} by {read} hidden by {place}": (setup, _READS[read], change)
        for giver, setup in _GIVERS.items()
        for read in _READS
        for place, change in _HIDE.items()
        if (read, place) != ("a base", "the class")
    },
    "a number of the metaclass itself": (_META, "type(c).s", "Q.s = 3.0"),
    "a method": (_METHOD, "type(c).f()", "A.f = classmethod(lambda cls: 3.0)"),
    "a method of its own": (_METHOD, "type(c).f()", "Q.f = lambda cls: 3.0"),
    "what a property reads": (_PROPERTY, "type(c).s", "A.k = 3.0"),
    "a property": (_PROPERTY, "type(c).s", _LATER_DESCRIPTOR),
    "a property that hides what an object's class has": (_OWN, "type(c).s", _LATER_DESCRIPTOR),
    "a property that hides what a class has": (_OWN, "C.s", _LATER_DESCRIPTOR),
    "a number for __getattr__ of an object's class": (_GETATTR, "type(c).s", "Q.s = 3.0"),
    "a number for __getattr__ of a class": (_GETATTR, "C.s", "Q.s = 3.0"),
    "another __getattr__": (_GETATTR, "type(c).s", "Q.__getattr__ = lambda cls, name: 3.0"),
    "a list": (_META.replace("2.0", "[2.0]"), "type(c).s[0]", "C.s = [3.0]"),
    "a tensor": (_META.replace("2.0", "torch.tensor(2.0)"), "type(c).s", "C.s = torch.tensor(3.0)"),
    "in a method": (_IN_METHOD, "c.f()", "C.s = 3.0"),
    "in a method of an object made inside": (_IN_METHOD, "C().f()", "C.s = 3.0"),
    "in a class method": (
        _NUMBER + "class A(metaclass=Q):\n @classmethod\n def f(cls): return cls.s\nclass C(A): pass\nc = C()",
        "c.f()",
        "A.s = 3.0",
    ),
    "in a method of the metaclass": (
        "class Q(type):\n s = 2.0\n def f(cls): return cls.s\n" + _BELOW.format(""),
        "type(c).f()",
        "A.s = 3.0",
    ),
    "above a metaclass": ("class P(type):\n s = 2.0\nclass Q(P): pass\n" + _BELOW.format(""), "type(c).s", "Q.s = 3.0"),
    "by super() of a metaclass": (
        "class P(type):\n s = 2.0\nclass Q(P):\n def f(cls): return super().s\n" + _BELOW.format(""),
        "type(c).f()",
        "P.s = 3.0",
    ),
    "a metaclass of a metaclass": (
        "class P(type):\n s = 2.0\nclass Q(type, metaclass=P): pass\n" + _BELOW.format(""),
        "type(type(c)).s",
        "Q.s = 3.0",
    ),
    "Enum": (_ENUM.format("Enum"), "type(m).s", "E.s = 3.0"),
    "IntEnum": (_ENUM.format("IntEnum"), "type(m).s", "E.s = 3.0"),
    "Flag": (_ENUM.format("Flag"), "type(m).s", "E.s = 3.0"),
    "a property of EnumMeta": (_ENUM.format("Enum"), "type(m).s", _LATER_DESCRIPTOR),
    "a module": (_NUMBER + _BELOW.format("nn.Module, "), "type(c).s", "A.s = 3.0"),
    "a dictionary": (_NUMBER + _BELOW.format("dict, "), "type(c).s", "A.s = 3.0"),
    "a number of a class of its own": (
        _NUMBER + "class A(float, metaclass=Q): pass\nc = A(2)",
        "type(c).s",
        "A.s = 3.0",
    ),
    "slots": (_NUMBER + "class A(metaclass=Q):\n __slots__ = ('a',)\nc = A()", "type(c).s", "A.s = 3.0"),
    "a generic class": (
        _NUMBER + "class A(typing.Generic[typing.TypeVar('T')], metaclass=Q): pass\nc = A()",
        "type(c).s",
        "A.s = 3.0",
    ),
    "a weak reference": (_META + "\nr = weakref.ref(c)", "type(r()).s", "A.s = 3.0"),
    "an attribute": (_META + "\nh = SimpleNamespace(k=c)", "type(h.k).s", "A.s = 3.0"),
    "an object of another class": (_META + _OTHERS, "type(c).s", "c.__class__ = D"),
    "an object of a class of another metaclass": (_META + _OTHERS, "type(c).s", "c.__class__ = B"),
    "an object of a class that changes then": (_META + _OTHERS, "type(c).s", "c.__class__ = E; E.s = 3.0"),
    "another metaclass of an object's class": (_META + _OTHERS, "type(c).s", "C.__class__ = R"),
    "another metaclass of a class": (_META + _OTHERS, "C.s", "C.__class__ = R"),
    "what type has": ("class C: pass\nc = C()", "float(len(type(c).mro()))", "C.mro = classmethod(lambda cls: [1])"),
    "an attribute that an object lacks and its class has": (_META, "getattr(c, 's', type(c).s)", "c.s = 3.0"),
    "an object's own __getattr__ below a metaclass": (
        "class Q(type): pass\nclass C(metaclass=Q):\n def __getattr__(self, name): return 2.0\n"
        " __next__ = None\nc = C()",
        "c.s",
        "C.s = 3.0",
    ),
}

test_a_function_sees_it = sees_changes(CASES)
test_a_module_refuses_it = refuses_changes(CASES)


@pytest.mark.parametrize("change", ["Net.s = 3.0", "Base.s = 3.0", "Meta.s = 3.0", "net.__class__ = Other"])
def test_the_metaclass_of_the_module_itself(change: str) -> None:
    class Meta(type):
        s = 2.0

    class Base(nn.Module, metaclass=Meta):
        pass

    class Net(Base):
        def forward(self, x: Tensor) -> Tensor:  # [n] -> [n]
            return x * type(self).s

    class Other(Net, metaclass=type("Above", (Meta,), {"s": 3.0})):
        pass

    x = torch.ones(3)
    net = tg.make_graphed_callables(Net(), (x,))
    assert_bitwise_equal(net(x), x * 2)
    exec(change, locals())
    with pytest.raises(RuntimeError, match="since capture"):
        net(x)


def test_a_class_whose_metaclass_answers_to_every_name_gives_no_iterators() -> None:
    function, replayed, x = function_of_case(made_module(), _GETATTR + "\nc.k = 2.0", "c.k")
    assert torch.equal(replayed(x), function(x))
    net = tg.make_graphed_callables(lambda x: function(x), (x,))
    assert torch.equal(net(x), x * 2)


def test_a_change_of_a_class_that_no_code_reads_is_none() -> None:
    module = made_module()
    function, replayed, x = function_of_case(module, _META, "type(c).s")
    for _ in range(3):
        replayed(x)
    module.C.other = module.A.other = module.Q.other = 1.0
    assert torch.equal(replayed(x), function(x))
    assert replayed.info()["forward_replays"] == 3
