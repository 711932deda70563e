"""How many attributes there are, for code that goes through them: those that come later have no name in it."""

from __future__ import annotations

import functools
import gc
import inspect
import threading
import types
from collections.abc import Iterable
from typing import TypeVar

from torch import nn

from te_graph import _C
from te_graph.common.dispatch import is_user_file
from te_graph.graphs.guards.readers.lookups import is_project_module
from te_graph.graphs.guards.sources import Source, name_of
from te_graph.graphs.tracing.names import user_classes

_Kind = _C.StepKind
_OF_LIBRARIES = (nn.Module, functools.partial, BaseException, threading.local)
_OF_HANDLES = ("te_graph", "forward")  # te_graph adds its handle to a module, and keeps the forward of its own there
_OF_COPIES = ("__slotnames__",)  # copy and pickle keep it in a class when they first meet an object of it
_AnySource = TypeVar("_AnySource", bound=Source)


def number_of_attributes(source: _AnySource, ignored: Iterable[str] = ()) -> _AnySource | None:
    """What a guard compares to see that a module, function or class of the user gets no more attributes: those that are
    there it compares one by one. None for other objects, tensors among them, which torch.compile marks by attributes.

    Args:
        source: where the object stands.
        ignored: names that do not count.
    """
    obj, name = source.obj, name_of("number of attributes", source.name)
    if isinstance(obj, type):
        return _number_of_members(source, name) if user_classes(obj)[:1] == [obj] else None
    if isinstance(obj, types.FunctionType | functools._lru_cache_wrapper):
        code = getattr(inspect.unwrap(obj), "__code__", None)
        is_counted = code is not None and is_user_file(code.co_filename)
    elif isinstance(obj, types.ModuleType):
        is_counted = is_project_module(obj)
    else:
        is_counted = isinstance(obj, _OF_LIBRARIES)
    members = source.attributes() if is_counted else None
    if members is None:
        return None
    uncounted = {*ignored, *_OF_HANDLES}
    return members.child(
        members.obj, name, _Kind.LENGTH, tuple(sorted(uncounted)), index=len(members.obj.keys() - uncounted)
    )


def _number_of_members(source: _AnySource, name: str) -> _AnySource:
    kind, members = source.obj, gc.get_referents(source.obj)[0]
    if not isinstance(members, dict):  # a metaclass of its own comes first: what copies add counts
        return source.child(kind, name, _Kind.LENGTH, index=len(vars(kind)))
    inside = source.child(members, source.name, _Kind.REFERENT, distance=0)
    # None: what is put back into containers must not be put into this one, past the class.
    return inside.child(None, name, _Kind.LENGTH, _OF_COPIES, index=len(members.keys() - set(_OF_COPIES)))
