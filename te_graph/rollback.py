"""What Python code may leave behind in the objects of a callable, undone when its capture fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import nn

from te_graph import _C
from te_graph.homes import Place


class ContainerState:
    """The contents of the attributes, dictionaries and lists that a callable refers to.

    Args:
        places: the callable and what it refers to. References to what they hold are kept until this object goes.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._kept: list[tuple[Any, Any]] = []
        for place in places:
            if isinstance(place.obj, dict | list | set | deque):
                self._keep(place.obj)
            elif isinstance(members := getattr(place.obj, "__dict__", None), dict):
                self._keep(members)
                if isinstance(place.obj, nn.Module):
                    for table in (place.obj._parameters, place.obj._buffers, place.obj._modules):
                        self._keep(table)

    def _keep(self, container: dict | list | set | deque) -> None:
        # Of the plain kinds: copy() of a derived class may be the user's, or miss.
        kind = next(kind for kind in (dict, list, set, deque) if isinstance(container, kind))
        self._kept.append((container, kind(container)))

    def restore(self) -> None:
        """Put back the contents, object by object."""
        for container, contents in self._kept:
            if isinstance(container, list):
                container[:] = contents
            elif isinstance(container, set | deque):
                if list(container) != list(contents):
                    container.clear()
                    container.update(contents) if isinstance(container, set) else container.extend(contents)
            elif container.keys() != contents.keys() or any(container[key] is not contents[key] for key in contents):
                container.clear()
                container.update(contents)


class Bindings:
    """What variables, closure cells, attributes of classes and context variables are bound to, one by one.

    Args:
        places: as for ``ContainerState``.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        kinds = (_C.StepKind.ITEM, _C.StepKind.CELL, _C.StepKind.TYPE_ITEM, _C.StepKind.CONTEXT_VAR)
        self._places = [place for place in places if place.kind in kinds]

    def restore(self) -> None:
        """Bind them again."""
        for place in self._places:
            owner, kind = place.parent.obj, place.kind
            if kind == _C.StepKind.ITEM:
                if owner.get(place.key, place) is not place.obj:
                    owner[place.key] = place.obj
            elif kind == _C.StepKind.CELL:
                owner.cell_contents = place.obj
            elif kind == _C.StepKind.TYPE_ITEM:
                holder = next((base for base in owner.__mro__ if place.key in vars(base)), owner)
                if vars(holder).get(place.key) is not place.obj:
                    setattr(holder, place.key, place.obj)
            elif place.obj is not NotImplemented and owner.get(None) is not place.obj:
                owner.set(place.obj)
