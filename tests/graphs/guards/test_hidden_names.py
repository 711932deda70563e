"""What comes later to hide what code reads, and what classes hold: seen by graphed functions and modules."""

from __future__ import annotations

import pytest
from text_cases import refuses_changes, sees_changes

pytestmark = pytest.mark.usefixtures("repeatable")

_SUPER = "class A:\n s = {0}\nclass B(A): pass\nclass C(B):\n s = 1.0\n def f(self): return super().s\nc = C()"
_META = "class Q(type):\n s = 2.0\n def f(cls): return cls.s\nclass R(Q): pass\nclass C(metaclass=R): pass"
_WORDS = "class W({}):\n extra = 1.0\nw = W({})\nw.extra = 2.0"
_IN_DICT = "class A:\n def f(self): return {}\nclass C(A): pass\nc = C()"
_OWN = "class A:\n def __init__(self): self.s = 2.0\nclass B(A): pass\nb = B()"


def _derived(value: str, base: str = "") -> str:
    return f"class A({base}):\n s = {value}\nclass B(A): pass\nclass C(B): pass\nc = C()"


CASES = {
    "a number": (_derived("2.0"), "c.s", "B.s = 3.0"),
    "a number of a class": (_derived("2.0"), "C.s", "B.s = 3.0"),
    "a tensor": (_derived("torch.tensor(2.0)", "nn.Module"), "c.s", "B.s = torch.tensor(3.0)"),
    "a list": (_derived("[2.0]"), "c.s[0]", "C.s = [3.0]"),
    "a dictionary of a class": (_derived("{'a': 2.0}"), "C.s['a']", "A.s['a'] = 3.0"),
    "an object": (_derived("SimpleNamespace(a=2.0)"), "c.s.a", "B.s = SimpleNamespace(a=3.0)"),
    "an attribute of a dataclass": (
        "@dataclasses.dataclass\nclass D:\n a: float\n" + _derived("D(2.0)"),
        "c.s.a",
        "c.s = D(3.0)",
    ),
    "a builtin function": (_derived("len"), "float(c.s('ab'))", "B.s = staticmethod(lambda text: 3.0)"),
    "a deque": (_derived("collections.deque([2.0])"), "c.s[0]", "A.s[0] = 3.0"),
    "a partial": (_derived("functools.partial(lambda a: a[0], [2.0])"), "c.s()", "A.s.args[0][0] = 3.0"),
    "a module": (_derived("nn.Dropout(0.5)"), "c.s.p", "A.s.p = 0.25"),
    "the flag of a module": (_derived("nn.Dropout(0.5)", "nn.Module"), "2.0 if c.s.training else 3.0", "A.s.eval()"),
    "an array": (_derived("np.array([2.0])"), "float(C.s[0])", "A.s[0] = 3.0"),
    "super": (_SUPER.format("2.0"), "c.f()", "B.s = 3.0"),
    "super of a list": (_SUPER.replace("().s", "().s[0]").format("[2.0]"), "c.f()", "B.s = [3.0]"),
    "super of a method": (
        "class A:\n def f(self): return 2.0\nclass B(A): pass\nclass C(B):\n def f(self): return super().f()\nc = C()",
        "c.f()",
        "B.f = lambda self: 3.0",
    ),
    "a metaclass": (_META, "C.s", "R.s = 3.0"),
    "a method of a metaclass": (_META, "C.f()", "Q.f = lambda cls: 3.0"),
    "a property in place of an attribute": (_OWN, "b.s", "A.s = property(lambda self: 3.0)"),
    "an attribute of a member": (
        "class Mode(enum.Enum):\n A = 1\n extra = enum.nonmember(2.0)",
        "Mode.A.extra",
        "Mode.A.extra = 3.0",
    ),
    "an attribute that a class lacks": (_derived("1.0"), "getattr(C, 'gain', 2.0)", "C.gain = 3.0"),
    "a number in a dictionary of attributes": (_IN_DICT.format("self.__dict__.get('s', 2.0)"), "c.f()", "c.s = 3.0"),
    "a number in one that is asked for": (
        _IN_DICT.format("super().__getattribute__('__dict__').get('s', 2.0)"),
        "c.f()",
        "c.s = 3.0",
    ),
    "a variable of a thread": ("t = threading.local()", "getattr(t, 'k', 2.0)", "t.k = 3.0"),
    "a global variable": ("def f():\n try: return GAIN\n except NameError: return 2.0", "f()", "GAIN = 3.0"),
    "a global variable by its name": ("GAIN = 2.0\ndef f(): return globals()['GAIN']", "f()", "GAIN = 3.0"),
    "one by its name in a generator": (
        "GAIN = 2.0\ndef f(): return sum(globals()[name] for name in ('GAIN',))",
        "f()",
        "GAIN = 3.0",
    ),
    "one by its name in a lambda": ("GAIN = 2.0\ndef f(): return (lambda: globals()['GAIN'])()", "f()", "GAIN = 3.0"),
    "one that is not there": ("def f(): return globals().get('GAIN', 2.0)", "f()", "GAIN = 3.0"),
    "a name in a namespace": ("a = argparse.Namespace()", "a.s if 's' in a else 2.0", "a.s = 3.0"),
    "an attribute of a dictionary": (_WORDS.format("dict", ""), "w.extra", "w.extra = 3.0"),
    "an attribute of a list": (_WORDS.format("list", ""), "w.extra", "w.extra = 3.0"),
    "an attribute of a tuple of objects": (_WORDS.format("tuple", "[Plain()]"), "w.extra", "w.extra = 3.0"),
    "a key that is a weak reference": ("p = Plain(); p.k = 2.0\nd = {weakref.ref(p): 1}", "[*d][0]().k", "p.k = 3.0"),
    "a method that is weakly held": (
        "class C:\n def f(self): return self.k\nc = C(); c.k = 2.0\nr = weakref.WeakMethod(c.f)",
        "r()()",
        "c.k = 3.0",
    ),
    "the code of one": (
        "class C:\n def f(self): return 2.0\nc = C()\nr = weakref.WeakMethod(c.f)",
        "r()()",
        "C.f.__code__ = (lambda self: 3.0).__code__",
    ),
    "a format in a variable": ("p = Plain(); p.k = 2.0\nt = '{0.k}'", "float(t.format(p))", "p.k = 3.0"),
}


test_a_function_sees_it = sees_changes(CASES)
test_a_module_refuses_it = refuses_changes(CASES)
