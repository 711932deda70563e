"""Containers that a function makes anew at each call and leaves somewhere, where its caller may keep them.

A guard tells that what is there holds the same as at the capture. So a replay may leave it, unless somebody else holds
it, too: who keeps what each call has left (``history.append(trainer.last)``) has another object of each. Then a copy
takes its place.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import operator
import sys
import types
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from te_graph import _C
from te_graph.common.raw_contents import items_of, kind_of, members_of
from te_graph.graphs.arguments.attributes import attributes_of, instance_dict, slot_of
from te_graph.graphs.guards.effects.reach import objects_at
from te_graph.graphs.guards.readers.guarded_sources import GuardedSource

_Kind = _C.StepKind
_KINDS = (list, dict, set, tuple, collections.deque, collections.OrderedDict, collections.defaultdict)


@dataclass(frozen=True)
class _Made:
    """Something that is made at each call, and of its parts, by key, number or name, those that are."""

    parts: list[tuple[Any, _Made]]


@dataclass(frozen=True)
class Renewal:
    """A place where a function leaves what it has made.

    Attributes:
        step: of the guard, to the dictionary, list, cell or object that has it.
    """

    step: int
    _kind: Any
    _key: Any
    _made: _Made

    def renew(self, owner: Any, copies: dict[int, Any]) -> None:
        """Put a copy there if others than ``owner`` hold what is there. ``copies``: those of this replay, by identity
        of what was copied."""
        if _is_held(self._made, self._get, owner) or id(self._get(owner)) in copies:
            self._put(owner, _copy_of(self._get(owner), self._made, copies))

    def _get(self, owner: Any) -> Any:
        if self._kind == _Kind.CELL:
            return owner.cell_contents
        if self._kind == _Kind.ATTRIBUTE:
            return slot_of(type(owner), self._key).__get__(owner)
        return (list if isinstance(owner, list) else dict).__getitem__(owner, self._key)

    def _put(self, owner: Any, value: Any) -> None:
        if self._kind == _Kind.CELL:
            owner.cell_contents = value
        elif self._kind == _Kind.ATTRIBUTE:
            slot_of(type(owner), self._key).__set__(owner, value)
        else:
            (list if isinstance(owner, list) else dict).__setitem__(owner, self._key, value)


def objects_of(sources: list[GuardedSource]) -> dict[int, Any]:
    """What is at ``sources``, on the way there, and in what code may change there at present, by identity."""
    parents = (source.parent.obj for source in sources if source.parent is not None)  # dictionaries of attributes
    found = {id(obj): obj for obj in itertools.chain(parents, (obj for _, obj in objects_at(sources)))}
    owners = [obj for obj in found.values() if isinstance(obj, dict | list)]
    return found | {id(part): part for owner in owners for _, part in _parts_of(owner) if _can_be_copied(part)}


def renewals(
    known: Container[int], sources: list[GuardedSource], step_of: Callable[[GuardedSource], int]
) -> list[Renewal]:
    """What a run has made and left at ``sources``. ``known``: what ``objects_of`` found before it. ``step_of`` tells
    the step of the guard that leads to a source."""
    return [
        Renewal(step_of(owner), kind, key, made)
        for owner, kind, key, obj in itertools.chain.from_iterable(map(_places, sources))
        if id(owner.obj) in known and (made := _made_of(obj, known, set())) is not None
    ]


def _places(source: GuardedSource) -> Iterator[tuple[GuardedSource, Any, Any, Any]]:
    """Where code can put something else: the owner, kind and key of ``source``, and of members of a container that is
    compared as a whole, and what is there."""
    if _is_place(source):
        key = source.index if source.kind == _Kind.POSITION else source.key
        yield source.parent, source.kind, key, source.obj
    if source.value is not None and isinstance(source.obj, list | dict):
        kind = _Kind.POSITION if isinstance(source.obj, list) else _Kind.ITEM
        yield from ((source, kind, key, part) for key, part in _parts_of(source.obj))


def _is_place(source: GuardedSource) -> bool:
    if source.parent is None:
        return False
    owner, kind = source.parent.obj, source.kind
    if kind == _Kind.ATTRIBUTE:
        return slot_of(type(owner), source.key) is not None
    kinds = {_Kind.ITEM: dict, _Kind.POSITION: list, _Kind.CELL: types.CellType}
    return kind in kinds and isinstance(owner, kinds[kind])


def _made_of(obj: Any, known: Container[int], seen: set[int]) -> _Made | None:
    """None where ``obj`` is ``known`` from before, or nothing that can be copied."""
    if id(obj) in known or id(obj) in seen or not _can_be_copied(obj):
        return None
    seen.add(id(obj))
    made = ((key, _made_of(part, known, seen)) for key, part in _parts_of(obj))
    parts = [(key, one) for key, one in made if one is not None]
    return _Made(parts) if parts or not isinstance(obj, tuple) else None


def _can_be_copied(obj: Any) -> bool:
    """Whether ``obj`` is a container of Python's own, or of a dataclass that is nothing else."""
    kind = type(obj)
    if kind in _KINDS or not dataclasses.is_dataclass(kind):
        return kind in _KINDS
    return kind.__new__ is object.__new__ and kind_of(obj) is None and not isinstance(obj, type | nn.Module)


def _parts_of(obj: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(obj, dict):
        yield from items_of(obj)
    elif isinstance(obj, list | tuple | collections.deque):
        yield from enumerate(members_of(obj))
    elif not isinstance(obj, set):
        yield from attributes_of(obj).items()


def _part(obj: Any, key: Any) -> Any:
    return obj[key] if type(obj) in _KINDS else attributes_of(obj)[key]


def _references(get: Callable[..., Any], *where: Any) -> int:
    found = get(*where)
    return sys.getrefcount(found)


_OF_ONE = _references(operator.getitem, [[]], 0)  # to what one container alone holds


def _is_held(made: _Made, get: Callable[..., Any], *where: Any) -> bool:
    """Whether others hold what ``get`` finds ``where`` a function has left it, or a part of it that is made with it."""
    return _references(get, *where) > _OF_ONE or any(
        _is_held(part, _part, get(*where), key) for key, part in made.parts
    )


def _copy_of(obj: Any, made: _Made, copies: dict[int, Any]) -> Any:
    if id(obj) in copies:
        return copies[id(obj)]
    parts = {key: _copy_of(_part(obj, key), part, copies) for key, part in made.parts}
    if isinstance(obj, tuple):
        new = tuple(parts.get(number, member) for number, member in enumerate(obj))
    elif type(obj) in _KINDS:
        new = copy.copy(obj)
        for key, part in parts.items():
            new[key] = part
    else:
        new = object.__new__(type(obj))
        for name, value in {**attributes_of(obj), **parts}.items():
            if (slot := slot_of(type(obj), name)) is not None:
                slot.__set__(new, value)
            else:
                instance_dict(new)[name] = value
    copies[id(obj)] = new
    return new
