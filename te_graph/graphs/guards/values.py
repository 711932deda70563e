"""Which objects of Python's and NumPy's are compared by what they stand for."""

from __future__ import annotations

import collections
import decimal
import functools
import random
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

from te_graph import _C
from te_graph.common.raw_contents import members_of
from te_graph.graphs.arguments.value_keys import IMMUTABLE

try:
    import numpy as np
except ImportError:  # then no object of it exists
    np = None


def _times_key(values: Any) -> Any:
    """Of an array of dates or times, which alone does not show its memory."""
    if values.dtype.kind not in "mM":
        return None
    return values.dtype.str, values.view(np.int64)


_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_MUTABLE = {
    collections.deque: lambda d: (d.maxlen, tuple(members_of(d))),
    random.Random: lambda r: (r.getstate(), vars(r)),  # and what was put on it
    decimal.Context: repr,
}


class _Inside(threading.local):
    """Whether a snapshot is taken of what a container holds."""

    is_set = False


_inside = _Inside()


def _unless_inside(key: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``key``, but for members of containers that may have attributes: from the snapshot of a container nothing leads
    to those of the member that is there later. So lists have none, and sets and keys find such members by identity."""

    def key_of(obj: Any) -> Any:
        return None if _inside.is_set and type(obj).__dictoffset__ else key(obj)

    return key_of


_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def bytes_of(values: Any) -> bytes:
    """The memory of an array."""
    if np is not None and isinstance(values, np.ndarray):
        values = np.asarray(values)  # without what a derived class makes of it
    return values.tobytes() if hasattr(values, "tobytes") else bytes(values)


def _is_scalar_type(kind: type) -> bool:
    return issubclass(kind, np.generic) and not issubclass(kind, np.void | np.object_)


def _register() -> None:
    for kind, key in IMMUTABLE.items():
        _C.register_value_type(kind, _unless_inside(key), is_mutable=False)
    for kind, key in _MUTABLE.items():
        _C.register_value_type(kind, key, is_mutable=True)
    if np is None:
        return
    _C.register_value_type(np.ndarray, _times_key, is_mutable=True)
    for kind in {kind for kind in np.sctypeDict.values() if _is_scalar_type(kind)}:
        _C.register_value_type(kind, lambda scalar: (scalar.dtype.str, scalar.tobytes()), is_mutable=False)


@functools.cache
def _register_generators(numpy_random: types.ModuleType) -> None:
    _C.register_value_type(numpy_random.Generator, lambda g: repr(g.bit_generator.state), is_mutable=True)
    _C.register_value_type(numpy_random.RandomState, lambda state: repr(state.get_state()), is_mutable=True)
    for kind in (getattr(numpy_random, name) for name in _BIT_GENERATORS if hasattr(numpy_random, name)):
        _C.register_value_type(kind, lambda bits: repr(bits.state), is_mutable=True)


_register()


def value_of(obj: Any) -> _C.Value | None:
    """A snapshot of ``obj`` if it is made of constants, however nested; else None."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:  # NumPy loads it when it is first asked for
        _register_generators(numpy_random)
    return _snapshot(_C.value_of, obj) if isinstance(obj, _CONTAINERS) else _C.value_of(obj)


def keys_of(obj: dict) -> _C.Value | None:
    """A snapshot of the keys of a dictionary."""
    return _snapshot(_C.keys_of, obj)


def _snapshot(take: Callable[[Any], _C.Value | None], container: Any) -> _C.Value | None:
    before, _inside.is_set = _inside.is_set, True
    try:
        return take(container)
    finally:
        _inside.is_set = before
