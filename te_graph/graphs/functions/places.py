"""How code, and a replay in its place, puts something else where an object stands."""

from __future__ import annotations

import contextvars
import functools
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from te_graph import _C
from te_graph.common.raw_contents import kind_of
from te_graph.graphs.arguments.attributes import slot_of
from te_graph.graphs.functions.made_objects import part
from te_graph.graphs.functions.spots import Spot
from te_graph.graphs.guards.readers.guarded_sources import GuardedSource

_Kind = _C.StepKind


class _Access(NamedTuple):
    """How what is in an owner, under a key, is found and replaced."""

    get: Callable[[Any, Any], Any]
    put: Callable[[Any, Any, Any], None]


def _holder(kind: type, name: str) -> type:
    """The class where ``kind`` has what it calls ``name``."""
    return next(base for base in kind.__mro__ if name in vars(base))


def _put_in_cell(cell: types.CellType, _: Any, value: Any) -> None:
    cell.cell_contents = value


_OF_ITEMS = _Access(
    lambda owner, key: kind_of(owner).__getitem__(owner, key),
    lambda owner, key, value: kind_of(owner).__setitem__(owner, key, value),
)
_OF_SLOTS = _Access(
    lambda owner, key: slot_of(type(owner), key).__get__(owner),
    lambda owner, key, value: slot_of(type(owner), key).__set__(owner, value),
)
_OF_CELLS = _Access(lambda owner, _: owner.cell_contents, _put_in_cell)
_OF_CLASSES = _Access(
    lambda owner, key: vars(_holder(owner, key))[key],
    lambda owner, key, value: type.__setattr__(_holder(owner, key), key, value),
)
_OF_CONTEXT = _Access(lambda owner, _: owner.get(), lambda owner, _, value: owner.set(value))
_ACCESSES: dict[Any, tuple[type | tuple[type, ...], _Access]] = {
    _Kind.ITEM: (dict, _OF_ITEMS),
    _Kind.ITEM_OF: (dict, _OF_ITEMS),
    _Kind.POSITION: (list, _OF_ITEMS),
    _Kind.ELEMENT: (deque, _OF_ITEMS),
    _Kind.CELL: (types.CellType, _OF_CELLS),
    _Kind.TYPE_ITEM: (type, _OF_CLASSES),
    _Kind.CONTEXT_VAR: (contextvars.ContextVar, _OF_CONTEXT),
}


def _access_to(spot: Spot) -> _Access | None:
    owner = spot.above.obj
    if spot.kind == _Kind.ATTRIBUTE and spot.container is None and slot_of(type(owner), spot.source.key) is not None:
        return _OF_SLOTS
    kinds, access = _ACCESSES.get(spot.kind, ((), None))
    return access if isinstance(owner, kinds) else None


@dataclass(frozen=True)
class PathFrom:
    """From where a ``step`` of the guard leads, a ``path`` of keys."""

    step: int
    path: tuple[Any, ...] = ()

    def end(self, root: Any) -> Any:
        """What is there, where the step leads to ``root``."""
        return functools.reduce(part, self.path, root)


@dataclass(frozen=True)
class LeftPlace:
    """A place where something stands.

    Attributes:
        way: to the owner; where nothing can be put there, to what stands there.
        key: where the owner has it. No object that is a key is held: a step leads to it.
        key_way: then, that way.
        access: to it; None where nothing can be put there.
        number: of what was left there.
    """

    way: PathFrom
    key: Any
    key_way: PathFrom | None
    access: _Access | None
    number: int
    name: str

    @classmethod
    def of(cls, spot: Spot, is_owner_there: bool, number: int, step_of: Callable[[GuardedSource], int]) -> LeftPlace:
        """The place at ``spot`` of what has this ``number``. ``is_owner_there``: before a call, on the same way."""
        source, access = spot.source, _access_to(spot) if is_owner_there else None
        if access is None:
            return cls(way_to(spot, step_of), None, None, None, number, source.name)
        if spot.container is not None:
            return cls(way_to(spot.container, step_of), spot.path[-1], None, access, number, source.name)
        key = source.index if spot.kind in (_Kind.POSITION, _Kind.ELEMENT) else source.key
        key_way = PathFrom(step_of(source.key_source)) if spot.kind == _Kind.ITEM_OF else None
        return cls(PathFrom(step_of(source.parent)), key, key_way, access, number, source.name)

    @property
    def ways(self) -> tuple[PathFrom, ...]:
        """Of what ``get`` and ``put`` need."""
        return (self.way,) if self.key_way is None else (self.way, self.key_way)

    def get(self, owner: Any, *keys: Any) -> Any:
        """What stands there, where ``ways`` end."""
        return owner if self.access is None else self.access.get(owner, *(keys or (self.key,)))

    def put(self, value: Any, owner: Any, *keys: Any) -> None:
        """Let ``value`` stand there, where ``ways`` end."""
        self.access.put(owner, *(keys or (self.key,)), value)


def way_to(spot: Spot, step_of: Callable[[GuardedSource], int]) -> PathFrom:
    """The way to what is at ``spot``."""
    return PathFrom(step_of(spot.source), spot.path)
