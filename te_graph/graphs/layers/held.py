"""What a model holds in attributes of its modules and parameters, and in containers there."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from te_graph.graphs.guards.effects.rollback import CONTAINERS

_HOLDERS = (*CONTAINERS, tuple)


def holders_in(model: nn.Module) -> list[Any]:
    """The modules of ``model``, its parameters, and the containers that are attributes of these or lie in such."""
    found: dict[int, Any] = {id(one): one for one in (*model.modules(), *model.parameters())}
    queue = list(found.values())
    while queue:
        inner = [value for value in _values(queue.pop()) if _is_container(value) and id(value) not in found]
        found.update((id(value), value) for value in inner)
        queue += inner
    return list(found.values())


def values_held_by(model: nn.Module) -> list[Any]:
    """All that lies there: parameters, buffers, other tensors, generators of random numbers, ..."""
    held = (value for holder in holders_in(model) for value in _values(holder))
    return [value for value in held if type(value) not in weakref.ProxyTypes]


def _values(holder: Any) -> Iterable[Any]:
    if isinstance(holder, _HOLDERS):
        return holder.values() if isinstance(holder, dict) else holder
    return vars(holder).values()


def _is_container(value: Any) -> bool:
    """Not so a weak proxy, which says that it is of the class behind it: that object belongs to others, or is gone."""
    return type(value) not in weakref.ProxyTypes and isinstance(value, _HOLDERS)
