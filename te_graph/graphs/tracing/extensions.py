"""Functions of extension modules, which take the memory of tensors without a dispatcher that could be watched, and read
attributes of objects that no code names."""

from __future__ import annotations

import functools
import sys
import types
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any

from torch import Tensor, nn

from te_graph.common.dispatch import is_user_file
from te_graph.graphs.arguments.attributes import instance_dict, own_attribute
from te_graph.graphs.tracing.names import file_of_module, user_classes

_MAX_OBJECTS = 1000
_KNOWN = frozenset({"numpy", "torch", "te_graph", *sys.stdlib_module_names})


def is_of_extension(function: Any) -> bool:
    """True for functions and classes of extension modules other than those of torch, te_graph, NumPy and Python."""
    module = own_attribute(function, "__self__")
    if not isinstance(module, types.ModuleType):
        module = own_attribute(function, "__module__")
    if isinstance(module, types.ModuleType):
        # Those of torch that stand for modules answer any other look by one of their own.
        return _is_extension(vars(module).get("__name__", ""), file_of_module(module))
    if not isinstance(module, str) or module.partition(".")[0] in _KNOWN:
        return False
    return _is_extension(module, file_of_module(sys.modules.get(module)))


def is_method_of_extension(function: Any) -> bool:
    """True for methods that classes of such modules have."""
    owner = own_attribute(function, "__objclass__")
    if isinstance(function, types.BuiltinFunctionType):
        owner = type(function.__self__)
    module = owner.__module__ if isinstance(owner, type) else None
    return isinstance(module, str) and _is_extension(module, file_of_module(sys.modules.get(module)))


def classes_given(given: Any) -> set[type]:
    """Of ``given`` and what its attributes lead to, through containers: the classes that the user wrote, but for
    modules and tensors."""
    found: set[type] = set()
    met: dict[int, Any] = {}
    queue = [given]
    while queue and len(met) < _MAX_OBJECTS:
        obj = queue.pop()
        if id(obj) in met or isinstance(obj, nn.Module | Tensor | type):
            continue
        met[id(obj)] = obj
        if isinstance(obj, dict):
            queue.extend(dict.values(obj))
        elif isinstance(obj, list | tuple | set | frozenset):
            queue.extend(obj)
        elif user_classes(type(obj)):
            found.add(type(obj))
            queue.extend((instance_dict(obj) or {}).values())
    return found


@functools.lru_cache(maxsize=4096)
def _is_extension(name: str, file: str | None) -> bool:
    if name.partition(".")[0] in _KNOWN or file is None:
        return False
    return file.endswith(tuple(EXTENSION_SUFFIXES)) and is_user_file(file)
