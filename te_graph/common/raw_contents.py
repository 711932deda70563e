"""What containers hold, read and written without code of the classes that are derived from Python's.

An ``__iter__``, ``__len__`` or ``__setitem__`` of the user's may leave members out, make others up, count its calls, or
never end; and what it gives cannot be put back.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

_KINDS = (list, tuple, OrderedDict, dict, set, frozenset, deque)


def kind_of(container: Any) -> type | None:
    """The class of Python's own that ``container`` is of, or that its class is derived from; None for others."""
    kind = type(container)
    return kind if kind in _KINDS else next((one for one in _KINDS if issubclass(kind, one)), None)


def members_of(container: Any) -> Collection[Any]:
    """The members of a list, tuple, set or deque in its order, the keys of a dictionary: itself, where its class is
    Python's own."""
    kind = kind_of(container)
    return container if kind is type(container) else list(kind.__iter__(container))


def items_of(dictionary: dict) -> Iterable[tuple[Any, Any]]:
    """Its items, in its order, none of which a derived class loads at a look."""
    return kind_of(dictionary).items(dictionary)


def count_of(container: Any) -> int:
    """How many members or items there are."""
    return kind_of(container).__len__(container)


def put_back(container: list | set | deque | dict, members: list[Any], values: Sequence[Any] = ()) -> None:
    """Let ``container`` hold ``members`` alone, in their order; if it is a dictionary, as keys of ``values``."""
    kind = kind_of(container)
    kind.clear(container)
    if issubclass(kind, dict):
        for key, value in zip(members, values, strict=True):  # OrderedDict.update() would call code of a derived class
            kind.__setitem__(container, key, value)
    elif kind is set:
        set.update(container, members)
    else:
        kind.extend(container, members)
