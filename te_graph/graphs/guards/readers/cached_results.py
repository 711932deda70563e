"""What ``functools.lru_cache`` and ``functools.cache`` keep, as far as a guard can look at it again."""

from __future__ import annotations

import functools
import gc
import itertools
from collections.abc import Iterator
from typing import Any

from te_graph import _C
from te_graph.graphs.guards.plain_values import is_value
from te_graph.graphs.guards.sources import Source

_Kind = _C.StepKind


def cached_results(source: Source) -> Iterator[Source]:
    """The results that the cached function at ``source`` keeps, by the arguments that it keeps them for.

    A function tells its collector what it keeps, and nobody else. Keys with objects of the user's are left out: a guard
    would keep these alive.
    """
    function = source.obj
    parts = gc.get_referents(function)
    info = function.cache_info()
    table = next((part for part in parts if type(part) is dict and _is_table_of(part, function, info)), {})
    if info.maxsize is None:
        is_first = table is next((part for part in parts if type(part) is dict), None)
        results = table if is_first else {}
    else:
        keys = {id(key) for key in table}
        pairs = itertools.pairwise(parts)
        results = {key: result for key, result in pairs if id(key) in keys and not isinstance(result, type)}
    for key, result in results.items():
        if _is_plain(key):
            name = f"what {function.__name__} keeps for {key!r}"
            yield source.child(result, name, _Kind.CACHED, key, index=int(info.maxsize is not None))


def _is_table_of(table: dict, function: functools._lru_cache_wrapper, info: Any) -> bool:
    if table is vars(function) or len(table) != info.currsize:
        return False
    return info.maxsize is None or all(type(link).__name__ == "_lru_list_elem" for link in table.values())


def _is_plain(key: Any) -> bool:
    """True for values, with the classes and the mark between them that ``functools`` puts into keys."""
    parts = key if isinstance(key, tuple) else (key,)
    return all(is_value(part) or type(part) is object or type(part) is type for part in parts)
