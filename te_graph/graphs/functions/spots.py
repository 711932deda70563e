"""Where objects with a state stand: at sources, and inside of containers that a guard compares as a whole."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from te_graph import _C
from te_graph.graphs.functions.made_objects import has_state, parts_of
from te_graph.graphs.guards.effects.reach import objects_at
from te_graph.graphs.guards.plain_values import holds_values
from te_graph.graphs.guards.readers.guarded_sources import GuardedSource

_Kind = _C.StepKind
MISSING = object()  # where nothing stood


@dataclass(frozen=True, eq=False)
class Spot:
    """Where an object stands.

    Attributes:
        source: the nearest one on the way.
        path: of keys, from what is there to the object.
        kind: of the step that leads to the object from what it is in.
        container: inside of what is compared as a whole, where the container is that it is in.
    """

    source: GuardedSource
    path: tuple[Any, ...]
    obj: Any
    kind: Any
    container: Spot | None = None

    @classmethod
    def at(cls, source: GuardedSource) -> Spot:
        """That of what is at ``source``."""
        return cls(source, (), source.obj, source.kind)

    @property
    def above(self) -> Spot | None:
        """Where the owner is that the object is in; None where the walk began."""
        if self.container is not None or self.source.parent is None:
            return self.container
        return Spot.at(self.source.parent)

    @property
    def is_compared_by_value(self) -> bool:
        """Whether the guard does not tell which objects are in the one here."""
        return self.source.value is not None

    @property
    def key(self) -> Any:
        """What tells it from others that steps of the same kind lead to from the same owner."""
        if self.container is not None:
            return self.path[-1]
        source = self.source
        if self.kind in (_Kind.ITEM_OF, _Kind.KNOWN):
            return id((source.key_source or source).obj)
        if source.key is None:
            return source.index
        return source.key if self.kind == _Kind.ITEM or isinstance(source.key, str) else id(source.key)


def spots(sources: list[GuardedSource]) -> Iterator[Spot]:
    """All of ``sources`` where there is an object, and where objects with a state are in what is compared there."""
    for source in sources:
        if source.is_end or source.parent is None:
            continue
        spot = Spot.at(source)
        yield spot
        if source.value is not None and (source.again is None or not source.value.is_mutable):
            yield from _inside(spot)


def _inside(container: Spot) -> Iterator[Spot]:
    parts = list(parts_of(container.obj))
    if holds_values([one for _, one in parts]):
        return
    kind = _kind_of_members(container.obj)
    for key, one in parts:
        if has_state(one):
            spot = Spot(container.source, (*container.path, key), one, kind, container)
            yield spot
            yield from _inside(spot)


def _kind_of_members(container: Any) -> Any:
    """By which step a walk would lead to what is in ``container``."""
    if isinstance(container, dict):
        return _Kind.ITEM
    if isinstance(container, deque):
        return _Kind.ELEMENT
    return _Kind.POSITION if isinstance(container, list | tuple) else _Kind.ATTRIBUTE


def objects_of(sources: list[GuardedSource]) -> dict[int, Any]:
    """What is at ``sources``, on the way there, and in what code may change there at present, by identity."""
    parents = (source.parent.obj for source in sources if source.parent is not None)  # dictionaries of attributes
    found = {id(obj): obj for obj in itertools.chain(parents, (obj for _, obj in objects_at(sources)))}
    owners = [obj for obj in found.values() if isinstance(obj, dict | list | deque)]
    return found | {id(one): one for owner in owners for _, one in parts_of(owner) if has_state(one)}


class SpotsBefore:
    """Where what stood before a run.

    Args:
        sources: references to the objects are kept until this object goes.

    Attributes:
        known: ``objects_of`` the sources.
    """

    def __init__(self, sources: list[GuardedSource]) -> None:
        self.known = objects_of(sources)
        self._there: dict[tuple[int, int, Any], Any] = {}
        self._at_sources: dict[GuardedSource, Any] = {}
        for spot in spots(sources):
            while (above := spot.above) is not None and (place := _place(above.obj, spot)) not in self._there:
                self._there[place] = spot.obj
                spot = above  # no source of its own where it is a dictionary of attributes

    def at(self, spot: Spot) -> Any:
        """What stood at ``spot``, on the same way from the call on; the object may have been in another one."""
        if spot.path:
            return self._find(spot)
        if spot.source not in self._at_sources:
            self._at_sources[spot.source] = self._find(spot)
        return self._at_sources[spot.source]

    def _find(self, spot: Spot) -> Any:
        above = spot.above
        return spot.obj if above is None else self._there.get(_place(self.at(above), spot), MISSING)

    def steady(self, found: list[Spot]) -> dict[int, list[Spot]]:
        """By identity, of what is at ``found`` spots and was known before, those where it has stayed."""
        steady: dict[int, list[Spot]] = {}
        for spot in found:
            if id(spot.obj) in self.known and self.at(spot) is spot.obj:
                steady.setdefault(id(spot.obj), []).append(spot)
        return steady

    def moved(self, sources: list[GuardedSource]) -> str:
        """The name of a source where one of the objects is by now that was elsewhere, and has not stayed there."""
        found = [spot for spot in spots(sources) if has_state(spot.obj)]
        steady = self.steady(found)
        gone = (spot for spot in found if id(spot.obj) in self.known and id(spot.obj) not in steady)
        return next((spot.source.name for spot in gone if self.at(spot) is not MISSING), "")


def _place(owner: Any, spot: Spot) -> tuple[int, int, Any]:
    return id(owner), int(spot.kind), spot.key
