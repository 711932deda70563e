"""The guard over all that a function can be seen to use."""

from __future__ import annotations

import types
from collections import Counter, deque
from typing import Any

from torch import nn

from te_graph import _C
from te_graph.common.dispatch import is_leaf, storage_key
from te_graph.common.raw_contents import count_of
from te_graph.graphs.guards.readers.guarded_sources import GuardedSource, is_transparent, is_wrapped_container
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.guards.values import keys_of, value_of
from te_graph.graphs.tracing.externals import External

_Kind = _C.StepKind


class FunctionGuard:
    """The guard over the sources of one call.

    Args:
        sources: as a ``SourceWalker`` found them.
        used: identities of the storages whose memory matters; None: all. Others that do are found here.
        written: of those whose version counters a replay moves on.
        asked: identities of the tensors that the function asks for their gradients, so that one that appears or goes is
            a change; as it is for all parameters if there are any. None: all tensors.
        runs_backward: it computes gradients, so that hooks on them matter.
        tells_apart: the code can tell which object a tensor or function is: the memory of all tensors matters, of
            parameters and of functions that stay also which they are.
        is_strict: no check passes where something cannot be compared.
        tells_shared: an object that is in several places is the same one there.
    """

    def __init__(
        self,
        sources: list[GuardedSource],
        used: set[int] | None,
        written: set[int] = frozenset(),
        asked: set[int] | None = None,
        runs_backward: bool = False,
        tells_apart: bool = False,
        is_strict: bool = True,
        tells_shared: bool = True,
    ) -> None:
        self.guard = _C.FunctionGuard()
        self._runs_backward = runs_backward
        self._tells_apart = tells_apart
        self._tells_shared = tells_shared
        self._steps: dict[int, int] = {}
        if used is not None:
            used = used | _moved(sources, asked)
        self._incomparable = {id(source.parent) for source in sources if source.kind == _Kind.NEVER}
        for source in sources:
            is_used = source.is_strided_tensor and (used is None or storage_key(source.obj) in used)
            if source.is_grad and not (
                is_used or (_matters(source, asked) and (source.obj is None or source.is_strided_tensor))
            ):
                continue
            if source.kind == _Kind.NEVER and not is_strict:
                continue
            self._expect(source, self._enter(source), is_used, is_used and storage_key(source.obj) in written)

    def step_of(self, source: Source) -> int:
        """The number of the step that leads to ``source``."""
        return self._steps[id(source)]

    def _enter(self, source: GuardedSource) -> int:
        if source.parent is None:
            return -1
        if id(source) in self._steps:
            return self._steps[id(source)]
        parent = self._enter(source.parent)
        index = source.index if source.key_source is None else self._enter(source.key_source)
        is_ephemeral = source.parent.is_ephemeral
        step = self.guard.add_step(source.kind, parent, source.key, index, None, source.name, is_ephemeral)
        if source.kind == _Kind.KNOWN:
            self.guard.expect_identity(step, source.obj)
        self._steps[id(source)] = step
        return step

    def _expect(self, source: GuardedSource, step: int, is_used: bool, is_written: bool) -> None:
        guard, obj, name = self.guard, source.obj, source.name
        if source.is_end and not source.is_grad:
            return
        if source.value is not None:
            if source.value.is_mutable and source.again is not None and self._tells_shared:
                guard.expect_same(step, self._steps[id(source.again)])
            at = (
                guard.add_step(_Kind.CONTENTS, step, None, 0, None, name, source.is_ephemeral)
                if source.value.is_mutable
                else step
            )
            guard.expect_value(at, source.value)
        elif source.again is not None and self._tells_shared:
            guard.expect_same(step, self._steps[id(source.again)])
        elif source.is_strided_tensor:
            compares_hooks = self._runs_backward and is_leaf(obj) and obj.requires_grad
            guard.add_tensor(step, obj, is_used or self._tells_apart, is_written, compares_hooks=compares_hooks)
            if self._tells_apart and isinstance(obj, nn.Parameter) and not source.is_grad:
                guard.expect_identity(step, obj)
            if not source.is_grad:
                guard.expect_type(step, type(obj))  # code can tell a parameter, or a subclass with functions of its own
        elif source.is_grad:
            guard.expect_value(step, value_of(None))
        elif isinstance(obj, dict):
            guard.expect_type(step, type(obj))
            self._expect_keys(source, step)
        elif isinstance(obj, list | tuple | deque):
            guard.expect_type(step, type(obj))
            guard.add_step(_Kind.LENGTH, step, None, count_of(obj), None, _size(name, "length"))
            if isinstance(obj, deque):
                at = guard.add_step(_Kind.ATTRIBUTE, step, "maxlen", 0, None, f"maxlen of {name}")
                guard.expect_value(at, value_of(obj.maxlen))
        elif is_transparent(obj):
            guard.expect_type(step, type(obj))
            if not source.is_ephemeral and self._is_compared(obj):
                guard.expect_identity(step, obj)
        elif id(source) not in self._incomparable:
            guard.expect_identity(step, obj)

    def _is_compared(self, obj: Any) -> bool:
        """Whether it counts which object of a transparent kind is in a place that stays."""
        if isinstance(obj, types.FunctionType):
            return self._tells_apart
        return is_wrapped_container(obj)  # configurations are such, of which two may become one

    def _expect_keys(self, source: GuardedSource, step: int) -> None:
        """The keys of a function's globals and attributes are not compared: those dictionaries are parents only."""
        keys, subject = keys_of(source.obj), _size(source.name, "keys")
        if source.is_given:
            self.guard.add_step(_Kind.LENGTH, step, None, len(source.obj), None, subject, True)
        if keys is not None:
            at = self.guard.add_step(_Kind.CONTENTS, step, None, 0, None, source.name, source.is_ephemeral)
            self.guard.expect_value(at, keys)
        else:
            self.guard.add_step(_Kind.NEVER, step, None, 0, None, f"{subject} cannot be compared")


def _matters(grad: GuardedSource, asked: set[int] | None) -> bool:
    """Whether the gradient at a source may be asked for while it is not used."""
    owner = grad.parent.obj
    return asked is None or id(owner) in asked or (bool(asked) and owner.requires_grad)


def _moved(sources: list[GuardedSource], asked: set[int] | None) -> set[int]:
    """Identities of the storages of gradients that may be asked for and that stand elsewhere, too: the function may
    have put them there (``p.grad = p.main_grad``, ``self.grads = [p.grad]``), as a replay does not."""
    grads = {storage_key(one.obj) for one in sources if one.is_grad and one.is_strided_tensor and _matters(one, asked)}
    if not grads:
        return grads
    places = Counter(storage_key(source.obj) for source in sources if source.is_strided_tensor)
    return {key for key in grads if places[key] > 1}


def _size(name: str, what: str) -> str:
    return f"number of {name}" if name in ("arguments", "keyword arguments") else f"{what} of {name}"


def without_source(externals: dict[int, External], sources: list[GuardedSource]) -> External | None:
    """The first of the external tensors that is at none of the sources."""
    known = {storage_key(source.obj) for source in sources if source.is_strided_tensor}
    return next((external for key, external in externals.items() if key not in known), None)
