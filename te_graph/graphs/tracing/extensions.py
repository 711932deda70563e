"""Functions of extension modules, which take the memory of tensors without a dispatcher that could be watched."""

from __future__ import annotations

import functools
import sys
import types
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any

from te_graph.common.dispatch import is_user_file
from te_graph.graphs.arguments.nest import own_attribute

_KNOWN = frozenset({"numpy", "torch", "te_graph", *sys.stdlib_module_names})


def is_of_extension(function: Any) -> bool:
    """True for functions and classes of extension modules other than those of torch, te_graph, NumPy and Python."""
    module = own_attribute(function, "__self__")
    if not isinstance(module, types.ModuleType):
        module = own_attribute(function, "__module__")
    if isinstance(module, types.ModuleType):
        return _is_extension(module.__name__, getattr(module, "__file__", None))
    if not isinstance(module, str) or module.partition(".")[0] in _KNOWN:
        return False
    return _is_extension(module, getattr(sys.modules.get(module), "__file__", None))


@functools.lru_cache(maxsize=4096)
def _is_extension(name: str, file: str | None) -> bool:
    if name.partition(".")[0] in _KNOWN or file is None:
        return False
    return file.endswith(tuple(EXTENSION_SUFFIXES)) and is_user_file(file)
