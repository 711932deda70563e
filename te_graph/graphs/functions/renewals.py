"""Objects that a function makes anew at each call and leaves somewhere, where its caller may keep them.

A guard tells that what is there holds the same as at the capture. So a replay may leave it, unless somebody else holds
it, too: who keeps what each call has left (``history.append(trainer.last)``) has other objects of each. Then copies
take their places: of all that hang together, as they were made, so that what was one object is one again.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

from te_graph import _C
from te_graph.common.raw_contents import kind_of
from te_graph.graphs.arguments.attributes import slot_of
from te_graph.graphs.functions.made_objects import (
    can_be_copied,
    has_state,
    is_stateless_alone,
    names_of,
    part,
    parts_of,
    put_part,
    shell_of,
)
from te_graph.graphs.guards.effects.reach import objects_at
from te_graph.graphs.guards.readers.guarded_sources import GuardedSource

_Kind = _C.StepKind
_LOST = (LookupError, AttributeError, ValueError)  # where a part is gone that no guard compares


@dataclass(frozen=True)
class _Place:
    """Where a function leaves what it has made.

    Attributes:
        step: of the guard, to the dictionary, list, cell or object that has it.
        number: of what is left there.
    """

    step: int
    kind: Any
    key: Any
    number: int
    name: str

    def get(self, owner: Any) -> Any:
        if self.kind == _Kind.CELL:
            return owner.cell_contents
        if self.kind == _Kind.ATTRIBUTE:
            return slot_of(type(owner), self.key).__get__(owner)
        return kind_of(owner).__getitem__(owner, self.key)

    def put(self, owner: Any, value: Any) -> None:
        if self.kind == _Kind.CELL:
            owner.cell_contents = value
        elif self.kind == _Kind.ATTRIBUTE:
            slot_of(type(owner), self.key).__set__(owner, value)
        else:
            kind_of(owner).__setitem__(owner, self.key, value)


@dataclass(eq=False)
class _Made:
    """An object that is made at each call.

    Attributes:
        names: of its attributes, of an object that is nothing else.
        references: to it from places and others of these.
        parts: those that are made, too: their keys and numbers.
    """

    kind: type
    can_be_copied: bool
    names: frozenset[str] | None
    references: int
    parts: list[tuple[Any, int]]


@dataclass(frozen=True)
class _Given:
    """What is, or lies in, an argument: at the ``path`` of keys from where a ``step`` of the guard leads."""

    step: int
    path: tuple[Any, ...]


_OF_LIST = next(map(sys.getrefcount, [object()]))  # what is counted where a list alone holds something


class Renewal:
    """Made objects that hang together, and all places where one of them stands.

    Args:
        places: by numbers in ``made`` and, behind these, ``given``.
        made: each after one that refers to it, or at a place.
        given: what they refer to, or what is at places, of the arguments.
    """

    def __init__(self, places: list[_Place], made: list[_Made], given: list[_Given]) -> None:
        self._places, self._made, self._given = places, made, given
        self.steps = [one.step for one in (*places, *given)]
        # At a place where an argument is, the function may have found it.
        self._can_be_copied = all(place.number < len(made) for place in places) and all(
            one.can_be_copied for one in made
        )
        self._counts = [one.references + _OF_LIST for one in made]

    def settle(self, owners: list[Any], found: list[Any]) -> None:
        """See to it that no reference to what the capture left is taken for another holder's. ``found``: what the guard
        gives to each replay, ``owners`` what is at ``steps``."""
        try:
            there, _ = self._there(owners)
        except _LOST:
            return
        self._counts = [
            count + sum(one is obj for one in found) for count, obj in zip(self._counts, there, strict=False)
        ]
        if self._are_held(there):
            gc.collect()  # the capture may be in cycles
        # Something else holds them that the function made, or that outlives it; nothing could put a copy there.
        if self._are_held(there):
            self._can_be_copied = False
            self._counts = [*map(sys.getrefcount, there)][: len(self._made)]

    def renew(self, owners: list[Any], copies: dict[int, Any]) -> str:
        """Put copies at the places if others hold what is there, or it hangs together otherwise; return the name of a
        place if that should be, and cannot. ``owners``: what is at ``steps``; ``copies``: of this replay, by identity.
        """
        try:
            there, is_as_made = self._there(owners)
        except _LOST:
            return self._places[0].name
        if is_as_made and not self._are_held(there):
            return ""
        if not self._can_be_copied:
            return self._places[0].name
        new: list[Any] = [*itertools.repeat(None, len(self._made)), *there[len(self._made) :]]
        for place, owner in zip(self._places, owners, strict=False):
            place.put(owner, self._copy(place.number, there, new))
        copies.update((id(old), one) for old, one in zip(there, new, strict=True))
        return ""

    def _there(self, owners: list[Any]) -> tuple[list[Any], bool]:
        """What stands for each object now, and whether one alone does, with the attributes that it was given."""
        there: list[Any] = [None] * len(self._made)
        for given, root in zip(self._given, owners[len(self._places) :], strict=True):
            there.append(functools.reduce(part, given.path, root))
        is_as_made = True
        for place, owner in zip(self._places, owners, strict=False):
            is_as_made &= _meet(there, place.number, place.get(owner))
        for number, made in enumerate(self._made):
            obj = there[number]
            if type(obj) is not made.kind:
                raise LookupError
            for key, other in made.parts:
                is_as_made &= _meet(there, other, part(obj, key))
            is_as_made &= made.names is None or names_of(obj) == made.names
        return there, is_as_made

    def _are_held(self, there: list[Any]) -> bool:
        """Whether others hold what is ``there``. Of what cannot be copied fewer references than at the capture say that
        it is another object, made since, of which nothing is known."""
        differs = operator.gt if self._can_be_copied else operator.ne
        return any(map(differs, map(sys.getrefcount, there), self._counts))

    def _copy(self, number: int, there: list[Any], new: list[Any]) -> Any:
        if new[number] is not None:
            return new[number]
        obj, made = there[number], self._made[number]
        if isinstance(obj, tuple):
            members = list(obj)
            for key, other in made.parts:
                members[key] = self._copy(other, there, new)
            if new[number] is None:  # else one of them leads here
                new[number] = tuple.__new__(type(obj), members)
            return new[number]
        new[number] = shell_of(obj, made.names)
        for key, other in made.parts:
            put_part(new[number], key, self._copy(other, there, new))
        return new[number]


def _meet(there: list[Any], number: int, obj: Any) -> bool:
    if there[number] is None:
        there[number] = obj
    return there[number] is obj


def objects_of(sources: list[GuardedSource]) -> dict[int, Any]:
    """What is at ``sources``, on the way there, and in what code may change there at present, by identity."""
    parents = (source.parent.obj for source in sources if source.parent is not None)  # dictionaries of attributes
    found = {id(obj): obj for obj in itertools.chain(parents, (obj for _, obj in objects_at(sources)))}
    owners = [obj for obj in found.values() if isinstance(obj, dict | list | deque)]
    return found | {id(one): one for owner in owners for _, one in parts_of(owner) if has_state(one)}


class Positions:
    """At which places among ``sources`` there are objects with a state.

    Args:
        sources: references to the objects are kept until this object goes.
    """

    def __init__(self, sources: list[GuardedSource]) -> None:
        self._known = objects_of(sources)
        self._there = {
            (id(owner.obj), kind, key): obj
            for owner, kind, key, _, obj in itertools.chain.from_iterable(map(places_at, sources))
            if has_state(obj)
        }

    @property
    def known(self) -> dict[int, Any]:
        """``objects_of`` the sources."""
        return self._known

    def moved(self, sources: list[GuardedSource]) -> str:
        """The name of a place at ``sources`` where another of these objects is by now, but for arguments."""
        given = _given_at(sources)
        for owner, kind, key, name, obj in itertools.chain.from_iterable(map(places_at, sources)):
            before = self._there.get((id(owner.obj), kind, key), obj)
            if before is not obj and id(obj) in self._known and id(obj) not in given and has_state(obj):
                return name
        return ""


def renewals(
    known: Container[int], sources: list[GuardedSource], step_of: Callable[[GuardedSource], int]
) -> list[Renewal]:
    """What a run has made, or was given, and left at ``sources``. ``known``: what ``objects_of`` found before it.
    ``step_of`` tells the step of the guard that leads to a source."""
    given = {key: _Given(step_of(source), path) for key, (source, path) in _given_at(sources).items()}
    groups: list[tuple[dict[int, Any], list[tuple[Any, ...]]]] = []  # objects by identity, and their places
    for owner, *place, obj in itertools.chain.from_iterable(map(places_at, sources)):
        if id(owner.obj) not in known or owner.is_ephemeral:
            continue
        reached = _reached(obj, known, given)
        # Where both are sources the guard compares them.
        if not reached and (id(obj) not in given or (owner.value is None and not given[id(obj)].path)):
            continue
        places = [(step_of(owner), *place, obj)]
        apart = []
        for others, theirs in groups:
            if reached.keys().isdisjoint(others):
                apart.append((others, theirs))
            else:
                reached, places = others | reached, theirs + places
        groups = [*apart, (reached, places)]
    return [_renewal(reached, places, given) for reached, places in groups]


def _given_at(sources: list[GuardedSource]) -> dict[int, tuple[GuardedSource, tuple[Any, ...]]]:
    """Of what has a state and is among the arguments, by identity, where."""
    found: dict[int, tuple[GuardedSource, tuple[Any, ...]]] = {}
    for source in sources:
        stack = [(source.obj, ())] if source.is_ephemeral and not source.is_end else []
        while stack:
            obj, path = stack.pop()
            if id(obj) not in found and has_state(obj):
                found[id(obj)] = source, path
                if source.value is not None:  # else its parts are sources
                    stack += ((one, (*path, key)) for key, one in parts_of(obj))
    return found


def _renewal(reached: dict[int, Any], places: list[tuple[Any, ...]], given: dict[int, _Given]) -> Renewal:
    parts = [[(key, id(one)) for key, one in parts_of(obj)] for obj in reached.values()]
    met = itertools.chain((id(obj) for *_, obj in places), (other for row in parts for _, other in row))
    uses = [other for other in met if other in reached or other in given]
    numbers = {key: number for number, key in enumerate(dict.fromkeys((*reached, *uses)))}
    references = Counter(uses)
    made = [
        _Made(
            kind=type(obj),
            can_be_copied=can_be_copied(obj),
            names=names_of(obj),
            references=references[key],
            parts=[(name, numbers[other]) for name, other in row if other in numbers],
        )
        for (key, obj), row in zip(reached.items(), parts, strict=True)
    ]
    at = [_Place(step, kind, key, numbers[id(obj)], name) for step, kind, key, name, obj in places]
    return Renewal(at, made, [given[key] for key in numbers if key not in reached])


def places_at(source: GuardedSource) -> Iterator[tuple[GuardedSource, Any, Any, str, Any]]:
    """Where code can put something else: the owner, kind, key and name of ``source``, and of members of a container
    that is compared as a whole, and what is there."""
    if _is_place(source):
        key = source.index if source.kind == _Kind.POSITION else source.key
        yield source.parent, source.kind, key, source.name, source.obj
    if source.value is not None and isinstance(source.obj, list | dict | deque):
        kind = _Kind.ITEM if isinstance(source.obj, dict) else _Kind.POSITION
        yield from ((source, kind, key, source.name, one) for key, one in parts_of(source.obj))


def _is_place(source: GuardedSource) -> bool:
    if source.parent is None:
        return False
    owner, kind = source.parent.obj, source.kind
    if kind == _Kind.ATTRIBUTE:
        return slot_of(type(owner), source.key) is not None
    kinds = {_Kind.ITEM: dict, _Kind.POSITION: list, _Kind.CELL: types.CellType}
    return kind in kinds and isinstance(owner, kinds[kind])


def _reached(obj: Any, known: Container[int], given: Container[int]) -> dict[int, Any]:
    """What has a state, is not ``known`` from before and is reached from ``obj``, by identity."""
    found: dict[int, Any] = {}
    stack = [obj]
    while stack:
        one = stack.pop()
        if id(one) not in known and id(one) not in found and has_state(one):
            found[id(one)] = one
            stack += (other for _, other in parts_of(one))
    while idle := [key for key, one in found.items() if is_stateless_alone(one) and not _leads_to(one, found, given)]:
        for key in idle:
            del found[key]
    return found


def _leads_to(obj: Any, *among: Container[int]) -> bool:
    return any(id(one) in objects for _, one in parts_of(obj) for objects in among)
