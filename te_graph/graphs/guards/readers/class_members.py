"""What the code of a function may use of classes, and what may not come to hide it."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from te_graph.graphs.guards.readers.guarded_sources import NAMESPACES
from te_graph.graphs.tracing.names import Names, codes_of, is_for_making, is_implicit, is_of_library, user_classes


@dataclass(frozen=True)
class ClassMembers:
    """Tells what counts of classes for code that says ``names``."""

    names: Names
    _hidden: dict[type, frozenset[str]] = field(default_factory=dict)
    _expected: dict[type, frozenset[str]] = field(default_factory=dict)

    def hidden(self, kind: type) -> frozenset[str]:
        """What the code may use of a class and an attribute of the instance would hide."""
        if kind not in self._hidden:
            found = {key for base in kind.__mro__ for key in vars(base) if self.may_use(base, key)}
            self._hidden[kind] = frozenset(key for key in found if not is_implicit(key))
        return self._hidden[kind]

    def expected(self, kind: type) -> frozenset[str]:
        """Attributes that instances may get, and that code asks for also while they have not."""
        if kind not in self._expected:
            self._expected[kind] = frozenset(key for key in self._looked_for(kind) if not is_implicit(key))
        return self._expected[kind]

    def _looked_for(self, kind: type) -> Set[str]:
        answers = issubclass(kind, NAMESPACES) or any("__getattr__" in vars(base) for base in user_classes(kind))
        return (self.names.said if answers else self.names.asked) | self.names.looked_up_of(kind)

    def may_use(self, base: type, key: str) -> bool:
        """Whether the code may use what the class ``base`` itself has under ``key``."""
        member = vars(base)[key]
        if is_implicit(key) and next(codes_of(member), None) is not None:
            return True
        is_any = not (self.names.is_enough or is_of_library(base) or is_implicit(key))
        return ((key in self.names.said or is_any) and not is_for_making(key)) or self.names.has_run(member)
