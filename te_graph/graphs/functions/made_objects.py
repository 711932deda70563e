"""Objects that a function makes anew at each call: what they hold, and copies of them."""

from __future__ import annotations

import array
import copy
import functools
import gc
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from te_graph.common.class_origins import HEAP_TYPE
from te_graph.common.raw_contents import items_of, kind_of, members_of
from te_graph.graphs.arguments.attributes import attributes_of, instance_dict, slot_of
from te_graph.graphs.guards.plain_values import is_value
from te_graph.graphs.guards.readers.guarded_sources import VIEWS, is_transparent
from te_graph.graphs.guards.values import np, value_of

_CONTAINERS = (list, dict, set, tuple, deque, OrderedDict, defaultdict)
_ARRAYS = (bytearray, array.array)
_STATELESS = (tuple, functools.partial, types.FunctionType, types.MethodType, *VIEWS)  # what they refer to may have one
_REFERENT = "referent"  # the key of what a view shows
_REFERENCES = {
    functools.partial: ("func", "args", "keywords"),
    types.FunctionType: ("__defaults__", "__kwdefaults__"),
    types.MethodType: ("__func__", "__self__"),
    types.CellType: ("cell_contents",),
}


def has_state(obj: Any) -> bool:
    """Whether code may change ``obj``, or what it refers to, where a guard takes another object for the same."""
    if is_value(obj) or isinstance(obj, Tensor | nn.Module | type):
        return False
    return is_transparent(obj) or ((value := value_of(obj)) is not None and value.is_mutable)


def is_stateless_alone(obj: Any) -> bool:
    """Whether ``obj`` has a state only where something that it refers to has one."""
    return isinstance(obj, _STATELESS)


def can_be_copied(obj: Any) -> bool:
    """Whether ``copy_of`` knows how: containers of Python's own, named tuples, arrays, and objects that are nothing but
    their attributes."""
    kind = type(obj)
    if kind in _CONTAINERS or kind in _ARRAYS or _is_named_tuple(kind):
        return True
    if np is not None and kind is np.ndarray:
        return obj.flags.owndata
    return _is_plain(kind) and kind_of(obj) is None


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and not kind.__dictoffset__


def _is_plain(kind: type) -> bool:
    return kind.__new__ is object.__new__ and bool(kind.__flags__ & HEAP_TYPE)


def names_of(obj: Any) -> frozenset[str] | None:
    """Of an object that is nothing but its attributes, their names."""
    return frozenset(attributes_of(obj)) if _is_plain(type(obj)) and kind_of(obj) is None else None


def parts_of(obj: Any) -> Iterator[tuple[Any, Any]]:
    """What ``obj`` refers to, by key, number or name."""
    kind = type(obj)
    if isinstance(obj, dict):
        yield from items_of(obj)
    elif isinstance(obj, list | tuple | deque):
        yield from enumerate(members_of(obj))
    elif kind in _REFERENCES:
        if kind is types.FunctionType:
            yield from enumerate(obj.__closure__ or ())
        for name in _REFERENCES[kind]:
            try:
                yield name, getattr(obj, name)
            except ValueError:  # of an empty cell
                continue
    elif kind in VIEWS:
        yield _REFERENT, _shown_by(obj)
    elif _is_plain(kind):
        yield from attributes_of(obj).items()


def objects_in(obj: Any) -> dict[int, Any]:
    """``obj`` and what it refers to, as far as that has a state, by identity."""
    found: dict[int, Any] = {}
    stack = [obj]
    while stack:
        one = stack.pop()
        if id(one) not in found and has_state(one):
            found[id(one)] = one
            stack += (other for _, other in parts_of(one))
    return found


def behind(obj: Any) -> list[Any]:
    """What others may hold of ``obj`` without a reference to it: its dictionary, and whose memory it shows."""
    found = [members for members in (instance_dict(obj),) if members is not None]
    owner = obj
    while (owner := _memory_of(owner)) is not None:
        found.append(owner)
    return found


def _memory_of(obj: Any) -> Any:
    if np is not None and isinstance(obj, np.ndarray):
        return obj.base
    return obj.obj if isinstance(obj, memoryview) else None


def _shown_by(view: Any) -> Any:
    """The mapping behind it, as the guard's step finds it."""
    return gc.get_referents(view)[0]


def part(obj: Any, key: Any) -> Any:
    """What ``parts_of`` gives by this key."""
    if (container := kind_of(obj)) is not None:
        return container.__getitem__(obj, key)
    if type(obj) in _REFERENCES:
        return obj.__closure__[key] if isinstance(key, int) else getattr(obj, key)
    if type(obj) in VIEWS:
        return _shown_by(obj)
    slot = slot_of(type(obj), key)
    return instance_dict(obj)[key] if slot is None else slot.__get__(obj)


def shell_of(obj: Any, names: frozenset[str] | None) -> Any:
    """A copy of ``obj``, which is no tuple, with the same parts; of its attributes those called ``names``."""
    if names is None:
        return copy.copy(obj)
    new = object.__new__(type(obj))
    for name, value in attributes_of(obj).items():
        if name in names:
            put_part(new, name, value)
    return new


def put_part(obj: Any, key: Any, value: Any) -> None:
    """Let a copy that ``shell_of`` made refer to ``value``."""
    if kind_of(obj) is not None:
        obj[key] = value
    elif (slot := slot_of(type(obj), key)) is not None:
        slot.__set__(obj, value)
    else:
        instance_dict(obj)[key] = value
