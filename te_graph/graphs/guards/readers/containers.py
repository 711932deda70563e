"""What dictionaries, lists and tuples hold, as the guards of callables compare it."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator

from te_graph import _C
from te_graph.graphs.guards.plain_values import is_compared_whole
from te_graph.graphs.guards.sources import MAX_OBJECTS, Source, contents, items_in

_Kind = _C.StepKind


def inside_container(source: Source) -> Iterator[Source]:
    """The members of what is at ``source``, but for containers of values alone, which are compared as a whole."""
    obj = source.obj
    if isinstance(obj, dict):
        if isinstance(obj, collections.defaultdict):
            yield source.child(obj.default_factory, f"default of {source.name}", _Kind.ATTRIBUTE, "default_factory")
        if not is_compared_whole(obj):
            yield from itertools.islice(items_in(source), MAX_OBJECTS)
    elif isinstance(obj, list | tuple) and not is_compared_whole(obj):
        yield from contents(source)
