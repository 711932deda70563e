"""Attributes with names that Python or te_graph use, too, and that code has put into objects, modules and classes."""

from __future__ import annotations

import pytest
from text_cases import Cases, refuses_changes, sees_changes

pytestmark = pytest.mark.usefixtures("repeatable")

_SCALED = (
    "class Scaled:\n def __init__(self, fn): functools.update_wrapper(self, fn)\n"
    " def __call__(self): return self.__wrapped__()\n@Scaled\ndef act(): return 2.0"
)
_NAMED = "class Named:\n def get(self): return 2.0 if self.{0} == 'a' else 3.0\nn = Named()\nn.{0} = 'a'"
_IN_CLASS = "class Named:\n {0} = 'a'\n def get(self): return 2.0 if self.{0} == 'a' else 3.0\nn = Named()"
_GOES_THROUGH = "import types\nm = types.ModuleType('of_a_test')\nm.__all__ = ['a']\nm.a, m.b = 2.0, 3.0"
_DECORATED = (
    "def deco(f):\n @functools.wraps(f)\n def w(): return f()\n return w\n@deco\ndef act(): return 2.0\n"
    "class Holder:\n def __init__(self): self.act = act\nh = Holder()"
)
_ALIASED = "T = typing.TypeVar('T')\nclass C(typing.Generic[T]): pass\nc = C[int]()"
_NAMES = ("__name__", "__qualname__", "__doc__", "__file__", "__path__")

CASES: Cases = {
    "__wrapped__ of an object": (_SCALED, "act()", "act.__wrapped__ = lambda: 3.0"),
    "code of __wrapped__ of an object": (_SCALED, "act()", "act.__wrapped__.__code__ = (lambda: 3.0).__code__"),
    "__wrapped__ of a partial": (
        "p = functools.partial(int)\np.__wrapped__ = lambda: 2.0",
        "p.__wrapped__()",
        "p.__wrapped__ = lambda: 3.0",
    ),
    "__wrapped__ by inspect": (_DECORATED, "inspect.unwrap(h.act)()", "act.__wrapped__ = lambda: 3.0"),
    "__wrapped__ of a module": (
        "n = nn.Identity()\nn.__wrapped__ = lambda: 2.0",
        "n.__wrapped__()",
        "n.__wrapped__ = lambda: 3.0",
    ),
    "__all__ of a module": (
        _GOES_THROUGH,
        "sum(getattr(m, name) for name in m.__all__)",
        "m.__all__.append('b')",
    ),
    "another __all__ of a module": (_GOES_THROUGH, "len(m.__all__)", "m.__all__ = ['a', 'b']"),
    "__all__ of a class": ("class C: __all__ = [2.0]", "C.__all__[0]", "C.__all__[0] = 3.0"),
    "__orig_class__": (_ALIASED, "1.0 if c.__orig_class__.__args__ == (int,) else 2.0", "c.__orig_class__ = C[str]"),
    **{f"{name} of an object": (_NAMED.format(name), "n.get()", f"n.{name} = 'b'") for name in _NAMES},
    **{
        f"{name} of a class": (_IN_CLASS.format(name), "n.get()", f"Named.{name} = 'b'")
        for name in _NAMES
        if name not in ("__name__", "__qualname__")  # set of the class by its metaclass
    },
    **{f"{name} that hides the class's": (_IN_CLASS.format(name), "n.get()", f"n.{name} = 'b'") for name in _NAMES[2:]},
    "te_graph of a namespace": ("n = SimpleNamespace(te_graph={'k': 2.0})", "n.te_graph['k']", "n.te_graph['k'] = 3.0"),
    "another te_graph": ("n = Plain()\nn.te_graph = 2.0", "n.te_graph", "n.te_graph = 3.0"),
}

test_graphed_functions_see_them = sees_changes(CASES)
test_callables_refuse_them = refuses_changes(CASES)
