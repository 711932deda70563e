"""Objects of the user's classes inside containers that are compared by value: code may read what their classes add."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Iterator
from typing import Any

from te_graph import _C
from te_graph.common.raw_contents import count_of, members_of
from te_graph.graphs.arguments.attributes import may_have_attributes
from te_graph.graphs.guards.plain_values import MAX_MEMBERS
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.tracing.names import user_classes

_Kind = _C.StepKind
_CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_MAX_DEPTH = 16


def members_of_users(source: Source, is_whole: bool = True) -> Iterator[Source]:
    """Of what the container at ``source`` holds, however deep: objects with attributes of their own (members of an
    enumeration, texts of a derived class), and the classes of the others, each once. The kinds are looked at first:
    there may be a million numbers.

    Args:
        is_whole: the container is compared at once. Otherwise sources of their own lead to what lists and dictionaries
            hold, to other members later, but not to keys.
    """
    if not isinstance(source.obj, _CONTAINERS) or count_of(source.obj) > MAX_MEMBERS:  # of more, the length is compared
        return
    found: dict[int, Any] = {}
    parts: list[Collection[Any]] = list(_parts_of([source.obj], {type(source.obj)}))
    if not (is_whole or isinstance(source.obj, set | frozenset)):
        led_to = parts.pop()
        theirs = {kind for kind in set(map(type, led_to)) if user_classes(kind)}
        found.update((id(type(one)), type(one)) for one in _of_kinds(led_to, theirs) if not may_have_attributes(one))
    for _ in range(_MAX_DEPTH):
        inner: list[Collection[Any]] = []
        for part in parts:
            kinds = set(map(type, part))
            theirs = {kind for kind in kinds if user_classes(kind)}
            found.update((id(one), one) for one in map(_what_counts, _of_kinds(part, theirs)))
            containers = {kind for kind in kinds if issubclass(kind, _CONTAINERS)}
            inner += _parts_of(part if containers == kinds else list(_of_kinds(part, containers)), containers)
        parts = inner
    yield from (source.child(member, f"a member of {source.name}", _Kind.KNOWN) for member in found.values())


def _of_kinds(objects: Collection[Any], kinds: set[type]) -> Iterator[Any]:
    """Those of ``objects`` whose class is one of ``kinds``, without a statement for each of the others."""
    return itertools.compress(objects, map(kinds.__contains__, map(type, objects))) if kinds else iter(())


def _parts_of(containers: Collection[Any], kinds: set[type]) -> Iterator[Collection[Any]]:
    """What ``containers``, of ``kinds``, hold: members; keys and values of those that are dictionaries, without code of
    a derived class."""
    mappings = {kind for kind in kinds if issubclass(kind, dict)}
    if kinds > mappings:
        yield list(itertools.chain.from_iterable(map(members_of, _of_kinds(containers, kinds - mappings))))
    for read in (dict.keys, dict.values) if mappings else ():
        yield list(itertools.chain.from_iterable(map(read, _of_kinds(containers, mappings))))


def _what_counts(member: Any) -> Any:
    return member if may_have_attributes(member) else type(member)
