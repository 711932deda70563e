"""What code can read of objects without tensors: values that are compared, and containers of nothing else."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import sys
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from te_graph.common.raw_contents import members_of
from te_graph.graphs.arguments.attributes import instance_dict, may_have_attributes
from te_graph.graphs.arguments.constants import is_constant
from te_graph.graphs.guards.values import value_of

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
MAX_MEMBERS = 1000  # of a dictionary, list or set of values that is compared at each call
_MAX_NESTED = 24  # snapshots go down to 32
_CONTAINERS = (list, dict, collections.OrderedDict, set)


def is_value(obj: Any) -> bool:
    """True for what cannot change and is compared by value: constants, scalars of NumPy, tuples of them. Not so tuples
    that may have attributes besides, or whose members may: code can read those of the member that is there later."""
    if isinstance(obj, tuple):
        return holds_values(members_of(obj), _is_value_alone) and not type(obj).__dictoffset__
    if isinstance(obj, frozenset):
        return holds_values(members_of(obj))
    if is_constant(obj) or issubclass(type(obj), _IMMUTABLE):  # isinstance may ask the object
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(obj, numpy.generic)


def _is_value_alone(obj: Any) -> bool:
    """True for a value that nothing but members of enumerations, each of which is one object, can be told from."""
    return is_value(obj) and (isinstance(obj, enum.Enum) or not type(obj).__dictoffset__)


def holds_values(members: Iterable[Any], is_one: Callable[[Any], bool] = is_value) -> bool:
    """True when there is nothing but values among ``members``, as ``is_one`` tells; of a million numbers in
    milliseconds."""
    kinds = set(map(type, members))
    if not any(issubclass(kind, tuple | frozenset) for kind in kinds):
        return all(map(is_one, _one_of_each(members, kinds)))
    return all(map(is_one, members))


def has_snapshot(value: Any, depth: int = 0) -> bool:
    """Whether a guard can compare ``value`` with what it was, in whatever container. Not so where a derived class has
    fields or attributes of its own, or a tuple is nested too deep."""
    if isinstance(value, tuple | frozenset):
        is_plain = depth < _MAX_NESTED and not may_have_attributes(value)
        return is_plain and holds_values(members_of(value), functools.partial(has_snapshot, depth=depth + 1))
    is_plain = isinstance(value, enum.Enum) or not type(value).__dictoffset__
    return is_plain and value_of((value,)) is not None


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
    """True for a list, dictionary or set that leads nowhere: of values alone, not of a derived class, and without
    attributes. The keys of a large dictionary are not looked at."""
    if type(obj) not in _CONTAINERS or instance_dict(obj):
        return False
    if not isinstance(obj, dict):
        return holds_values(obj)
    return holds_values(obj.values()) and (len(obj) > MAX_MEMBERS or holds_values(obj))


def is_compared_whole(obj: Any) -> bool:
    """True for a container of values alone that a guard compares at once: by its members, or its length if these are
    too many."""
    if not is_bulk(obj) or len(obj) > MAX_MEMBERS:
        return is_bulk(obj)
    return all(holds_values(part, has_snapshot) for part in ((obj, obj.values()) if isinstance(obj, dict) else (obj,)))


def are_equal(one: Any, other: Any) -> bool:
    """Whether two values, or containers of values, are of one type and equal; NaN is equal to itself."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    return bool(one == other) or bool(one != one and other != other)
