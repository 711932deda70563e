"""Activation checkpointing around FP8 layers: what is computed again takes the scale that it took the first time.

``torch.utils.checkpoint`` runs a function twice, the second time inside the backward and outside of ``fp8_autocast``,
when the scales may have been updated. What a layer went by is noted with the checkpoint, so that its memory goes with
it, and found there again. Where torch keeps a checkpoint is known by names of ``torch.utils.checkpoint``.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from te_graph import _C
from te_graph.common.dispatch import is_in_backward
from te_graph.common.fp8_calls import tell_repeats_by
from te_graph.fp8.member import Member, WeightCast

_NOTES = "_te_graph_fp8_calls"  # attribute of a checkpoint


@dataclass(frozen=True)
class FirstCall:
    """How a layer was called the first time.

    Attributes:
        member: what it had in the scope; None: it computed without FP8.
        scale: of the input's cast, [1]; None under current scaling.
        weight_cast: of the weight.
        dtype: of the result.
        steps: of what was captured; a backward may compute again on another thread, where nothing tells of them.
    """

    member: Member | None = None
    scale: Tensor | None = None
    weight_cast: WeightCast | None = None
    dtype: torch.dtype | None = None
    steps: _C.HostSteps | None = field(default_factory=_C.HostSteps.current)

    def noting(self) -> contextlib.AbstractContextManager[Any]:
        """Around the second call, which notes what it does as the first one did."""
        return contextlib.nullcontext() if self.steps is None or _C.HostSteps.is_noting() else self.steps


@dataclass
class _Notes:
    """The calls inside one checkpoint, those of each layer in their order, and how far each backward has got."""

    calls: dict[int, list[FirstCall]] = field(default_factory=lambda: defaultdict(list))
    positions: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))


class Checkpoints:
    """The checkpoints that this thread is in.

    Attributes:
        noting: those that run for the first time. One may do so inside another one that is computed again.
        hides_gradients: gradients are not recorded here, and as far as is known that is the doing of one of them.
    """

    def __init__(self) -> None:
        self.noting: list[Any] = []
        self.hides_gradients = False
        self._repeating: Any = None
        self._pass = torch._C._current_graph_task_id()  # of several in which one is computed again
        for pack in _C.saved_tensor_pack_hooks():
            if not isinstance(pack, FunctionType) or pack.__module__ != CheckpointFunction.__module__:
                continue
            if "frame" in pack.__code__.co_freevars:
                self.noting.append(_variable_of(pack, "frame"))
            elif "target_frame_ref" in pack.__code__.co_freevars:
                self._repeating = _variable_of(pack, "target_frame_ref")()
                self._pass = _variable_of(pack, "gid")  # outside of a backward a number of its own
        if not torch.is_grad_enabled():
            # Whether gradients were recorded around them is not to be known: inputs that require some stand for it.
            calls = _calls_of(CheckpointFunction.forward)
            reentrant = [ctx for each in calls if any((ctx := each["ctx"]).needs_input_grad)]
            self.noting += reentrant
            self.hides_gradients = bool(reentrant)
        if self._repeating is None and is_in_backward():
            calls = _calls_of(CheckpointFunction.backward)
            self._repeating = next((each["ctx"] for each in calls if _is_computing_again(each)), None)

    @property
    def are_any(self) -> bool:
        """Whether there is one that runs, for the first time or again."""
        return bool(self.noting) or self._repeating is not None

    @property
    def repeats_calls(self) -> bool:
        """Whether one is computed again in which layers were called the first time."""
        return self._repeating is not None and hasattr(self._repeating, _NOTES)

    def note(self, layer: Any, call: FirstCall) -> None:
        """Note how ``layer`` is called."""
        for checkpoint in self.noting:
            _notes_of(checkpoint).calls[id(layer)].append(call)

    def expected(self, layer: Any) -> FirstCall | None:
        """How ``layer`` was called the first time, if that is what it is called for next, again."""
        if self._repeating is None:
            return None
        notes = _notes_of(self._repeating)
        calls, position = notes.calls.get(id(layer), []), notes.positions[self._pass, id(layer)]
        return calls[position] if position < len(calls) else None

    def recall(self, layer: Any) -> FirstCall | None:
        """The same, as it is called now."""
        first = self.expected(layer)
        if first is not None:
            _notes_of(self._repeating).positions[self._pass, id(layer)] += 1
        return first


def may_be_checkpointed() -> bool:
    """Whether it is worth looking for checkpoints."""
    return _C.has_saved_tensor_hooks() or is_in_backward() or not torch.is_grad_enabled()


def is_checkpointed() -> bool:
    """Whether a call that is made now leaves notes in a checkpoint, or takes them: a replay would do neither. Asked by
    what replays FP8 layers, where ``may_be_checkpointed``."""
    return Checkpoints().are_any


tell_repeats_by(lambda: Checkpoints().repeats_calls)


def _notes_of(checkpoint: Any) -> _Notes:
    notes = getattr(checkpoint, _NOTES, None)
    if notes is None:
        notes = _Notes()
        setattr(checkpoint, _NOTES, notes)
    return notes


def _variable_of(function: FunctionType, name: str) -> Any:
    """What ``function`` closes over as ``name``."""
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def _calls_of(function: Any) -> Iterator[dict[str, Any]]:
    """The variables of the calls of ``function``, of an autograd function, that are under way, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is function.__code__:
            yield frame.f_locals
        frame = frame.f_back


def _is_computing_again(variables: dict[str, Any]) -> bool:
    """Whether a call of ``CheckpointFunction.backward`` that has these is in the checkpoint's function: not in a hook
    of the tensors that it unpacks before, nor in the backward that it runs afterwards, whose hooks are no part of it.
    """
    return "detached_inputs" in variables and "outputs" not in variables
