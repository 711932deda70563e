"""What code can read of objects without tensors: values that are compared, and containers of nothing else."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import pathlib
import sys
import types
import uuid
from collections.abc import Iterable
from typing import Any

import torch

from te_graph.graphs.arguments.constants import is_constant
from te_graph.graphs.arguments.nest import own_attribute

_IMMUTABLE = (
    range,
    decimal.Decimal,
    fractions.Fraction,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    pathlib.PurePath,
    uuid.UUID,
)
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, tuple, frozenset, slice, torch.dtype, torch.device}
)
MAX_MEMBERS = 1000  # of a dictionary, list or set of values that is compared at each call
_CONTAINERS = (list, dict, collections.OrderedDict, set)


def is_value(obj: Any) -> bool:
    """True for what cannot change and is compared by value: constants, scalars of NumPy, tuples of them, but for those
    that may have attributes besides."""
    if isinstance(obj, tuple | frozenset):
        return holds_values(obj) and not (isinstance(obj, tuple) and type(obj).__dictoffset__)
    if is_constant(obj) or isinstance(obj, _IMMUTABLE):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(obj, numpy.generic)


def may_have_attributes(value: Any) -> bool:
    """Whether a value is of a class that gives it attributes besides: a dictionary of them, or slots."""
    kind = type(value)
    if kind in _PLAIN:
        return False
    return own_attribute(value, "__dict__") is not NotImplemented or any(
        isinstance(member, types.MemberDescriptorType)
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for member in vars(base).values()
    )


def holds_values(members: Iterable[Any]) -> bool:
    """True when there is nothing but values among ``members``; of a million numbers in milliseconds."""
    kinds = set(map(type, members))
    if not any(issubclass(kind, tuple | frozenset) for kind in kinds):
        return all(map(is_value, _one_of_each(members, kinds)))
    return all(map(is_value, members))


def _one_of_each(members: Iterable[Any], kinds: set[type]) -> list[Any]:
    """Whether something is a value is a matter of its type, unless that is a container."""
    found, left = [], set(kinds)
    for member in members:
        if type(member) in left:
            left.discard(type(member))
            found.append(member)
            if not left:
                break
    return found


def is_bulk(obj: Any) -> bool:
    """True for a list, dictionary or set that leads nowhere: of values alone, not of a derived class. The keys of a
    large dictionary are not looked at."""
    if type(obj) not in _CONTAINERS:
        return False
    if not isinstance(obj, dict):
        return holds_values(obj)
    return holds_values(obj.values()) and (len(obj) > MAX_MEMBERS or holds_values(obj))


def are_equal(one: Any, other: Any) -> bool:
    """Whether two values, or containers of values, are of one type and equal; NaN is equal to itself."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    return bool(one == other) or bool(one != one and other != other)
