"""Casts of the weights of many modules in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor

from te_graph.common.gradient_state import wait_for_parameters
from te_graph.fp8.member import Member
from te_graph.fp8.recipes import DelayedScaling, Recipe
from te_graph.fp8.scale_block import FORWARD, is_shared

_ops = torch.ops.te_graph


class _Run:
    """Members whose numbers follow each other in a block, so that their columns are views, with their weights.

    Attributes:
        weights: [out, in] or [in, out] each, contiguous.
        has_scale: whether the host knows that they have one.
        cast_scale, scale_inv: [n] fp32 each, columns of the block, with which they are cast.
        recorded_scale: [n] fp32, columns of the block, with which they were cast when their amaxes were recorded.
    """

    def __init__(self, pairs: Sequence[tuple[Member, Tensor]]) -> None:
        self.members = [member for member, _ in pairs]
        self.weights = [weight.detach().contiguous() for _, weight in pairs]
        first, last = self.members[0], self.members[-1]
        self._block, self._numbers = first.block, slice(first.number, last.number + 1)
        self.has_scale = first.has_weight_scale
        self.cast_scale = first.block.weight_scale[self._numbers]
        self.recorded_scale = first.block.recorded_weight_scale[self._numbers]
        self.scale_inv = first.block.weight_scale_inv[self._numbers, 0]

    @property
    def scale(self) -> Tensor:
        """[n] fp32: of delayed scaling, columns of the block."""
        return self._block.scale[FORWARD][self._block.weight_columns(self._numbers)]

    @property
    def amax(self) -> Tensor:
        """[n] fp32: the newest ones of delayed scaling, columns of the block."""
        return self._block.history[FORWARD][0, self._block.weight_columns(self._numbers)]

    def first_scale(self, own: Tensor, records_amax: bool) -> Tensor:
        """The scale that the weights have on the device, as after casts in a graph; ``own`` [n] fp32 where they have
        none. Casts that record amaxes set it. [n] fp32."""
        has_scale, scale = self._block.has_weight_scale[self._numbers], self.scale
        found = torch.where(has_scale, scale, own)
        if records_amax:
            scale.copy_(found)
            has_scale.fill_(True)
        return found


def cast_weights_(
    pairs: Sequence[tuple[Member, Tensor]], recipe: Recipe, group: dist.ProcessGroup | None, records_amax: bool
) -> None:
    """Cast weights into the copies that their members have.

    Args:
        pairs: members by ``recipe``, and the weight of each, [out, in] or [in, out].
        recipe: how scales are found.
        group: whose ranks share the scales, or None.
        records_amax: for delayed scaling.

    Stream and capture: one launch for up to 384 weights and one copy of their scales; under current scaling, and of
    weights that have no scale yet, others that find it. Does not synchronize.
    """
    if not pairs:
        return
    with torch.inference_mode(False), torch.no_grad():
        runs = _gathered_runs(pairs)
        records_amax = records_amax and isinstance(recipe, DelayedScaling)
        scales = _scales(runs, recipe, group, records_amax)
        kept = [run.recorded_scale for run in runs] if records_amax else []
        torch._foreach_copy_([*(run.cast_scale for run in runs), *kept], scales + scales[: len(kept)])
        _cast_(runs, records_amax)


def repeat_casts_(pairs: Sequence[tuple[Member, Tensor]], *, are_recorded: bool) -> None:
    """Cast weights, which are as they were, once more with the scales that they were cast with. Nothing is recorded.

    Args:
        pairs: members, and the weight of each, [out, in] or [in, out].
        are_recorded: as when their amaxes were recorded, whatever was cast since; else as in their last casts.

    Stream and capture: as ``cast_weights_``, without launches that find scales.
    """
    if not pairs:
        return
    with torch.inference_mode(False), torch.no_grad():
        runs = _gathered_runs(pairs)
        if are_recorded:
            torch._foreach_copy_([run.cast_scale for run in runs], [run.recorded_scale for run in runs])
        _cast_(runs, records_amax=False)


def _cast_(runs: Sequence[_Run], records_amax: bool) -> None:
    """Cast the weights of ``runs`` by their scales."""
    members = [member for run in runs for member in run.members]
    _ops.fp8_cast_weights_.List(
        [member.data for member in members],
        [member.transposed for member in members],
        [weight for run in runs for weight in run.weights],
        [run.cast_scale for run in runs],
        [run.scale_inv for run in runs],
        [run.amax for run in runs] if records_amax else [],
    )


def _scales(runs: Sequence[_Run], recipe: Recipe, group: dist.ProcessGroup | None, records_amax: bool) -> list[Tensor]:
    """The scales by which the weights of ``runs`` are cast now, [n] fp32 each."""
    if not isinstance(recipe, DelayedScaling):
        return _scales_of_amaxes(runs, recipe, None)
    new = [run for run in runs if not run.has_scale]
    own = _scales_of_amaxes(new, recipe, group if records_amax and is_shared(recipe, group) else None) if new else []
    first = {run: run.first_scale(scale, records_amax) for run, scale in zip(new, own, strict=True)}
    return [first.get(run, run.scale) for run in runs]


def _scales_of_amaxes(runs: Sequence[_Run], recipe: Recipe, group: dist.ProcessGroup | None) -> list[Tensor]:
    """The scales that suit the weights of ``runs`` as they are, those of all ranks of ``group``, [n] fp32 each."""
    weights = [weight for run in runs for weight in run.weights]
    amax = _ops.multi_tensor_norms(weights, float("inf"))
    if group is not None:
        dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    margin = recipe.margin if isinstance(recipe, DelayedScaling) else 0.0
    scale = _ops.fp8_scale(amax, recipe.fp8_format.forward_dtype, margin=margin)
    return list(scale.split([len(run.weights) for run in runs]))


def _gathered_runs(pairs: Sequence[tuple[Member, Tensor]]) -> list[_Run]:
    """``pairs``, of members and their weights, [out, in] or [in, out], once these can be read."""
    wait_for_parameters(weight for _, weight in pairs)
    return [_Run(run) for run in _runs(pairs)]


def _runs(pairs: Sequence[tuple[Member, Tensor]]) -> Iterator[list[tuple[Member, Tensor]]]:
    """Members with their weights, [out, in] or [in, out], by blocks and by whether they have a scale, in runs of
    numbers that follow each other."""
    ordered = sorted(pairs, key=lambda pair: (*_run_key(pair[0]), pair[0].number))
    for _, run in groupby(enumerate(ordered), key=lambda item: (*_run_key(item[1][0]), item[1][0].number - item[0])):
        yield [pair for _, pair in run]


def _run_key(member: Member) -> tuple[int, bool]:
    return member.block.order, member.has_weight_scale
