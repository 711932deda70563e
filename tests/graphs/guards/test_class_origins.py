"""Classes that say they are of Python and are the user's: made by ``exec``, by ``type`` and ``types``, or of a file
that has the name of a module of Python's."""

from __future__ import annotations

import abc
import collections
import ctypes
import datetime
import decimal
import enum
import functools
import gc
import importlib.util
import pathlib
import queue
import sys
import threading
import types
import weakref
from pathlib import Path

import pytest
import torch
from text_cases import Cases, refuses_changes, run_text, sees_changes

from te_graph import graphed, make_graphed_callables
from te_graph.common.class_origins import is_of_python, module_of
from te_graph.common.dispatch import is_project_file

pytestmark = pytest.mark.usefixtures("repeatable")

_EXEC = (
    "ns = {}\nexec('class C:\\n base = 1.0\\n def __init__(self): self.k = 2.0\\n"
    " def gain(self): return self.k * self.base', ns)\nC = ns['C']\nc = C()"
)
_BARE = "ns = {}\nexec('class C: k = 2.0', ns)\nC = ns['C']\nc = C()"
_ABSTRACT = (
    "import abc\nclass Base(abc.ABC):\n def gain(self): return self.k * self.base\n"
    "C = type('C', (Base,), {'base': 1.0, 'k': 2.0})\nc = C()"
)
_NEW = "import types\nC = types.new_class('C', (), {}, lambda ns: ns.update(k=2.0))\nc = C()"
_ENUM = (
    "ns = {}\nexec('import enum\\nclass C(enum.Enum):\\n A = 2.0\\n def gain(self): return self.value', ns)\n"
    "C = ns['C']"
)
_NET = (
    "import abc\nclass Base(nn.Module, abc.ABC): pass\n"
    "C = type('C', (Base,), {'gain': 2.0, 'forward': lambda self, x: self.gain})\nc = C()"
)
_HELD = "ns = {}\nexec('class K: k = 2.0', ns)\nclass C: held = ns['K']\nK = ns['K']"
_DATA = "ns = {}\nexec('import dataclasses as d\\n@d.dataclass\\nclass C: k: float = 2.0', ns)\nC = ns['C']\nc = C()"
_MADE_DATA = "C = dataclasses.make_dataclass('C', [('k', float, 2.0)])\nc = C()"
_NEW_DATA = (
    "import types\nC = types.new_class('C', (), {}, lambda ns: ns.update(__annotations__={'k': float}, k=2.0))\n"
    "C = dataclasses.dataclass(C)\nc = C()"
)
_DECORATED = (
    "ns = {}\nexec('import contextlib\\nclass C:\\n k = 2.0\\n @contextlib.contextmanager\\n"
    " def scope(self): yield', ns)\nC = ns['C']\nc = C()\nc.k = 2.5"
)

CASES: Cases = {
    "attribute of a dataclass of exec": (_DATA, "c.k", "c.k = 3.0"),
    "attribute of a dataclass made": (_MADE_DATA, "c.k", "c.k = 3.0"),
    "attribute of a dataclass of new_class": (_NEW_DATA, "c.k", "c.k = 3.0"),
    "attribute beside a decorated method": (_DECORATED, "c.k", "c.k = 3.0"),
    "attribute of an object of exec": (_EXEC, "c.gain()", "c.k = 3.0"),
    "class attribute of exec": (_EXEC, "c.gain()", "C.base = 3.0"),
    "method of exec": (_EXEC, "c.gain()", "C.gain = lambda self: 3.0"),
    "class of exec without functions": (_BARE, "c.k", "C.k = 3.0"),
    "hidden class attribute of exec": (_BARE, "c.k", "c.k = 3.0"),
    "class of exec itself": (_BARE, "C.k", "C.k = 3.0"),
    "class of exec that a class holds": (_HELD, "C.held.k", "K.k = 3.0"),
    "class attribute of type with ABC": (_ABSTRACT, "c.gain()", "C.base = 3.0"),
    "hidden class attribute of type with ABC": (_ABSTRACT, "c.gain()", "c.k = 3.0"),
    "class attribute of new_class": (_NEW, "c.k", "C.k = 3.0"),
    "attribute of an object of new_class": (_NEW + "\nc.k = 2.5", "c.k", "c.k = 3.0"),
    "method of an enumeration of exec": (_ENUM, "C.A.gain()", "C.gain = lambda self: 3.0"),
    "class without a module": ("class C: k = 2.0\nC.__module__ = None\nc = C()", "c.k", "C.k = 3.0"),
    "module of type with ABC": (_NET, "c(x)", "C.gain = 3.0"),
}

test_graphed_functions_see_them = sees_changes(CASES)
test_callables_refuse_them = refuses_changes(CASES)


def test_a_counter_in_a_class_of_exec_is_refused(module: types.ModuleType) -> None:
    run_text(module, "ns = {}\nexec('class K:\\n def __init__(self): self.n = 0\\nk = K()', ns)\nk = ns['k']")
    run_text(module, "def fn(x):\n k.n += 1\n return x * 2")
    with pytest.raises(RuntimeError, match=r"changes global variable k\.n"):
        make_graphed_callables(module.fn, (torch.ones(2),))


@pytest.mark.parametrize("name", ["sched", "torch.mine"])
def test_classes_of_a_file_with_a_name_of_a_library(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = (
        "class K: scale = 1.0\nclass S:\n base = 1.0\n def __init__(self): self.k = 2.0\n"
        " def gain(self): return self.k * self.base * K.scale\ns = S()"
    )
    (tmp_path / "theirs.py").write_text(text)
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, tmp_path / "theirs.py"))
    monkeypatch.setitem(sys.modules, name, module)
    module.__spec__.loader.exec_module(module)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x * module.s.gain()

    x = torch.ones(2)
    net, function = make_graphed_callables(fn, (x,)), graphed(fn)
    for owner, key in ((module.S, "base"), (module.K, "scale")):
        for _ in range(3):
            function(x)
        net(x)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, key, 5.0)
            assert torch.equal(function(x), fn(x))
            with pytest.raises(RuntimeError, match=key):
                net(x)


def test_a_folder_whose_name_ends_like_that_of_packages_is_no_place_of_packages() -> None:
    assert is_project_file("/home/me/ml-packages/net.py")
    assert not is_project_file("/usr/lib/python3/dist-packages/net.py")


_OF_PYTHON = (
    *(int, type, enum.Enum, enum.EnumMeta, abc.ABC, abc.ABCMeta, functools.partial, collections.OrderedDict),
    *(collections.UserDict, decimal.Decimal, datetime.date, pathlib.PosixPath, queue.Queue, weakref.WeakSet),
    *(threading.local, type(threading.Lock()), threading.Thread, types.SimpleNamespace, ctypes.c_int, ctypes.Structure),
)


@pytest.mark.parametrize("kind", _OF_PYTHON)
def test_classes_of_python_are_pythons(kind: type) -> None:
    assert is_of_python(kind)


def test_what_is_known_of_classes_keeps_none_alive() -> None:
    kind = type("Gone", (abc.ABC,), {})
    assert kind.__module__ == "abc"
    assert module_of(kind) == ""
    gone = weakref.ref(kind)
    del kind
    gc.collect()
    assert gone() is None


def test_classes_that_cannot_be_hashed_are_known() -> None:
    class Meta(type):
        def __eq__(cls, other: object) -> bool:
            return False

        __hash__ = None

    assert not is_of_python(Meta("Odd", (), {}))
