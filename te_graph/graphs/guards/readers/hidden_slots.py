"""Slots behind a property of the same name, and of classes that find attributes in another way."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from te_graph import _C
from te_graph.graphs.arguments.attributes import in_slot
from te_graph.graphs.guards.readers.guarded_sources import name_of_slot
from te_graph.graphs.guards.sources import Source

_Kind = _C.StepKind


class HiddenSlot:
    """A slot of an object as a sequence of one member, which a guard looks up without code of the object's class."""

    __slots__ = ("_name", "_owner")  # and none for weak references: the guard is to hold this

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = weakref.ref(owner) if type(owner).__weakrefoffset__ else lambda: owner
        self._name = name

    def __getitem__(self, index: int) -> Any:
        owner = self._owner()
        return NotImplemented if owner is None else in_slot(owner, self._name)


def hidden_slot(source: Source, name: str) -> Iterator[Source]:
    """What stands in a hidden slot of the object at ``source``, if anything."""
    what = name_of_slot(source, name)
    slot = source.child(HiddenSlot(source.obj, name), what, _Kind.KNOWN)
    yield slot.child(in_slot(source.obj, name), what, _Kind.ELEMENT)
