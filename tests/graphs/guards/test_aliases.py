"""Objects that stand for classes of the user's: generic and type aliases, annotated types, and what ``super`` gives."""

from __future__ import annotations

import sys

import pytest
from text_cases import Cases, refuses_changes, sees_changes

pytestmark = pytest.mark.usefixtures("repeatable")

_GENERIC = "T = typing.TypeVar('T')\nclass Op(typing.Generic[T]):\n k = 2.0\n def get(self): return self.k\nA = Op[int]"
_PLAIN = "import types\nclass G:\n k = 2.0\n __class_getitem__ = classmethod(types.GenericAlias)\nA = G[int]"
_CLASS = "class C:\n k = 2.0\n"
_SUPER = "class B: k = 2.0\nclass D(B):\n def up(self): return super()\nd = D()\nh = SimpleNamespace(up=d.up())"

CASES: Cases = {
    "class attribute of a generic class": (_GENERIC, "A().get()", "Op.k = 3.0"),
    "method of a generic class": (_GENERIC, "A().get()", "Op.get = lambda self: 3.0"),
    "attribute by an alias": (_GENERIC, "A.k", "Op.k = 3.0"),
    "alias in an attribute": (_GENERIC + "\nh = SimpleNamespace(a=A)", "h.a().get()", "Op.k = 3.0"),
    "alias of a class of its own": (_PLAIN, "A.k", "G.k = 3.0"),
    "argument of an alias": (_CLASS + "A = list[C]", "typing.get_args(A)[0].k", "C.k = 3.0"),
    "argument of a union": (_CLASS + "A = typing.Optional[C]", "typing.get_args(A)[0].k", "C.k = 3.0"),
    "argument of a union of types": (_CLASS + "A = C | None", "A.__args__[0].k", "C.k = 3.0"),
    "annotation": (_CLASS + "A = typing.Annotated[int, C]", "A.__metadata__[0].k", "C.k = 3.0"),
    "annotation by typing": (
        "o = Plain()\no.k = 2.0\nA = typing.Annotated[int, o]",
        "typing.get_args(A)[1].k",
        "o.k = 3.0",
    ),
    "new type": (_CLASS + "A = typing.NewType('A', C)", "A.__supertype__.k", "C.k = 3.0"),
    "super": (_SUPER, "h.up.k", "B.k = 3.0"),
    "super that another class comes to hide": (
        _SUPER.replace("d = D()", "class E(D): pass\nd = E()"),
        "h.up.k",
        "B.k = 3.0",
    ),
    "object of super": (
        "class B:\n def get(self): return self.k\nclass D(B):\n def up(self): return super()\n"
        "d = D()\nd.k = 2.0\nh = SimpleNamespace(up=d.up())",
        "h.up.get()",
        "d.k = 3.0",
    ),
}
if sys.version_info >= (3, 12):
    CASES["named type"] = (_CLASS + "type A = C", "A.__value__.k", "C.k = 3.0")

test_graphed_functions_see_them = sees_changes(CASES)
test_callables_refuse_them = refuses_changes(CASES)
