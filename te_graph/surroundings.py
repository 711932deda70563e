"""The guard over all that a function can be seen to use."""

from __future__ import annotations

import dataclasses

from te_graph import _C
from te_graph.dispatch import storage_key
from te_graph.explorer import Fact, is_plumbing, is_value
from te_graph.externals import External
from te_graph.homes import Place
from te_graph.signature import is_constant

_Kind = _C.StepKind


class Surroundings:
    """The guard over the places of one call.

    Args:
        facts: as an ``Explorer`` found them.
        used: identities of the storages whose memory matters; None: all.
        written: of those that a replay writes.
        reads_grads: the function asks for gradients, so that one that appears or goes is a change.
    """

    def __init__(
        self, facts: list[Fact], used: set[int] | None, written: set[int] = frozenset(), reads_grads: bool = True
    ) -> None:
        self.guard = _C.Guard()
        self._steps: dict[int, int] = {}
        for fact in facts:
            is_used = fact.is_dense_tensor and (used is None or storage_key(fact.obj) in used)
            if fact.is_grad and not (is_used or (reads_grads and (fact.obj is None or fact.is_dense_tensor))):
                continue
            self._expect(fact, self._enter(fact), is_used, is_used and storage_key(fact.obj) in written)

    def step_of(self, fact: Place) -> int:
        """The number of the step that leads to ``fact``."""
        return self._steps[id(fact)]

    def _enter(self, fact: Fact) -> int:
        if fact.parent is None:
            return -1
        if id(fact) in self._steps:
            return self._steps[id(fact)]
        parent = self._enter(fact.parent)
        index = fact.index if fact.key_place is None else self._enter(fact.key_place)
        is_fleeting = fact.parent.is_fleeting
        step = self.guard.add_step(fact.kind, parent, fact.key, index, None, fact.name, is_fleeting)
        self._steps[id(fact)] = step
        return step

    def _expect(self, fact: Fact, step: int, is_used: bool, is_written: bool) -> None:
        guard, obj, name = self.guard, fact.obj, fact.name
        if fact.same_as is not None:
            guard.expect_same(step, self._steps[id(fact.same_as)])
        elif fact.kind == _Kind.ABSENT:
            return
        elif is_value(obj):
            guard.expect_value(step, frozenset(obj) if isinstance(obj, set) else obj)
        elif fact.is_dense_tensor:
            guard.add_tensor(step, obj, is_used, is_written)
        elif isinstance(obj, dict):
            # The keys of a function's globals, and attributes, are no business of its callers': they come here as
            # parents only.
            kind = _Kind.KEYS if all(is_constant(key) for key in obj) else _Kind.LENGTH
            guard.add_step(kind, step, tuple(obj) if kind == _Kind.KEYS else None, len(obj), None, _size(name, "keys"))
        elif isinstance(obj, list | tuple):
            guard.add_step(_Kind.LENGTH, step, None, len(obj), None, _size(name, "length"))
        elif dataclasses.is_dataclass(obj) and is_plumbing(obj):
            guard.expect_type(step, type(obj))
        elif not is_plumbing(obj):
            guard.expect_identity(step, obj)


def _size(name: str, what: str) -> str:
    return f"number of {name}" if name in ("arguments", "keyword arguments") else f"{what} of {name}"


def homeless(externals: dict[int, External], facts: list[Fact]) -> External | None:
    """The first of the external tensors that is at none of the places."""
    known = {storage_key(fact.obj) for fact in facts if fact.is_dense_tensor}
    return next((external for key, external in externals.items() if key not in known), None)
