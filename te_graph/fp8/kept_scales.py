"""Scales, histories and casts put back after a step that is undone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from te_graph import _C
from te_graph.fp8.member import Member
from te_graph.fp8.scale_block import Block
from te_graph.fp8.scaling_scope import ScalingScope, scaling_scopes


class _KeptBlock:
    """What the columns of ``block`` hold, and which of them are due for an update."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._tensors = [(tensor, tensor.clone()) for tensor in block.tensors()]
        self._due = block.due()

    def restore(self) -> None:
        self._block.set_due(self._due)  # first: it may update what is put back then
        for tensor, before in self._tensors:
            tensor.copy_(before)


class _KeptScope:
    """What there is in ``scope``."""

    def __init__(self, scope: ScalingScope) -> None:
        self._scope = scope
        self._blocks = [_KeptBlock(block) for block in scope.blocks]
        self._members = [
            (member, member.trains, member.has_weight_scale, member.loaded_mark, member.has_recorded_amax())
            for member in scope.members
        ]

    def restore(self) -> None:
        for block in self._blocks:
            block.restore()
        again: list[tuple[Member, Tensor, bool]] = []
        for member, trains, has_weight_scale, loaded_mark, has_recorded_amax in self._members:
            member.trains, member.has_weight_scale, member.loaded_mark = trains, has_weight_scale, loaded_mark
            weight = member.weight
            if member.has_recorded_amax() == has_recorded_amax or weight is None:
                continue
            if has_recorded_amax is None:
                member.forget_cast()
            else:
                again.append((member, weight, has_recorded_amax))
        marks = [_C.WeightMark(weight) for _, weight, _ in again]
        self._scope.repeat_casts([(member, weight) for member, weight, _ in again])
        done = _C.CastDone(self._scope.device)
        for (member, _, has_recorded_amax), mark in zip(again, marks, strict=True):
            member.linear.note_cast(mark, has_recorded_amax, done)


def _restore_first_states() -> None:
    """Of what has come since, whose columns may have been another module's before."""
    for member in [member for scope in scaling_scopes.all() for member in scope.members]:
        if member.first_state is not None:
            member.load_(*member.first_state)
            member.trains = False
            if not scaling_scopes.kept:
                member.first_state = None


@contextlib.contextmanager
def scales_kept() -> Iterator[None]:
    """Scales and histories are afterwards as before, and the same weights count as cast, by the same scales."""
    with torch.inference_mode(False), torch.no_grad():
        kept = [_KeptScope(scope) for scope in scaling_scopes.all()]
    scaling_scopes.kept += 1
    try:
        yield
    finally:
        scaling_scopes.kept -= 1
        with torch.inference_mode(False), torch.no_grad():
            for scope in kept:
                scope.restore()
            _restore_first_states()
