"""Where classes are from: what a class says of its module is what ran when it was made, or nothing at all."""

from __future__ import annotations

import sys
import types
import weakref
from typing import Any

from te_graph.common.dispatch import is_user_file

HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_IMMUTABLE_TYPE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE: made in C
_MAX_WRAPPERS = 16
_MADE_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType)
_PYTHON = frozenset({*sys.stdlib_module_names, "builtins"})
# By identity: classes need not be hashable, and are not kept. Beside the class the module that it said it is of.
_known: dict[int, tuple[weakref.ref[type], Any, bool]] = {}


def module_of(kind: type) -> str:
    """The name of the module that ``kind`` is of; empty where it only says that it is of Python, or was told to say
    nothing. Metaclasses of Cython tell none."""
    name = kind.__module__
    if not isinstance(name, str):
        return "" if name is None else "builtins"
    return "" if name.partition(".")[0] in _PYTHON and not is_of_python(kind) else name


def is_of_python(kind: type) -> bool:
    """True for classes of Python and its standard library. Others say that they are, too: those that ``exec`` makes in
    an empty namespace, ``type`` on behalf of ``abc``, and ``types.new_class``, and those of a file of the user's that
    has the name of a module of Python's."""
    name = kind.__module__
    if not isinstance(name, str):
        return name is not None
    if name.partition(".")[0] not in _PYTHON:
        return False
    if not kind.__flags__ & HEAP_TYPE:
        return True
    found = _known.get(id(kind))
    if found is None or found[0]() is not kind or found[1] != name:
        key = id(kind)
        found = _known[key] = weakref.ref(kind, lambda _: _known.pop(key, None)), name, _is_made_by_python(kind, name)
    return found[2]


def _is_made_by_python(kind: type, name: str) -> bool:
    """Whether it stands in the module of Python's with this ``name``, or is one of those that stand nowhere: made in C,
    or inside a function of that module. What is in doubt is the user's, and looked into."""
    module = sys.modules.get(name)
    file = vars(module).get("__file__") if isinstance(module, types.ModuleType) else None
    if is_user_file(file or "<frozen>"):
        return False
    found = module
    for part in kind.__qualname__.split("."):
        found = vars(found).get(part) if isinstance(found, types.ModuleType | type) else None
    if found is kind or kind.__flags__ & _IMMUTABLE_TYPE:
        return True
    members = list(vars(kind).values())
    if any(isinstance(member, _MADE_IN_C) and member.__objclass__ is kind for member in members):
        return True
    own = [one for one in members if isinstance(one, types.FunctionType) and _is_written_in(one, kind)]
    return bool(own) and all(_file_of(function) in (file, f"<frozen {name}>") for function in own)


def _file_of(function: types.FunctionType) -> str:
    """Where it was written: decorators of Python's, some put on by dataclasses, stand around code of the user's."""
    for _ in range(_MAX_WRAPPERS):
        inner = vars(function).get("__wrapped__")
        if not isinstance(inner, types.FunctionType):
            break
        function = inner
    return function.__code__.co_filename


def _is_written_in(function: types.FunctionType, kind: type) -> bool:
    """Whether it is a method that was written in the class; enumerations and dataclasses get others, too."""
    return function.__qualname__.rpartition(".")[0] == kind.__qualname__ and function.__module__ == kind.__module__
