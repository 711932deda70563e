"""What Python code may leave behind in the objects of a callable, undone when its capture fails."""

from __future__ import annotations

import operator
import types
from collections.abc import Iterable

from torch import nn

from te_graph.homes import Place
from te_graph.plain_values import is_bulk, is_value


class ContainerState:
    """The contents of the attributes, dictionaries and lists that a callable refers to, and values of its variables.

    Args:
        places: the callable and what it refers to. References to what they hold are kept until this object goes.
        named: places that code names: those of variables, in a closure or global, keep their values.
    """

    def __init__(self, places: Iterable[Place], named: Iterable[Place] = ()) -> None:
        self._kept: list[tuple[dict | list, dict | list]] = []
        self._cells: list[tuple[types.CellType, object]] = []
        self._globals: list[tuple[dict, str, object]] = []
        for place in places:
            if place.again is None:
                self._keep_contents(place.obj)
        for place in named:
            if place.parent is None:
                continue
            if place.parent.key == "__globals__" and is_bulk(place.obj) and isinstance(place.obj, dict | list):
                self._keep(place.obj)
            elif not is_value(place.obj):
                continue
            elif isinstance(place.parent.obj, types.CellType):
                self._cells.append((place.parent.obj, place.obj))
            elif place.parent.key == "__globals__":
                self._globals.append((place.parent.obj, place.key, place.obj))

    def _keep_contents(self, obj: object) -> None:
        if isinstance(obj, dict | list):
            self._keep(obj)
        elif isinstance(members := getattr(obj, "__dict__", None), dict):
            self._keep(members)
            if isinstance(obj, nn.Module):
                for table in (obj._parameters, obj._buffers, obj._modules):
                    self._keep(table)

    def _keep(self, container: dict | list) -> None:
        self._kept.append((container, container.copy()))

    def restore(self) -> None:
        """Put back the contents, object by object."""
        for container, contents in self._kept:
            if isinstance(container, list):
                if not _are_the_same(container, contents):
                    container[:] = contents
            elif not (_are_the_same(container, contents) and _are_the_same(container.values(), contents.values())):
                container.clear()
                container.update(contents)
        for cell, value in self._cells:
            cell.cell_contents = value
        for scope, name, value in self._globals:
            scope[name] = value


def _are_the_same(now: Iterable[object], before: Iterable[object]) -> bool:
    """Whether two containers hold the very same objects in the same order."""
    return len(now) == len(before) and all(map(operator.is_, now, before))
