"""Objects that a function makes anew at each call and leaves somewhere, where its caller may keep them.

A guard tells that what is there holds the same as at the capture. So a replay may leave it, unless somebody else holds
it, too: who keeps what each call has left (``history.append(trainer.last)``) has other objects of each. Then copies
take their places: of all that hang together, as they were made, so that what was one object is one again. What they
refer to besides was there before: where no guard compares which object that is, it is the one that is there now.
"""

from __future__ import annotations

import gc
import itertools
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from te_graph.graphs.functions.made_objects import (
    behind,
    can_be_copied,
    has_state,
    is_stateless_alone,
    names_of,
    part,
    parts_of,
    put_part,
    shell_of,
)
from te_graph.graphs.functions.places import LeftPlace, PathFrom, way_to
from te_graph.graphs.functions.spots import Spot, SpotsBefore, spots
from te_graph.graphs.guards.readers.guarded_sources import GuardedSource

_LOST = (LookupError, AttributeError, ValueError)  # where a part is gone that no guard compares


@dataclass(eq=False)
class _Made:
    """An object that is made at each call.

    Attributes:
        names: of its attributes, of an object that is nothing else.
        references: to it from places and others of these.
        parts: keys and numbers of those that are made, too, or were there before.
    """

    kind: type
    can_be_copied: bool
    names: frozenset[str] | None
    references: int
    parts: list[tuple[Any, int]]


_OF_LIST = next(map(sys.getrefcount, [object()]))  # what is counted where a list alone holds something


class Renewal:
    """Made objects that hang together, and all places where one of them stands.

    Args:
        places: by numbers in ``made`` and, behind these, ``found``.
        made: each after one that refers to it, or at a place.
        found: what was there before and they refer to, or what is at places: all ways to each.
        takes_out: each call changes, or returns, what stood there, so that others who hold it have to see that.

    Attributes:
        steps: of the guard, to what replays need.
    """

    def __init__(
        self, places: list[LeftPlace], made: list[_Made], found: list[list[PathFrom]], takes_out: bool
    ) -> None:
        self._places, self._made, self._found = places, made, found
        ways = [*(way for place in places for way in place.ways), *itertools.chain.from_iterable(found)]
        self.steps = [way.step for way in ways]
        # At a place of what was there before, the function may as well have found it.
        self._can_be_copied = (
            not takes_out
            and all(place.number < len(made) and place.access is not None for place in places)
            and all(one.can_be_copied for one in made)
        )
        self._counts = [one.references + _OF_LIST for one in made]
        self._counts_behind: list[list[int]] = []

    def settle(self, roots: list[Any], found: list[Any]) -> None:
        """See to it that no reference to what the capture left is taken for another holder's. ``found``: what the guard
        gives to each replay, ``roots`` what is at ``steps``."""
        try:
            there, _ = self._there(roots)
        except _LOST:
            return
        listed = [*found, *roots]
        self._counts = [
            count + sum(one is obj for one in listed) for count, obj in zip(self._counts, there, strict=False)
        ]
        del listed
        self._counts_behind = self._references_behind(there)
        if self._are_held(there):
            gc.collect()  # the capture may be in cycles
        # Something else holds them that the function made, or that outlives it; nothing could put a copy there.
        if self._are_held(there):
            self._can_be_copied = False
            self._counts = [*map(sys.getrefcount, there)][: len(self._made)]
        self._counts_behind = self._references_behind(there)

    def renew(self, roots: list[Any]) -> tuple[str, bool]:
        """Put copies at the places if others hold what is there, or it hangs together otherwise; return the name of a
        place if that should be, and cannot, and whether there are copies now. ``roots``: what is at ``steps``."""
        try:
            there, is_as_made = self._there(roots)
        except _LOST:
            return self._places[0].name, False
        if is_as_made and not self._are_held(there):
            return "", False
        if not self._can_be_copied:
            return self._places[0].name, False
        new: list[Any] = [*itertools.repeat(None, len(self._made)), *there[len(self._made) :]]
        for place, at in self._at_places(roots):
            place.put(self._copy(place.number, there, new), *at)
        return "", True

    def _at_places(self, roots: list[Any]) -> Iterator[tuple[LeftPlace, list[Any]]]:
        """Each place, and where its ways end."""
        following = iter(roots)
        return ((place, [way.end(next(following)) for way in place.ways]) for place in self._places)

    def _there(self, roots: list[Any]) -> tuple[list[Any], bool]:
        """What stands for each object now, and whether one alone does, with the attributes that it was given.

        Raises:
            LookupError: the ways to what was found lead to several objects, of which the function takes one.
        """
        there: list[Any] = [None] * len(self._made)
        start = sum(len(place.ways) for place in self._places)
        for ways in self._found:
            first, *others = map(PathFrom.end, ways, roots[start : start + len(ways)])
            if any(one is not first for one in others):
                raise LookupError
            there.append(first)
            start += len(ways)
        is_as_made = True
        for place, at in self._at_places(roots):
            is_as_made &= _meet(there, place.number, place.get(*at))
        for number, made in enumerate(self._made):
            obj = there[number]
            if type(obj) is not made.kind:
                raise LookupError
            for key, other in made.parts:
                is_as_made &= _meet(there, other, part(obj, key))
            is_as_made &= made.names is None or names_of(obj) == made.names
        return there, is_as_made

    def _are_held(self, there: list[Any]) -> bool:
        """Whether others hold what is ``there``, or what stands behind it. Of what cannot be copied fewer references
        than at the capture say that it is another object, made since, of which nothing is known."""
        differs = operator.gt if self._can_be_copied else operator.ne
        if any(map(differs, map(sys.getrefcount, there), self._counts)):
            return True
        now = itertools.chain.from_iterable(self._references_behind(there))
        then = itertools.chain.from_iterable(self._counts_behind)
        return any(count > before for count, before in itertools.zip_longest(now, then, fillvalue=0))

    def _references_behind(self, there: list[Any]) -> list[list[int]]:
        """To what stands behind each object."""
        return [[*map(sys.getrefcount, behind(one))] for one in itertools.islice(there, len(self._made))]

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


def renewals(
    before: SpotsBefore, sources: list[GuardedSource], step_of: Callable[[GuardedSource], int], takes_out: bool
) -> list[Renewal]:
    """What a run has made, or found, and left at ``sources``. ``before``: what was where. ``step_of`` tells the step of
    the guard that leads to a source. ``takes_out``: the run has changed, or returned, what stood there before."""
    return _Left(before, [spot for spot in spots(sources) if has_state(spot.obj)], takes_out).renewals(step_of)


class _Left:
    """What stands at ``spots`` after a run."""

    def __init__(self, before: SpotsBefore, spots: list[Spot], takes_out: bool) -> None:
        self._before = before
        self._takes_out = takes_out
        self._known = before.known
        self._spots = self._one_of_each(spots)
        self._steady = before.steady(spots)
        self._in_values = {id(spot.obj) for spot in spots if spot.is_compared_by_value}

    def _one_of_each(self, spots: list[Spot]) -> list[Spot]:
        """One spot for each place, to whose owner the way leads before a call, if there is one."""
        found: dict[tuple[int, Any, Any], Spot] = {}
        for spot in spots:
            place = id(spot.above.obj), spot.kind, spot.key
            if place not in found or not self._is_owner_there(found[place]):
                found[place] = spot
        return list(found.values())

    def _is_owner_there(self, spot: Spot) -> bool:
        return self._before.at(spot.above) is spot.above.obj

    def renewals(self, step_of: Callable[[GuardedSource], int]) -> list[Renewal]:
        groups: list[tuple[dict[int, Any], list[Spot]]] = []  # objects by identity, and their places
        for spot in self._spots:
            if id(spot.above.obj) not in self._known:
                continue
            reached = self._reached(spot.obj)
            if not reached and not self._may_be_another(spot):
                continue
            places = [spot]
            apart = []
            for others, theirs in groups:
                if reached.keys().isdisjoint(others):
                    apart.append((others, theirs))
                else:
                    reached, places = others | reached, theirs + places
            groups = [*apart, (reached, places)]
        return [self._renewal(reached, places, step_of) for reached, places in groups]

    def _may_be_another(self, spot: Spot) -> bool:
        """Whether what was there before is at ``spot`` and elsewhere, and no guard tells that it is one object."""
        first = next(iter(self._steady.get(id(spot.obj), ())), spot)
        return first is not spot and bool(first.path or spot.path)

    def _reached(self, obj: Any) -> dict[int, Any]:
        """What has a state, was not there before and is reached from ``obj``, by identity."""
        found: dict[int, Any] = {}
        stack = [obj]
        while stack:
            one = stack.pop()
            if id(one) not in self._known and id(one) not in found and has_state(one):
                found[id(one)] = one
                stack += (other for _, other in parts_of(one))
        while idle := [key for key, one in found.items() if is_stateless_alone(one) and not self._links(one, found)]:
            for key in idle:
                del found[key]
        return found

    def _links(self, obj: Any, reached: dict[int, Any]) -> list[tuple[Any, int]]:
        """The keys and identities of those parts of a made object that are made, too, or were there before and could
        become others without a guard that sees it."""
        return [(key, id(one)) for key, one in parts_of(obj) if id(one) in reached or self._is_unseen(one, obj)]

    def _is_unseen(self, one: Any, obj: Any) -> bool:
        steady = self._steady.get(id(one), ())
        return bool(steady) and (id(obj) in self._in_values or any(spot.path for spot in steady))

    def _renewal(self, reached: dict[int, Any], places: list[Spot], step_of: Callable[[GuardedSource], int]) -> Renewal:
        links = [self._links(obj, reached) for obj in reached.values()]
        uses = [*(id(spot.obj) for spot in places), *(other for row in links for _, other in row)]
        numbers = {key: number for number, key in enumerate(dict.fromkeys((*reached, *uses)))}
        references = Counter(uses)
        made = [
            _Made(
                kind=type(obj),
                can_be_copied=can_be_copied(obj),
                names=names_of(obj),
                references=references[key],
                parts=[(name, numbers[other]) for name, other in row],
            )
            for (key, obj), row in zip(reached.items(), links, strict=True)
        ]
        at = [LeftPlace.of(spot, self._is_owner_there(spot), numbers[id(spot.obj)], step_of) for spot in places]
        found = [self._ways(self._steady[key], step_of) for key in numbers if key not in reached]
        return Renewal(at, made, found, self._takes_out)

    def _ways(self, found: list[Spot], step_of: Callable[[GuardedSource], int]) -> list[PathFrom]:
        """To what is at ``found`` spots. That sources lead to one object the guard sees."""
        at_sources = [spot for spot in found if not spot.path]
        return [way_to(spot, step_of) for spot in (*at_sources[:1], *(spot for spot in found if spot.path))]
