"""What classes of the user's hold themselves, for all instances, and code can read of them."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Set
from typing import Any

from te_graph.common.class_origins import HEAP_TYPE
from te_graph.graphs.guards.plain_values import is_bulk, is_value
from te_graph.graphs.guards.readers.lookups import is_of_project
from te_graph.graphs.guards.readers.memos import is_for_messages
from te_graph.graphs.guards.readers.user_classes import bases_of
from te_graph.graphs.tracing.names import SLOTS
from te_graph.graphs.tracing.python_names import is_pythons

_WRAPPERS = (property, staticmethod, classmethod, functools.cached_property, functools.partialmethod)
_METHODS = (types.FunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, *SLOTS, *_WRAPPERS)


def said_in(kind: type, said: Set[str]) -> Iterator[tuple[str, Any]]:
    """What the class itself holds, not one below it, and the code names, which has ``said`` these names."""
    # What was made in C lets nobody change what it holds.
    for key, value in vars(kind).items() if kind.__flags__ & HEAP_TYPE else ():
        if key in said and not is_pythons(key) and not is_for_messages(kind, key):
            yield key, value


def class_values(kind: type, said: Set[str]) -> dict[str, Any]:
    """Constants that the class itself holds, not one below it, and that the code names."""
    return {key: value for key, value in said_in(kind, said) if is_value(value) or is_bulk(value)}


def class_objects(kind: type, said: Set[str]) -> dict[str, Any]:
    """Tensors, containers and objects of the user's that the class itself holds, and that the code names."""
    values = class_values(kind, said)
    return {key: value for key, value in said_in(kind, said) if key not in values and _holds_more(value)}


def objects_behind(member: Any) -> Iterator[Any]:
    """What a property, method or the like of a class calls and gives to that, but for functions."""
    if isinstance(member, _WRAPPERS):
        for name in ("fget", "fset", "__func__", "func", "args", "keywords"):
            part = getattr(member, name, None)
            if not (part is None or isinstance(part, types.FunctionType)):
                yield part


def _holds_more(obj: Any) -> bool:
    """True for tensors, modules, containers, other objects, and classes of the project (settings, as a rule); not for
    methods and the like, nor for other classes."""
    if isinstance(obj, type):
        return is_of_project(obj)
    return not isinstance(obj, _METHODS) or bool(bases_of(type(obj)))
