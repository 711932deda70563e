"""How the guard of a callable sees what leads to no tensor that is used: values, containers, other objects."""

from __future__ import annotations

import weakref
from collections import deque

from torch import Tensor, nn

from te_graph import _C
from te_graph.common.raw_contents import count_of, items_of
from te_graph.graphs.guards.callable_guard import CallableGuard
from te_graph.graphs.guards.plain_values import MAX_MEMBERS, is_compared_whole, is_value
from te_graph.graphs.guards.pure_hooks import ComputedInGraph, computed_by_hooks
from te_graph.graphs.guards.readers.library_objects import is_array, is_generator, is_iterator
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.guards.values import keys_of, value_of
from te_graph.graphs.tracing.names import Names

_Kind = _C.StepKind
_AGAINST_ARRAY = (
    " that is too large to be compared at each call, or holds objects: make it a tensor, or list the attribute in "
    "ignore_attributes= to freeze it"
)
_AGAINST_GENERATOR = (
    ", a generator of a derived class, whose state cannot be compared at each call, and the callable may see or set "
    "it: use random.Random itself, or draw with torch"
)
_GUARDED_ELSEWHERE = (nn.Module, weakref.ref, ComputedInGraph)


def guard_source(source: Source, callable_guard: CallableGuard, names: Names, tells_apart: bool) -> None:
    """Guard what stands at a source that leads to no tensor that is used.

    Args:
        names: that the code says.
        tells_apart: the code can tell which tensor is there.
    """
    obj = source.obj
    if isinstance(obj, Tensor) and tells_apart:
        callable_guard.enter(source)
    elif isinstance(obj, Tensor) and _is_computed_before(source):
        callable_guard.expect_type(source)
    elif isinstance(obj, Tensor):
        callable_guard.expect_form(source)
    elif is_value(obj):
        if source.kind != _Kind.KNOWN:  # a known one stays what it is
            callable_guard.expect_value(source)
    elif source.again is not None:
        callable_guard.expect_again(source)
    elif isinstance(obj, list | tuple | dict | set):
        _guard_container(source, callable_guard, names.puts_items)
    elif is_array(obj):
        _guard_contents(source, callable_guard, _AGAINST_ARRAY)
    elif isinstance(obj, deque):
        callable_guard.enter(source.child(obj, f"length of {source.name}", _Kind.LENGTH, index=count_of(obj)))
    elif is_generator(obj) and names.handles_generators:
        _guard_contents(source, callable_guard, _AGAINST_GENERATOR)
    elif is_iterator(obj):
        raise RuntimeError(
            f"{source.name} is a {type(obj).__name__}, which the callable may advance, and a replay would not: use a "
            "list, or list the attribute in ignore_attributes= to freeze it"
        )
    elif not (isinstance(obj, _GUARDED_ELSEWHERE) or source.kind == _Kind.KNOWN):
        callable_guard.enter(source)


def _is_computed_before(source: Source) -> bool:
    """Whether hooks of a module compute what is there, before each call of it."""
    owner = source.parent.parent.obj if source.parent.kind == _Kind.INSTANCE_DICT else None
    return isinstance(owner, nn.Module) and any(one.name == source.key for one in computed_by_hooks(owner))


def _guard_contents(source: Source, callable_guard: CallableGuard, reason_against: str) -> None:
    """Guard what is there by its value; ``reason_against`` that where it has none."""
    value = value_of(source.obj)
    if value is None:
        raise RuntimeError(f"{source.name} is a {type(source.obj).__name__}{reason_against}")
    callable_guard.expect_contents(source, value)


def _guard_container(source: Source, callable_guard: CallableGuard, puts_items: bool) -> None:
    """Its members stand at sources of their own; here it is about how many there are, and about values in bulk."""
    obj, name = source.obj, source.name
    if isinstance(obj, set):
        if count_of(obj) <= MAX_MEMBERS and (contents := value_of(obj)) is not None:
            callable_guard.expect_contents(source, contents)
        else:
            callable_guard.enter(source.child(obj, f"length of {name}", _Kind.LENGTH, index=count_of(obj)))
    elif is_compared_whole(obj) and count_of(obj) <= MAX_MEMBERS:
        callable_guard.expect_value(source.child(obj, name, _Kind.CONTENTS))
    elif isinstance(obj, list | tuple):
        callable_guard.enter(source.child(obj, f"length of {name}", _Kind.LENGTH, index=count_of(obj)))
    elif isinstance(obj, dict) and (
        # What code puts tensors into may be a cache, which grows whenever other code runs.
        source.kind == _Kind.INSTANCE_DICT or not (puts_items and _holds_tensors(obj))
    ):
        guard_keys(source, callable_guard)


def guard_keys(source: Source, callable_guard: CallableGuard) -> None:
    """Guard which keys the dictionary at ``source`` has, or how many where they are too many."""
    obj, name = source.obj, source.name
    is_few = count_of(obj) <= MAX_MEMBERS and all(map(is_value, dict.keys(obj)))
    if is_few:
        keys = tuple(key for key, _ in items_of(obj))
        callable_guard.enter(source.child(obj, f"keys of {name}", _Kind.KEYS, keys, index=count_of(obj)))
    elif count_of(obj) <= MAX_MEMBERS:
        callable_guard.expect_contents(source.child(obj, name, _Kind.CONTENTS), keys_of(obj))
    else:
        callable_guard.enter(source.child(obj, f"keys of {name}", _Kind.LENGTH, index=count_of(obj)))


def _holds_tensors(dictionary: dict) -> bool:
    return any(issubclass(kind, Tensor) for kind in set(map(type, dict.values(dictionary))))
