"""What containers hold that leads on to something that can change, and that no step from the container leads to.

Containers of values alone are compared at once, others item by item. Neither says what code can read of the values
(attributes of members of an enumeration, of texts of a derived class), nor of what is found by its hash: keys of
dictionaries, and members of sets, which are compared by identity.
"""

from __future__ import annotations

import collections
import enum
import itertools
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from te_graph import _C
from te_graph.common.raw_contents import count_of, members_of
from te_graph.graphs.arguments.attributes import may_have_attributes
from te_graph.graphs.guards.plain_values import MAX_MEMBERS, holds_values, is_value
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.tracing.names import user_classes

_Kind = _C.StepKind
CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
_MAX_DEPTH = 16


class _Part(NamedTuple):
    """What containers hold that are sets, or are none."""

    members: Collection[Any]
    is_of_sets: bool


def parts_that_lead_on(source: Source, is_whole: bool = True) -> Iterator[Source]:
    """Of what the container at ``source`` holds, however deep: objects in sets, values with attributes of their own,
    and the classes of other values, each once; of a large one objects in a set alone. The kinds are looked at first:
    there may be a million numbers.

    Args:
        is_whole: the container is compared at once. Otherwise sources of their own lead to what lists and dictionaries
            hold, to other members later, and to keys that are no values.
    """
    if not isinstance(source.obj, CONTAINERS):
        return
    if count_of(source.obj) > MAX_MEMBERS:  # of more, the length is compared
        members = members_of(source.obj) if isinstance(source.obj, set | frozenset) else ()
        yield from (_known(one, source) for one in _objects_among(members))
        return
    found: dict[int, Any] = {}
    parts = list(_parts_of([source.obj], {type(source.obj)}))
    if not (is_whole or isinstance(source.obj, set | frozenset)):
        led_to = parts.pop().members
        without_more = (one for one in _of_kinds(led_to, _kinds_with_more(led_to)) if not may_have_attributes(one))
        found.update((id(type(one)), type(one)) for one in without_more)
        parts = [_Part(_values_among(part.members), part.is_of_sets) for part in parts]
    for _ in range(_MAX_DEPTH):
        inner: list[_Part] = []
        for members, is_of_sets in parts:
            with_more = map(_what_counts, _of_kinds(members, _kinds_with_more(members)))
            found.update((id(one), one) for one in with_more)
            if is_of_sets:
                found.update((id(one), one) for one in _objects_among(members))
            nested = {kind for kind in set(map(type, members)) if issubclass(kind, CONTAINERS)}
            inner += _parts_of(list(_of_kinds(members, nested)), nested)
        parts = inner
    yield from (_known(one, source) for one in found.values())


def _known(member: Any, source: Source) -> Source:
    return source.child(member, f"a member of {source.name}", _Kind.KNOWN)


def _objects_among(members: Collection[Any]) -> Iterator[Any]:
    return iter(()) if holds_values(members) else itertools.filterfalse(is_value, members)


def _kinds_with_more(members: Collection[Any]) -> set[type]:
    """Classes of which code may read more than the value: those of the user's, and enumerations."""
    return {kind for kind in set(map(type, members)) if user_classes(kind) or issubclass(kind, enum.Enum)}


def _of_kinds(objects: Collection[Any], kinds: set[type]) -> Iterator[Any]:
    """Those of ``objects`` whose class is one of ``kinds``, without a statement for each of the others."""
    return itertools.compress(objects, map(kinds.__contains__, map(type, objects))) if kinds else iter(())


def _values_among(keys: Collection[Any]) -> Collection[Any]:
    return keys if holds_values(keys) else list(filter(is_value, keys))


def _parts_of(containers: Collection[Any], kinds: set[type]) -> Iterator[_Part]:
    """What ``containers``, of ``kinds``, hold: members; keys and values of those that are dictionaries, without code of
    a derived class."""
    mappings = {kind for kind in kinds if issubclass(kind, dict)}
    sets = {kind for kind in kinds if issubclass(kind, set | frozenset)}
    for those in filter(None, (sets, kinds - mappings - sets)):
        members = map(members_of, _of_kinds(containers, those))
        yield _Part(list(itertools.chain.from_iterable(members)), those is sets)
    for read in (dict.keys, dict.values) if mappings else ():
        held = map(read, _of_kinds(containers, mappings))
        yield _Part(list(itertools.chain.from_iterable(held)), False)


def _what_counts(member: Any) -> Any:
    return member if may_have_attributes(member) else type(member)
