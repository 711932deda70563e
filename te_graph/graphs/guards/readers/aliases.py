"""Objects that stand for others: classes with type arguments, names of types, and what ``super()`` gives."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from typing import Any

from te_graph import _C
from te_graph.graphs.arguments.attributes import own_attribute
from te_graph.graphs.guards.sources import Source

_Kind = _C.StepKind
ALIASES = (
    *(types.GenericAlias, types.UnionType, typing._GenericAlias, typing.NewType, super),
    *((typing.TypeAliasType,) if hasattr(typing, "TypeAliasType") else ()),  # from Python 3.12 on
)
_OF_TYPES = ("__origin__", "__args__", "__metadata__", "__value__", "__supertype__")
_OF_SUPER = ("__thisclass__", "__self__", "__self_class__")


def is_alias(obj: Any) -> bool:
    """True for such objects; some of them say that they are of the class they stand for."""
    return issubclass(type(obj), ALIASES)


def behind_alias(source: Source) -> Iterator[Source]:
    """What the alias at ``source`` stands for."""
    for key in _OF_SUPER if type(source.obj) is super else _OF_TYPES:
        if (found := own_attribute(source.obj, key)) is not NotImplemented:
            yield source.child(found, f"{source.name}.{key}", _Kind.ATTRIBUTE, key)
