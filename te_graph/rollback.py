"""What Python code may leave behind in the objects of a callable, undone when its capture fails."""

from __future__ import annotations

from typing import Any

from torch import nn

from te_graph.homes import walk


class ContainerState:
    """The contents of the attributes, dictionaries and lists that a callable refers to; globals are left out.

    Args:
        root: the module or function. References to what it holds are kept until this object goes.
    """

    def __init__(self, root: Any) -> None:
        self._kept: list[tuple[dict | list, dict | list]] = []
        for place in walk(root):
            if "global variable" in place.name:
                continue
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
