"""The guard over all that a function can be seen to use."""

from __future__ import annotations

from collections import deque

from te_graph import _C
from te_graph.common.dispatch import storage_key
from te_graph.graphs.guards.guarded_sources import Fact, is_plumbing
from te_graph.graphs.guards.sources import Place
from te_graph.graphs.guards.values import value_of
from te_graph.graphs.tracing.externals import External

_Kind = _C.StepKind


class Surroundings:
    """The guard over the places of one call.

    Args:
        facts: as an ``Explorer`` found them.
        used: identities of the storages whose memory matters; None: all.
        written: of those that a replay writes.
        asked: identities of the tensors that the function asks for their gradients, so that one that appears or goes is
            a change; as it is for all parameters if there are any. None: all tensors.
        runs_backward: it computes gradients, so that hooks on them matter.
        is_strict: no check passes where something cannot be compared.
    """

    def __init__(
        self,
        facts: list[Fact],
        used: set[int] | None,
        written: set[int] = frozenset(),
        asked: set[int] | None = None,
        runs_backward: bool = False,
        is_strict: bool = True,
    ) -> None:
        self.guard = _C.Guard()
        self._runs_backward = runs_backward
        self._steps: dict[int, int] = {}
        self._incomparable = {id(fact.parent) for fact in facts if fact.kind == _Kind.NEVER}
        for fact in facts:
            is_used = fact.is_dense_tensor and (used is None or storage_key(fact.obj) in used)
            if fact.is_grad and not (is_used or (_matters(fact, asked) and (fact.obj is None or fact.is_dense_tensor))):
                continue
            if fact.kind == _Kind.NEVER and not is_strict:
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
        if fact.kind == _Kind.KNOWN:
            self.guard.expect_same_object(step, fact.obj)
        self._steps[id(fact)] = step
        return step

    def _expect(self, fact: Fact, step: int, is_used: bool, is_written: bool) -> None:
        guard, obj, name = self.guard, fact.obj, fact.name
        if fact.same_as is not None:
            guard.expect_same(step, self._steps[id(fact.same_as)])
        elif fact.is_end and not fact.is_grad:
            return
        elif fact.value is not None:
            at = (
                guard.add_step(_Kind.CONTENTS, step, None, 0, None, name, fact.is_fleeting)
                if fact.value.is_mutable
                else step
            )
            guard.expect_value(at, fact.value)
        elif fact.is_dense_tensor:
            is_leaf = obj.is_leaf and obj.requires_grad
            guard.add_tensor(step, obj, is_used, is_written, compares_hooks=self._runs_backward and is_leaf)
        elif fact.is_grad:
            guard.expect_value(step, value_of(None))
        elif isinstance(obj, dict):
            guard.expect_type(step, type(obj))
            self._expect_keys(fact, step)
        elif isinstance(obj, list | tuple | deque):
            guard.expect_type(step, type(obj))
            guard.add_step(_Kind.LENGTH, step, None, len(obj), None, _size(name, "length"))
        elif is_plumbing(obj):
            guard.expect_type(step, type(obj))
        elif id(fact) not in self._incomparable:
            guard.expect_same_object(step, obj)

    def _expect_keys(self, fact: Fact, step: int) -> None:
        """The keys of a function's globals, and attributes, are no business of its callers': they are parents only."""
        keys, subject = _C.keys_of(fact.obj), _size(fact.name, "keys")
        if fact.is_given:
            self.guard.add_step(_Kind.LENGTH, step, None, len(fact.obj), None, subject, True)
        if keys is not None:
            at = self.guard.add_step(_Kind.CONTENTS, step, None, 0, None, fact.name, fact.is_fleeting)
            self.guard.expect_value(at, keys)
        else:
            self.guard.add_step(_Kind.NEVER, step, None, 0, None, f"{subject} cannot be compared")


def _matters(grad: Fact, asked: set[int] | None) -> bool:
    """Whether the gradient at a place may be asked for while it is not used."""
    owner = grad.parent.obj
    return asked is None or id(owner) in asked or (bool(asked) and owner.requires_grad)


def _size(name: str, what: str) -> str:
    return f"number of {name}" if name in ("arguments", "keyword arguments") else f"{what} of {name}"


def homeless(externals: dict[int, External], facts: list[Fact]) -> External | None:
    """The first of the external tensors that is at none of the places."""
    known = {storage_key(fact.obj) for fact in facts if fact.is_dense_tensor}
    return next((external for key, external in externals.items() if key not in known), None)
