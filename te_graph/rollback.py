"""What Python code may leave behind in the objects of a callable, undone when its capture fails."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from te_graph.homes import Place


class ContainerState:
    """The contents of the attributes, dictionaries and lists that a callable refers to.

    Args:
        places: the callable and what it refers to. References to what they hold are kept until this object goes.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._kept: list[tuple[dict | list, dict | list]] = []
        for place in places:
            if isinstance(place.obj, dict | list):
                self._keep(place.obj)
            elif isinstance(members := getattr(place.obj, "__dict__", None), dict):
                self._keep(members)
                if isinstance(place.obj, nn.Module):
                    for table in (place.obj._parameters, place.obj._buffers, place.obj._modules):
                        self._keep(table)

    def _keep(self, container: dict | list) -> None:
        self._kept.append((container, container.copy()))

    def restore(self) -> None:
        """Put back the contents, object by object."""
        for container, contents in self._kept:
            if isinstance(container, list):
                container[:] = contents
            elif container.keys() != contents.keys() or any(container[key] is not contents[key] for key in contents):
                container.clear()
                container.update(contents)
