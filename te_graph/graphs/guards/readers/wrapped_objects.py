"""What functions and objects of Python and torch hold for the user: decorators, transforms, context managers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from te_graph import _C
from te_graph.common.class_origins import is_of_python
from te_graph.common.dispatch import PACKAGE, is_user_file
from te_graph.common.raw_contents import count_of, members_of
from te_graph.graphs.arguments.attributes import in_slot, instance_dict
from te_graph.graphs.guards.plain_values import MAX_MEMBERS
from te_graph.graphs.guards.readers.guarded_sources import WRAPPERS, is_filled, name_of_slot, slots_of
from te_graph.graphs.guards.readers.user_classes import bases_of, function_behind
from te_graph.graphs.guards.sources import Source, contents

_Kind = _C.StepKind
_MAX_DEPTH = 6  # of wrappers around wrappers
_MEMOS = (dict, list, weakref.WeakKeyDictionary, weakref.WeakValueDictionary)  # what comes and goes
_CONTEXTS = (contextlib._GeneratorContextManagerBase, contextlib.nullcontext, contextlib.closing, contextlib.aclosing)
_PARTS = {
    **WRAPPERS,
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinFunctionType: ("__self__",),
    functools.partial: ("func", "args", "keywords"),
}


def held_by_function(source: Source) -> Iterator[Source]:
    """Of the function of a library at ``source``, which may be a wrapper: what its variables hold of the user's."""
    if is_wrapper(source.obj):
        cells = itertools.takewhile(lambda child: child.kind == _Kind.CELL, contents(source))
        held = (child for child in cells if not isinstance(child.obj, _MEMOS))
        yield from (child for child in held if holds_users(child.obj))


def is_wrapper(function: Any) -> bool:
    """True for functions of Python and torch that were made inside others, and refer to what these were given."""
    if not (isinstance(function, types.FunctionType) and function.__closure__):
        return False
    return not is_user_file(file := function.__code__.co_filename) and not file.startswith(PACKAGE)


def wrappers_in(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Such functions among what the class itself has, by name."""
    for name, member in list(vars(kind).items()):
        if is_wrapper(function := function_behind(member)):
            yield name, function


def held_by_object(source: Source) -> Iterator[Source]:
    """What the object of Python's library at ``source`` holds of the user's."""
    members = source.attributes()
    is_given = isinstance(source.obj, _CONTEXTS)  # all, but a generator: each use makes another one
    for key, value in list(members.obj.items()) if members is not None else ():
        is_held = not isinstance(value, Iterator) if is_given else not isinstance(value, _MEMOS) and holds_users(value)
        if isinstance(key, str) and is_held:
            yield members.item(key, f"{source.name}.{key}")
    for key in slots_of(type(source.obj)):
        if is_filled(source.obj, key) and holds_users(value := in_slot(source.obj, key)):
            yield source.child(value, name_of_slot(source, key), _Kind.ATTRIBUTE, key)
    kind = next((kind for kind in WRAPPERS if isinstance(source.obj, kind)), None)
    for key in WRAPPERS.get(kind, ()):
        if (value := getattr(source.obj, key)) is not None:
            yield source.child(value, source.name, _Kind.ATTRIBUTE, key)


def holds_users(obj: Any, depth: int = 0) -> bool:
    """Whether ``obj`` is the user's or a tensor, or leads to such a thing as wrappers and tuples do. What Python and
    torch hold else is their own, and changes as it may."""
    if depth == _MAX_DEPTH:
        return False
    if isinstance(obj, (Tensor, nn.Module, *_CONTEXTS)):
        return True
    if isinstance(obj, types.FunctionType):
        return is_user_file(obj.__code__.co_filename) or (is_wrapper(obj) and _any_of(_variables(obj), depth))
    if isinstance(obj, type):
        return bool(bases_of(obj))
    for kind, parts in _PARTS.items():
        if isinstance(obj, kind):
            return _any_of((getattr(obj, part) for part in parts), depth)
    if isinstance(obj, list | tuple | dict):
        members = dict.values(obj) if isinstance(obj, dict) else members_of(obj)
        return count_of(obj) <= MAX_MEMBERS and _any_of(members, depth)
    kind = type(obj)
    if not is_of_python(kind):
        return bool(bases_of(kind))
    members = None if isinstance(obj, types.ModuleType) else instance_dict(obj)
    slots = (in_slot(obj, key) for key in slots_of(kind))
    return _any_of(itertools.chain((members or {}).values(), slots), depth)


def _any_of(objects: Any, depth: int) -> bool:
    return any(holds_users(one, depth + 1) for one in list(objects))


def _variables(function: types.FunctionType) -> Iterator[Any]:
    return (cell.cell_contents for cell in function.__closure__ if is_filled(cell, "cell_contents"))
