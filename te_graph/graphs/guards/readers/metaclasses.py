"""What objects, and classes as objects of a metaclass, find in the classes above them, and what may come to hide it."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from te_graph.graphs.tracing.names import is_implicit


def member_of(kind: type, name: str, default: Any = None) -> Any:
    """What ``kind`` or a base has under ``name``, as instances find it: without what a metaclass gives the class."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), default)


def has_member(kind: type, name: str) -> bool:
    """Whether instances of ``kind`` find ``name`` there."""
    return any(name in vars(base) for base in kind.__mro__)


def given_by_metaclass(kind: type, names: Set[str]) -> Iterator[str]:
    """Of ``names`` those that the class ``kind`` has of its metaclass, until it, or a base, comes to hide them: data
    descriptors cannot be hidden, and methods that Python calls by itself are looked for in the metaclass alone."""
    met: set[str] = set()
    for base in type(kind).__mro__[:-1]:
        for name in (names & vars(base).keys()) - met:
            met.add(name)
            is_data = hasattr(type(vars(base)[name]), "__set__")
            if not (is_data or is_implicit(name) or has_member(kind, name)):
                yield name
