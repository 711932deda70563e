"""Which objects of Python's and NumPy's are compared by what they stand for."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import functools
import pathlib
import random
import sys
import types
import uuid
from typing import Any

import torch

from te_graph import _C

try:
    import numpy as np
except ImportError:  # then no object of it exists
    np = None


def _zone_of(zone: datetime.tzinfo | None) -> Any:
    return (type(zone).__name__, str(zone)) if zone is not None else None


def _time_of(t: datetime.time | datetime.datetime) -> tuple:
    return t.hour, t.minute, t.second, t.microsecond, t.fold, _zone_of(t.tzinfo)


def _times_key(values: Any) -> Any:
    """Of an array of dates or times, which alone does not show its memory."""
    if values.dtype.kind not in "mM":
        return None
    return values.dtype.str, values.view(np.int64)


# For derived classes, too, where these have no fields of their own.
_IMMUTABLE = {
    str: str.__str__,
    bytes: lambda b: b"".join((b,)),
    int: int.__int__,
    float: float.__float__,
    complex: complex.__pos__,
    slice: lambda s: (s.start, s.stop, s.step),
    range: lambda r: (r.start, r.stop, r.step),
    torch.Size: tuple,
    decimal.Decimal: lambda d: tuple(d.as_tuple()),
    fractions.Fraction: lambda f: (f.numerator, f.denominator),
    datetime.timedelta: lambda d: (d.days, d.seconds, d.microseconds),
    datetime.date: lambda d: d.toordinal(),
    datetime.datetime: lambda d: (d.toordinal(), *_time_of(d)),
    datetime.time: _time_of,
    datetime.timezone: str,
    uuid.UUID: lambda u: u.int,
    pathlib.PosixPath: str,
    pathlib.PurePosixPath: str,
    pathlib.PureWindowsPath: str,
}
_MUTABLE = {
    collections.deque: lambda d: (d.maxlen, tuple(d)),
    random.Random: lambda r: r.getstate(),
    decimal.Context: repr,
}


_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")


def bytes_of(values: Any) -> bytes:
    """The memory of an array."""
    if np is not None and isinstance(values, np.ndarray):
        values = np.asarray(values)  # without what a derived class makes of it
    return values.tobytes() if hasattr(values, "tobytes") else bytes(values)


def _is_scalar_type(kind: type) -> bool:
    return issubclass(kind, np.generic) and not issubclass(kind, np.void | np.object_)


def _register() -> None:
    for kind, key in _IMMUTABLE.items():
        _C.register_value_type(kind, key, is_mutable=False)
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
    return _C.value_of(obj)
