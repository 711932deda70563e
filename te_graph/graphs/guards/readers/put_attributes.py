"""Attributes that the user has put on functions and objects of Python, torch and te_graph."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator, Set

from te_graph.graphs.guards.sources import Source
from te_graph.graphs.tracing.names import TABLE_OF_FIELDS, codes_of, is_implicit


def put_on_object(source: Source, said: Set[str]) -> Iterator[Source]:
    """What stands in the dictionary of the object at ``source`` under the names ``said``, but for what code of its
    class sets: that is the object's own, and changes as it may."""
    members = source.attributes()
    for key in sorted(said & members.obj.keys()) if members is not None else ():
        if not is_implicit(key) and key not in _set_by_class(type(source.obj)):
            yield members.item(key, f"{source.name}.{key}")


def _set_by_class(kind: type) -> frozenset[str]:
    """Attributes that methods of ``kind`` and its bases set, and fields of dataclasses."""
    codes = (code for base in kind.__mro__ for member in list(vars(base).values()) for code in codes_of(member))
    return frozenset(getattr(kind, TABLE_OF_FIELDS, ())).union(*map(_set_in, codes))


@functools.lru_cache(maxsize=1024)
def _set_in(code: types.CodeType) -> frozenset[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    own = (step.argval for step in dis.get_instructions(code) if step.opname == "STORE_ATTR")
    return frozenset(own).union(*map(_set_in, inner))
