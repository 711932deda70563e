"""An imitation of installed packages that keep tensors for later calls, each in a way of its own."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8

_TABLES = """
import collections, contextvars, functools, itertools, queue, threading, types, weakref
import torch

scale = 1.0

def make(n):
    return torch.linspace(1.0, 2.0, n) * scale

{text}
"""
_OPS = """
import {package}
import {package}.tables as tables
from {package} import tables as T
from {package}.tables import *

def weighed(x, n):
    return x * {call}
"""


@dataclass(frozen=True)
class Layout:
    """How a package keeps tensors.

    Attributes:
        text: defines it.
        call: an expression that gives the tensor of length ``n``.
        clear: a statement that forgets all tensors; empty where there is none.
        forgets: others push a tensor out, or are compared as well.
    """

    text: str
    call: str = "T.get(n)"
    clear: str = ""
    forgets: bool = False


_DICT = "    if n not in {0}:\n        {0}[n] = make(n)\n    return {0}[n]"


def _of_dict(store: str, where: str = "", head: str = "def get(n):") -> str:
    return f"{where}\n{head}\n{_DICT.format(store)}"


LAYOUTS = {
    "dictionary of the module": Layout(_of_dict("_kept", "_kept = {}"), clear="T._kept.clear()"),
    "keys with devices": Layout(
        "_kept = {}\ndef get(n, device=torch.device('cpu')):\n    key = (n, 128, device)\n"
        "    if key not in _kept:\n        _kept[key] = make(n)\n    return _kept[key]",
        clear="T._kept = {}",
    ),
    "nested dictionaries": Layout(
        "_kept = {}\ndef get(n):\n    inner = _kept.setdefault('cpu', {})\n" + _DICT.format("inner"),
        clear="T._kept.pop('cpu', None)",
    ),
    "ordered, with a size": Layout(
        "_kept = collections.OrderedDict()\ndef get(n):\n    if n not in _kept:\n        _kept[n] = make(n)\n"
        "        while len(_kept) > 3: _kept.popitem(last=False)\n    _kept.move_to_end(n)\n    return _kept[n]",
        clear="T._kept.clear()",
        forgets=True,
    ),
    "variable of the module": Layout(
        "_kept = None\ndef get(n):\n    global _kept\n    if _kept is None or len(_kept) != n:\n"
        "        _kept = make(n)\n    return _kept",
        clear="T._kept = None",
        forgets=True,
    ),
    "dictionary of a class": Layout(
        _of_dict("cls.kept", "class Rotary:\n    kept = {}\n    @classmethod", "    def get(cls, n):")
        .replace("\n    if", "\n        if")
        .replace("\n    return", "\n        return")
        .replace("\n        cls", "\n            cls"),
        call="T.Rotary.get(n)",
        clear="T.Rotary.kept.clear()",
    ),
    "attribute of a class": Layout(
        "class Rotary:\n    kept = None\n    @classmethod\n    def get(cls, n):\n"
        "        if cls.kept is None or len(cls.kept) != n:\n            cls.kept = make(n)\n        return cls.kept",
        call="tables.Rotary.get(n)",
        clear="T.Rotary.kept = None",
        forgets=True,
    ),
    "class without a method that runs": Layout(
        "class Tables:\n    kept = {n: make(n) for n in range(2, 12)}",
        call="T.Tables.kept[n]",
        clear="T.Tables.kept = {n: T.make(n) for n in range(2, 12)}",
    ),
    "static method": Layout(
        "class Rotary:\n    kept = {}\n    @staticmethod\n    def get(n):\n        if n not in Rotary.kept:\n"
        "            Rotary.kept[n] = make(n)\n        return Rotary.kept[n]",
        call="T.Rotary.get(n)",
        clear="T.Rotary.kept = {}",
    ),
    "object of the module": Layout(
        "class Store:\n    def __init__(self): self.kept = {}\n    def get(self, n):\n        if n not in self.kept:\n"
        "            self.kept[n] = make(n)\n        return self.kept[n]\nstore = Store()",
        call="T.store.get(n)",
        clear="T.store = T.Store()",
    ),
    "object with slots": Layout(
        "class Store:\n    __slots__ = ('kept',)\n    def __init__(self): self.kept = None\n    def get(self, n):\n"
        "        if self.kept is None or len(self.kept) != n: self.kept = make(n)\n        return self.kept\n"
        "store = Store()",
        call="T.store.get(n)",
        clear="T.store.kept = None",
        forgets=True,
    ),
    "object in a closure": Layout(
        "class Store:\n    def __init__(self): self.kept = {}\ndef getter():\n    store = Store()\n    def get(n):\n"
        "        if n not in store.kept: store.kept[n] = make(n)\n        return store.kept[n]\n"
        "    get.clear = lambda: store.kept.clear()\n    return get\nget = getter()",
        call="get(n)",
        clear="T.get.clear()",
    ),
    "decorator": Layout(
        "def kept(function):\n    found = {}\n    @functools.wraps(function)\n    def wrapped(n):\n"
        "        if n not in found: found[n] = function(n)\n        return found[n]\n    wrapped.clear = found.clear\n"
        "    return wrapped\n@kept\ndef get(n): return make(n)",
        clear="T.get.clear()",
    ),
    "decorator that is a class": Layout(
        "class kept:\n    def __init__(self, function): self.function, self.found = function, {}\n"
        "    def __call__(self, n):\n        if n not in self.found: self.found[n] = self.function(n)\n"
        "        return self.found[n]\n@kept\ndef get(n): return make(n)",
        clear="T.get.found.clear()",
    ),
    "attribute of a function": Layout(
        "def get(n):\n    if not hasattr(get, 'kept'): get.kept = {}\n    if n not in get.kept: get.kept[n] = make(n)\n"
        "    return get.kept[n]",
        call="get(n)",
        clear="T.get.kept = {}",
    ),
    "default of an argument": Layout(
        "def get(n, kept={}):\n    if n not in kept: kept[n] = make(n)\n    return kept[n]",
        clear="T.get.__defaults__[0].clear()",
    ),
    "functools.cache": Layout("@functools.cache\ndef get(n): return make(n)", clear="T.get.cache_clear()"),
    "lru_cache with a size": Layout(
        "@functools.lru_cache(maxsize=3)\ndef get(n): return make(n)",
        call="get(n)",
        clear="T.get.cache_clear()",
        forgets=True,
    ),
    "lru_cache by keyword": Layout(
        "@functools.lru_cache\ndef get(n, *, dtype=None): return make(n).to(dtype)",
        call="T.get(n, dtype=torch.float32)",
        clear="T.get.cache_clear()",
    ),
    "lru_cache by type": Layout(
        "@functools.lru_cache(None, typed=True)\ndef get(n, device): return make(n)",
        call="T.get(n, x.device)",
        clear="T.get.cache_clear()",
    ),
    "lru_cache of two": Layout(
        "@functools.lru_cache(maxsize=4)\ndef pair(n): return make(n).cos(), make(n).sin()\n"
        "def get(n):\n    cos, sin = pair(n)\n    return cos + sin",
        clear="T.pair.cache_clear()",
        forgets=True,
    ),
    "lru_cache of dictionaries": Layout(
        "@functools.cache\ndef both(n): return {'cos': make(n).cos(), 'size': n}\ndef get(n): return both(n)['cos']",
        clear="T.both.cache_clear()",
    ),
    "variables of a thread": Layout(
        "kept = threading.local()\ndef get(n):\n    if not hasattr(kept, 't') or len(kept.t) != n: kept.t = make(n)\n"
        "    return kept.t",
        clear="del T.kept.t",
        forgets=True,
    ),
    "cached_property": Layout(
        "class Tables:\n    def __init__(self, n): self.n = n\n    @functools.cached_property\n"
        "    def table(self): return make(self.n)\nkept = {n: Tables(n) for n in range(2, 12)}",
        call="T.kept[n].table",
        clear="vars(T.kept[8]).pop('table', None)",
        forgets=True,
    ),
}
# What nobody can name: objects of Python's library are not looked into, nor are keys with objects.
HIDDEN = {
    "stack": Layout("kept = queue.LifoQueue()\nkept.put(make(8))\ndef get(n): return kept.queue[-1]"),
    "queue": Layout("kept = queue.Queue()\nkept.put(make(8))\ndef get(n): return kept.queue[0]"),
    "lru_cache of a method": Layout(
        "class Store:\n    @functools.lru_cache(maxsize=None)\n    def get(self, n): return make(n)\nstore = Store()",
        call="T.store.get(n)",
        clear="T.Store.get.cache_clear()",
    ),
}


@contextlib.contextmanager
def installed(layout: Layout, folder: Path, package: str) -> Iterator[ModuleType]:
    """The package, as if it had been installed, for as long as this is open: modules ``tables`` and ``ops``."""
    place = folder / "site-packages"
    (place / package).mkdir(parents=True, exist_ok=True)
    (place / package / "__init__.py").write_text("")
    (place / package / "tables.py").write_text(_TABLES.format(text=layout.text))
    (place / package / "ops.py").write_text(_OPS.format(package=package, call=layout.call))
    sys.path.insert(0, str(place))
    try:
        importlib.invalidate_caches()
        importlib.import_module(f"{package}.ops")
        yield sys.modules[package]
    finally:
        sys.path.remove(str(place))
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]


class Weighed(nn.Module):
    """A layer that calls the package."""

    def __init__(self, package: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weighed = package.ops.weighed

    def forward(self, x: Tensor) -> Tensor:  # [n, WIDTH] -> [n, WIDTH]
        return self.weighed(self.linear(x), x.shape[-1]) + 1.0


def batch() -> Tensor:  # [3, WIDTH]
    return torch.randn(3, WIDTH, requires_grad=True)
