"""Scales, histories and casts put back after a step that is undone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from te_graph import _C
from te_graph.fp8.member import Member
from te_graph.fp8.scale_block import Block, Role
from te_graph.fp8.scaling_scope import ScalingScope, scaling_scopes
from te_graph.fp8.weight_casts import repeat_casts_
from te_graph.fp8.weight_mark import mark_of_plain


class _KeptBlock:
    """What the columns of ``members`` in ``block`` hold, and which of them are due for an update."""

    def __init__(self, block: Block, members: Sequence[Member]) -> None:
        self._block, self._members = block, members
        self._before = [tensor.clone() for tensor in block.tensors()]
        self._due = [
            (member, table, column, table.is_due(column))
            for member in members
            for direction, column in (member.columns.of(role) for role in Role)
            if (table := block.tables[direction]) is not None
        ]

    def restore(self) -> None:
        """Put back all but what other threads have called since, and go on with."""
        with self._block.without_updates():
            self._restore()

    def _restore(self) -> None:
        own = [member.number for member in self._members if is_of_this_thread(member)]
        for (tensor, columns), before in zip(self._block.columns_of(own), self._before, strict=True):
            index = torch.tensor(columns, dtype=torch.long, device=tensor.device)
            tensor.index_copy_(-1, index, before.index_select(-1, index))
        for member, table, column, was_due in self._due:
            # An update clears this of all columns; what other threads have recorded since is due as well.
            is_due = was_due or (not is_of_this_thread(member) and table.is_due(column))
            table.set_due(column, is_due)


def is_of_this_thread(member: Member) -> bool:
    """Whether no other thread has called the module of ``member`` last."""
    return member.thread == threading.get_ident()


class _KeptScope:
    """What there is of the members in ``scope``. Those of other threads may become this thread's."""

    def __init__(self, scope: ScalingScope) -> None:
        self._scope = scope
        members = sorted(scope.members, key=lambda one: one.block.order)
        self._blocks = [_KeptBlock(block, list(own)) for block, own in groupby(members, key=lambda one: one.block)]
        self.members = members
        for member in members:
            member.kept_mark = mark_of_plain(member.weight)
        self._noted = [
            (
                member,
                (member.thread, member.products.trains, member.has_weight_scale, member.products.recorded),
                member.products.cast_number,
                member.has_recorded_amax(),
                (weight := member.weight) is not None and member.is_recorded(weight),
            )
            for member in members
        ]

    def restore(self) -> None:
        for block in self._blocks:
            block.restore()
        for member in self.members:
            member.kept_mark = None
        again: list[tuple[Member, Tensor, bool, int]] = []
        for member, before, number, has_recorded_amax, was_recorded in self._noted:
            if not is_of_this_thread(member):
                continue
            member.thread, member.products.trains, member.has_weight_scale, member.products.recorded = before
            weight = member.weight
            if was_recorded and weight is not None:
                member.mark_again(mark_of_plain(weight))  # it is as before, but may have been written meanwhile
            is_as_before = member.has_recorded_amax() == has_recorded_amax and member.products.cast_number == number
            if is_as_before or weight is None:
                continue
            if has_recorded_amax is None:
                member.forget_cast()
            else:
                again.append((member, weight, has_recorded_amax, number))
        marks = [_C.WeightMark(weight) for _, weight, *_ in again]
        repeat_casts_([(member, weight) for member, weight, *_ in again], are_recorded=False)
        done = _C.CastDone(self._scope.device)
        for (member, _, has_recorded_amax, number), mark in zip(again, marks, strict=True):
            member.products.note_cast(mark, has_recorded_amax, done, number)


def _restore_new(known: set[Member]) -> None:
    """The first states of members that have come since those that are ``known``, whose columns may have been another
    module's before. Their weights are cast at the first call, as they are then."""
    for member in [member for scope in scaling_scopes.all() for member in scope.members]:
        if member in known or not is_of_this_thread(member):
            continue
        if member.first_state is not None:
            member.load_(member.first_state)
        member.forget_cast()  # what was cast may have been put back with what is watched
        if not scaling_scopes.remembers_first_states():
            member.first_state = None


@contextlib.contextmanager
def scales_kept() -> Iterator[None]:
    """Scales and histories are afterwards as before, and the same weights count as cast, by the same scales."""
    with torch.inference_mode(False), torch.no_grad():
        kept = [_KeptScope(scope) for scope in scaling_scopes.all()]
    modules = {module for scope in kept for member in scope.members if (module := member.module) is not None}
    evaluated = {module: module.fp8_evaluated for module in modules}
    try:
        with scaling_scopes.remembering_first_states():
            yield
    except BaseException:
        # What else evaluates goes on with its casts, not with those of a capture that came to nothing.
        for module, member in evaluated.items():
            module.fp8_evaluated = member
        raise
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for scope in kept:
                scope.restore()
            _restore_new({member for scope in kept for member in scope.members})
