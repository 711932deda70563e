"""What the code of a function may use of classes, and what may not come to hide it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from te_graph.graphs.guards.readers.guarded_sources import NAMESPACES
from te_graph.graphs.tracing.names import (
    Names,
    has_code,
    is_for_making,
    is_implicit,
    is_of_library,
    is_untold,
    user_classes,
)


@dataclass(frozen=True)
class ClassMembers:
    """Tells what counts of classes for code that says ``names``."""

    names: Names
    _used: dict[type, dict[str, Any]] = field(default_factory=dict)
    _hidden: dict[type, frozenset[str]] = field(default_factory=dict)
    _expected: dict[type, frozenset[str]] = field(default_factory=dict)

    def used(self, base: type) -> dict[str, Any]:
        """What the code may use of what the class ``base`` itself has, by name."""
        if base not in self._used:
            self._used[base] = {key: member for key, member in vars(base).items() if self._may_use(base, key, member)}
        return self._used[base]

    def hidden(self, kind: type) -> frozenset[str]:
        """What the code may use of a class and an attribute of the instance would hide."""
        if kind not in self._hidden:
            found = {key for base in kind.__mro__ for key in self.used(base) if not is_implicit(key)}
            self._hidden[kind] = frozenset(key for key in found if key in self.names.said or not is_for_making(key))
        return self._hidden[kind]

    def expected(self, kind: type) -> frozenset[str]:
        """Attributes that instances may get, and that code asks for also while they have not."""
        if kind not in self._expected:
            self._expected[kind] = frozenset(key for key in self._looked_for(kind) if not is_implicit(key))
        return self._expected[kind]

    def _looked_for(self, kind: type) -> Set[str]:
        answers = issubclass(kind, NAMESPACES) or any("__getattr__" in vars(base) for base in user_classes(kind))
        return (self.names.said if answers else self.names.asked) | self.names.looked_up_of(kind)

    def _may_use(self, base: type, key: str, member: Any) -> bool:
        if (is_implicit(key) and has_code(member)) or (is_untold(key, member) and not is_of_library(base)):
            return True
        is_any = not (self.names.is_enough or is_of_library(base) or is_implicit(key))
        return ((key in self.names.said or is_any) and not is_for_making(key)) or self.names.has_run(member)
