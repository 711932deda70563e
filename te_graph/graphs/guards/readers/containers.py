"""What dictionaries, lists, tuples and sets hold, as the guards of callables compare it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from te_graph.graphs.guards.plain_values import holds_values, is_bulk
from te_graph.graphs.guards.sources import MAX_OBJECTS, Source, contents, items_in, members_in


def inside_container(source: Source) -> Iterator[Source]:
    """The members of what is at ``source``, but for containers of values alone, which are compared as a whole."""
    obj = source.obj
    if isinstance(obj, dict):
        if not is_bulk(obj):
            yield from itertools.islice(items_in(source), MAX_OBJECTS)
    elif isinstance(obj, list | tuple):
        if not is_bulk(obj):
            yield from contents(source)
    elif isinstance(obj, set | frozenset) and not holds_values(obj):
        yield from members_in(source)
