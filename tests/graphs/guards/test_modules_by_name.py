"""Modules that code finds by a name which a setting holds."""

from __future__ import annotations

import sys
import types

import pytest
from text_cases import Cases, refuses_changes, sees_changes

pytestmark = pytest.mark.usefixtures("repeatable")

_SETUP = (
    "import importlib, pkgutil, sys, types\nm = types.ModuleType('plugin_of_a_test')\nsys.modules[m.__name__] = m\n"
    "exec('GAIN = 2.0\\ndef act(): return GAIN', vars(m))\n"
    "cfg = SimpleNamespace(module=m.__name__, fn='act', path=m.__name__ + '.act', place=m.__name__ + ':act')\n"
    "table = {'module': m.__name__}\n"
    "def locate(path):\n module, _, name = path.rpartition('.')\n"
    " return getattr(importlib.import_module(module), name)\n"
)
_READS = {
    "import_module": "importlib.import_module(cfg.module).act()",
    "import_module of an item": "importlib.import_module(table['module']).act()",
    "__import__": "__import__(cfg.module).act()",
    "sys.modules": "sys.modules[cfg.module].act()",
    "getattr": "getattr(importlib.import_module(cfg.module), cfg.fn)()",
    "a path": "locate(cfg.path)()",
    "pkgutil": "pkgutil.resolve_name(cfg.place)()",
}
_CHANGES = {"a variable": "m.GAIN = 3.0", "a function": "m.act = lambda: 3.0"}

CASES: Cases = {
    f"{change} by {read}": (_SETUP, text, _CHANGES[change]) for read, text in _READS.items() for change in _CHANGES
}


@pytest.fixture(autouse=True)
def _without_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plugin_of_a_test", types.ModuleType("plugin_of_a_test"))


test_graphed_functions_see_them = sees_changes(CASES)
test_callables_refuse_them = refuses_changes(CASES)
