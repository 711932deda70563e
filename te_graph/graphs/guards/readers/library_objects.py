"""What objects of Python's library and of NumPy hold that code can read, but for lists, tuples, sets, dictionaries."""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import gc
import io
import mmap
import random
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

from torch._library.custom_ops import CustomOpDef

from te_graph import _C
from te_graph.common.raw_contents import members_of
from te_graph.graphs.guards.plain_values import has_snapshot, holds_values
from te_graph.graphs.guards.readers.aliases import behind_alias, is_alias
from te_graph.graphs.guards.readers.guarded_sources import VIEWS, is_filled
from te_graph.graphs.guards.readers.metaclasses import member_of
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.guards.values import bytes_of, np

_Kind = _C.StepKind
_ARRAYS = (bytearray, memoryview, array.array, mmap.mmap, *(() if np is None else (np.ndarray,)))
_CTYPES = ctypes._SimpleCData.__base__
_OF_CUSTOM_OPS = ("_backward_fn", "_setup_context_fn")  # which torch calls; calls of the op itself are seen
_INNER = {
    collections.UserDict: "data",
    collections.UserList: "data",
    collections.UserString: "data",
    collections.ChainMap: "maps",
    weakref.WeakKeyDictionary: "data",
    weakref.WeakValueDictionary: "data",
    weakref.WeakSet: "data",
}


def is_array(obj: Any) -> bool:
    """True for what holds nothing but values and can change: arrays of numbers, and queues of values."""
    if isinstance(obj, collections.deque):
        return type(obj) is collections.deque and holds_values(obj) and holds_values(obj, has_snapshot)
    return isinstance(obj, (*_ARRAYS, _CTYPES))


def remembered(obj: Any) -> Any:
    """What tells whether the array ``obj`` changes; of one that is too large to be compared, nothing."""
    return _C.value_of(obj) and (tuple(obj) if isinstance(obj, collections.deque) else bytes_of(obj))


def is_generator(obj: Any) -> bool:
    """True for generators of random numbers of Python and NumPy with a state of their own; those of the process are no
    one's."""
    if isinstance(obj, random.Random):
        return not isinstance(obj, random.SystemRandom) and obj is not random._inst
    numpy = sys.modules.get("numpy.random")
    kinds = () if numpy is None else (numpy.Generator, numpy.RandomState, numpy.BitGenerator)
    return isinstance(obj, kinds) and obj is not numpy.mtrand._rand


def is_iterator(obj: Any) -> bool:
    """True for what gives one item after the other and is then used up; files are not meant."""
    step = member_of(type(obj), "__next__")
    return not (
        step is None or isinstance(step, types.FunctionType) or isinstance(obj, (io.IOBase, *weakref.ProxyTypes))
    )


def inside(source: Source) -> Iterator[Source]:
    """What the object at ``source`` leads to, if it is one of those that are known here."""
    obj, name = source.obj, source.name
    if isinstance(obj, collections.deque):
        if not is_array(obj):
            for index, value in enumerate(members_of(obj)):
                yield source.child(value, f"{name}[{index}]", _Kind.ELEMENT, index=index)
    elif isinstance(obj, VIEWS):
        yield source.child(gc.get_referents(obj)[0], name, _Kind.REFERENT)
    elif isinstance(obj, weakref.ref):
        yield source.child(weakref.ref.__call__(obj), name, _Kind.WEAK_REFERENCE)
        if isinstance(obj, weakref.WeakMethod):  # of a new object at each call
            yield source.child(obj._func_ref, name, _Kind.ATTRIBUTE, "_func_ref")
    elif isinstance(obj, weakref.ProxyTypes):
        if hasattr(obj, "__dict__"):
            yield source.child(obj.__dict__, name, _Kind.ATTRIBUTE, "__dict__")
        yield source.child(obj.__class__, f"class of {name}", _Kind.ATTRIBUTE, "__class__")
    elif is_alias(obj):
        yield from behind_alias(source)
    elif isinstance(obj, types.CellType):
        if is_filled(obj, "cell_contents"):
            yield source.child(obj.cell_contents, f"contents of {name}", _Kind.CELL)
    elif isinstance(obj, contextvars.ContextVar):
        yield source.child(_value_of(obj), f"value of {name}", _Kind.CONTEXT_VAR)
    elif isinstance(obj, types.BuiltinFunctionType | types.MethodWrapperType):
        if not isinstance(obj.__self__, types.ModuleType | type | None):
            yield source.child(obj.__self__, f"object of {name}", _Kind.ATTRIBUTE, "__self__")
    elif isinstance(obj, CustomOpDef):
        members = source.attributes()
        yield from (members.item(key, f"{key.strip('_')} of {name}") for key in _OF_CUSTOM_OPS)
    elif issubclass(type(obj), tuple(_INNER)):  # some of these would ask the object for its class
        key = next(key for kind, key in _INNER.items() if issubclass(type(obj), kind))
        yield source.attributes().item(key, name)
    elif type(obj) is threading.local:
        members = source.attributes()
        yield from (members.item(key, f"{name}.{key}") for key in list(members.obj))


def _value_of(variable: contextvars.ContextVar) -> Any:
    try:
        return variable.get()
    except LookupError:
        return NotImplemented  # as guards have it
