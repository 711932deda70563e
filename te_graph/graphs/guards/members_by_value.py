"""Objects of the user's classes inside containers that are compared by value: code may read what their classes add."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from te_graph import _C
from te_graph.graphs.arguments.nest import instance_dict
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.tracing.names import user_classes

_Kind = _C.StepKind
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_MAX_DEPTH = 16


def members_of_users(source: Source) -> Iterator[Source]:
    """Of what the container at ``source`` holds, however deep: objects with attributes of their own (members of an
    enumeration, texts of a derived class), and the classes of the others, each once. The kinds are looked at first:
    there may be a million numbers."""
    if not isinstance(source.obj, _CONTAINERS):
        return
    found: dict[int, Any] = {}
    level = _items(source.obj)
    for _ in range(_MAX_DEPTH):
        kinds = set(map(type, level))
        theirs = {kind for kind in kinds if user_classes(kind)}
        if theirs:
            members = (member for member in level if type(member) in theirs)
            found.update((id(one), one) for one in map(_what_counts, members))
        inner = tuple(kind for kind in kinds if issubclass(kind, _CONTAINERS))
        if not inner:
            break
        level = list(itertools.chain.from_iterable(_items(member) for member in level if isinstance(member, inner)))
    yield from (source.child(member, f"a member of {source.name}", _Kind.KNOWN) for member in found.values())


def _items(container: Iterable[Any]) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _what_counts(member: Any) -> Any:
    return type(member) if instance_dict(member) is None else member
