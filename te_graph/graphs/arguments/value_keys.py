"""What values that cannot change stand for: a nest of constants, by which they are compared."""

from __future__ import annotations

import datetime
import decimal
import fractions
import pathlib
import uuid
from typing import Any

import torch


def _zone_of(t: datetime.time | datetime.datetime) -> Any:
    """The zone of a time: those of one name may differ, as pytz has one for each offset."""
    zone = t.tzinfo
    return None if zone is None else (type(zone).__module__, type(zone).__name__, str(zone), t.utcoffset(), t.tzname())


def _time_of(t: datetime.time | datetime.datetime) -> tuple:
    return t.hour, t.minute, t.second, t.microsecond, t.fold, _zone_of(t)


# For derived classes, too, where these have no fields of their own.
IMMUTABLE = {
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
    datetime.timezone: lambda z: (z.utcoffset(None), z.tzname(None)),
    uuid.UUID: lambda u: (u.int, u.is_safe),
    pathlib.PosixPath: str,
    pathlib.PurePosixPath: str,
    pathlib.PureWindowsPath: str,
}

_EXACT = frozenset({type(None), bool, int, str, bytes})


def values_are_equal(expected: Any, got: Any) -> bool:
    """Whether two objects of one type, neither of them a container, stand for the same, as their snapshots would tell;
    those that have none, by ``==``. What a derived class adds does not count."""
    kind = type(expected)
    if kind is tuple:
        return type(got) is tuple and len(expected) == len(got) and all(map(values_are_equal, expected, got))
    if kind is not type(got):
        return False
    if kind is float:
        return expected.hex() == got.hex()  # zeros of two signs are not the same, NaN is
    if kind is complex:
        return values_are_equal((expected.real, expected.imag), (got.real, got.imag))
    key = None if kind in _EXACT else next((IMMUTABLE[base] for base in kind.__mro__ if base in IMMUTABLE), None)
    return bool(expected == got) if key is None else values_are_equal(key(expected), key(got))
