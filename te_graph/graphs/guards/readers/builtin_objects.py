"""What containers and other objects of Python's own hold, as the guards of functions compare them."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import gc
import io
import types
import weakref
from collections.abc import Iterator
from typing import Any

from te_graph import _C
from te_graph.common.raw_contents import items_of, members_of
from te_graph.graphs.guards.readers.aliases import is_alias
from te_graph.graphs.guards.readers.guarded_sources import VIEWS, WRAPPERS, GuardedSource, is_opaque
from te_graph.graphs.guards.readers.library_objects import inside
from te_graph.graphs.guards.readers.metaclasses import has_member
from te_graph.graphs.guards.sources import contents
from te_graph.graphs.guards.values import value_of
from te_graph.graphs.tracing.names import GETTERS

_Kind = _C.StepKind
# What they lead to is the same for callables and functions.
_LEAD_ON = (types.BuiltinFunctionType, types.MethodWrapperType, contextvars.ContextVar, weakref.ref)


def builtin_contents(source: GuardedSource) -> Iterator[GuardedSource]:
    """What containers and the like hold, which are classes of Python's own, or derived from them."""
    obj, name = source.obj, source.name
    if isinstance(obj, types.MethodType):
        yield source.child(obj.__self__, name or "self", _Kind.ATTRIBUTE, "__self__")
        yield source.child(obj.__func__, name, _Kind.ATTRIBUTE, "__func__")
    elif is_alias(obj) or isinstance(obj, (*_LEAD_ON, *VIEWS)):
        yield from inside(source)
    elif isinstance(obj, dict):
        for key, value in items_of(obj):
            if value_of(key) is not None:
                yield source.child(value, f"{name}[{key!r}]", _Kind.ITEM, key)
        if isinstance(obj, collections.defaultdict):
            yield source.child(obj.default_factory, f"default of {name}", _Kind.ATTRIBUTE, "default_factory")
    elif isinstance(obj, list | tuple | functools.partial):
        yield from contents(source)
    elif isinstance(obj, collections.deque):
        for index, value in enumerate(members_of(obj)):
            yield source.child(value, f"{name}[{index}]", _Kind.ELEMENT, index=index)
    elif isinstance(obj, tuple(WRAPPERS)):
        for key in next(keys for kind, keys in WRAPPERS.items() if isinstance(obj, kind)):
            if (function := getattr(obj, key)) is not None:
                yield source.child(function, name, _Kind.ATTRIBUTE, key)
    elif isinstance(obj, GETTERS):
        held = [part for part in gc.get_referents(obj) if isinstance(part, tuple | dict)]
        yield from (source.child(part, f"arguments of {name}", _Kind.KNOWN) for part in held)
    elif isinstance(obj, functools.cached_property | functools._lru_cache_wrapper):
        key = "func" if isinstance(obj, functools.cached_property) else "__wrapped__"
        yield source.attributes().item(key, name)
    elif isinstance(obj, set | frozenset):
        if value_of(obj) is None:
            yield source.never(f"{name} is a set of objects without weak references, which cannot be compared")
    elif _shows_memory(obj):
        yield source.never(f"{name} is a {type(obj).__name__} that is too large to be compared, or holds objects")
    elif (
        has_member(type(obj), "__next__")
        and is_opaque(obj)
        and not isinstance(obj, io.IOBase)
        and not _is_spare(source)
    ):
        yield source.never(f"{name} is a {type(obj).__name__}, which comparing would use up: pass a list")


def _is_spare(source: GuardedSource) -> bool:
    """True for the generator of a context manager that decorates functions: each call makes another one."""
    return source.key == "gen" and isinstance(source.parent.parent.obj, contextlib.ContextDecorator)


def _shows_memory(obj: Any) -> bool:
    """True for arrays and the like; their elements are compared where that is possible."""
    try:
        memoryview(obj).release()
    except (TypeError, ValueError, BufferError):
        return False
    return True
