"""All that sources lead to, also inside containers that a guard compares as a whole."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from te_graph.common.raw_contents import members_of
from te_graph.graphs.guards.plain_values import holds_values
from te_graph.graphs.guards.sources import Source

HOLDERS = (functools.partial, tuple, frozenset, types.MappingProxyType, slice)  # do not change, as their members may


def objects_at(sources: Iterable[Source]) -> Iterator[tuple[str, Any]]:
    """What is at ``sources``, with its name. Containers that are compared as a whole are no parents of sources."""
    for source in sources:
        yield source.name, source.obj
        if getattr(source, "value", None) is not None:
            yield from ((source.name, member) for member in _members(source.obj))


def _members(container: Any) -> Iterator[Any]:
    """Those of ``container``, if it is one, and of those below it; not of containers of values alone."""
    stack = [container]
    while stack:
        obj = stack.pop()
        if isinstance(obj, dict):
            members = dict.values(obj)
        elif isinstance(obj, functools.partial):
            members = (obj.func, *obj.args, *obj.keywords.values())
        elif isinstance(obj, types.MappingProxyType):
            members = tuple(obj.values())
        elif isinstance(obj, slice):
            members = (obj.start, obj.stop, obj.step)
        else:
            members = members_of(obj) if isinstance(obj, list | tuple | set | frozenset | deque) else ()
        for member in () if holds_values(members) else members:
            yield member
            if isinstance(member, (dict, list, set, deque, *HOLDERS)):
                stack.append(member)
