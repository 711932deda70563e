"""How many attributes there are, for code that goes through them: those that come later have no name in it."""

from __future__ import annotations

import functools
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
_OF_LIBRARIES = (nn.Module, functools.partial, BaseException)
_OF_HANDLES = ("te_graph", "forward")  # te_graph adds its handle to a module, and keeps the forward of its own there
_Any = TypeVar("_Any", bound=Source)


def number_of_attributes(source: _Any, ignored: Iterable[str] = ()) -> _Any | None:
    """What the guard compares of the modules, functions and classes of users: with those that are there compared one by
    one, that none is added. None for other objects; torch.compile marks tensors by attributes.

    Args:
        source: where the object stands.
        ignored: names that do not count.
    """
    obj, name = source.obj, name_of("number of attributes", source.name)
    if isinstance(obj, type):
        return source.child(obj, name, _Kind.LENGTH, index=len(vars(obj))) if user_classes(obj)[:1] == [obj] else None
    if isinstance(obj, types.FunctionType):
        is_told = is_user_file(obj.__code__.co_filename)
    elif isinstance(obj, types.ModuleType):
        is_told = is_project_module(obj)
    else:
        is_told = isinstance(obj, _OF_LIBRARIES)
    members = source.attributes() if is_told else None
    if members is None:
        return None
    uncounted = {*ignored, *_OF_HANDLES}
    return members.child(
        members.obj, name, _Kind.LENGTH, tuple(sorted(uncounted)), index=len(members.obj.keys() - uncounted)
    )
