"""Linear layers in a row with what lies between them fused into the casts of their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from te_graph import _C
from te_graph.common.fake_mode import has_no_values
from te_graph.fp8.activation import Activation
from te_graph.fp8.autocast import is_in_region, note_call
from te_graph.fp8.linear import Linear
from te_graph.fp8.membership import FEATURES_MULTIPLE
from te_graph.fp8.norm import Norm
from te_graph.fp8.product import PreparedCall, prepare_call
from te_graph.fp8.recomputation import Checkpoints, may_be_checkpointed
from te_graph.fp8.tensor_arguments import check_tensors

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Stage(NamedTuple):
    """A linear layer, and what makes its input; None: it is the input as it is. Users may have put other modules in the
    place of both."""

    producer: Norm | Activation | None
    linear: Linear


def run_stages(
    name: str, stages: Sequence[Stage], x: Tensor, residual: Tensor | None, features: int
) -> tuple[Tensor, Tensor | None]:
    """What ``stages`` make of x [..., in], in FP8 where the region and all layers let them.

    Args:
        name: of the layer that they are, for messages.
        stages: at most one begins with a norm.
        x: [..., in].
        residual: [..., features], what is added to the norm's input first, or None.
        features: of the norm.

    Returns:
        y [..., out], and the norm's sum, as the residual, or None without one.
    """
    try:
        if getattr(stages[0].linear, "shard", None) is None:  # of split layers ranks may have rows between them
            _check_residual(name, x, residual, features)
        if _can_be_fused(stages, x, residual):
            note_call()
            weights = [stage.linear.weight for stage in stages]  # read once, as in Linear
            first = prepare_call(stages[0].linear, x, weights[0])
            others = [
                prepare_call(stage.linear, x, weight, first.dtype)
                for stage, weight in zip(stages[1:], weights[1:], strict=True)
            ]
            return _fused(stages, weights, [first, *others], x, residual)
        return _one_by_one(stages, x, residual)
    except (TypeError, AttributeError):
        check_tensors(name, input=x, residual=residual, may_be_none=("residual",))
        raise


def _one_by_one(stages: Sequence[Stage], x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The same, each by itself, of x [..., in] and the residual of the norm's input."""
    total = None
    for producer, linear in stages:
        is_norm = producer is not None and not isinstance(producer, Activation)
        if is_norm and residual is not None:
            x, residual = x + residual, None
            total = x
        if isinstance(producer, Norm):
            x = producer(x, getattr(linear, "shard", None))
        elif producer is not None:
            x = producer(x)
        x = linear(x)
    return x, total


def _fused(
    stages: Sequence[Stage],
    weights: Sequence[Tensor],
    calls: Sequence[PreparedCall],
    x: Tensor,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The same in one call, with the weights [out, in] of all, of x [..., in] and the residual of the norm's input."""
    first = calls[0]
    with first.noting():
        for call, weight in zip(calls, weights, strict=True):
            call.cast_weight(weight)
        scales = [call.scale() for call in calls]
        fused = [
            _C.FusedStage(
                _C.CastAlone() if producer is None else producer.fused(),
                call.member.products,
                weight,
                None if linear.bias is None else linear.bias.contiguous(),
                scale,
            )
            for (producer, linear), weight, call, scale in zip(stages, weights, calls, scales, strict=True)
        ]
        results = _C.fused_products(x, residual, fused, first.dtype, first.records_amax)
        for call, weight, scale in zip(calls, weights, scales, strict=True):
            call.note(weight, scale)
        return results


def _can_be_fused(stages: Sequence[Stage], x: Tensor, residual: Tensor | None) -> bool:
    """Whether all that the stages do for x [..., in] and the residual is what one call does."""
    linears = [stage.linear for stage in stages]
    if not all(map(_is_plain, linears)):
        return False
    dtype = linears[0].weight.dtype
    if any(linear.weight.dtype != dtype for linear in linears):
        return False
    if not all(producer is None or _is_own(producer) for producer, _ in stages):
        return False
    parameters = [
        id(p) for stage in stages for part in stage if part is not None for p in part.parameters(recurse=False)
    ]
    if len(set(parameters)) < len(parameters):  # of which a backward would add two gradients at once
        return False
    norms = [(i, producer) for i, (producer, _) in enumerate(stages) if isinstance(producer, Norm)]
    kind = x.device.type
    result = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype
    for i, norm in norms:
        dtype_of_sum = x.dtype if i == 0 else result
        if norm.weight.dtype not in (dtype_of_sum, torch.float32) or norm.weight.device != x.device:
            return False
        if not all(one is None or one.is_contiguous() for one in (norm.weight, norm.bias)):
            return False
        if residual is not None and residual.dtype != dtype_of_sum:
            return False
    checkpoints = Checkpoints() if may_be_checkpointed() else None
    if checkpoints is not None and (first := checkpoints.expected(linears[0])) is not None:
        return first.member is not None
    return is_in_region()


def _is_own(producer: nn.Module) -> bool:
    """Whether ``producer`` is what the layer made, and does no more than is fused."""
    return type(producer) in (Norm, Activation) and has_no_hooks(producer)


def _is_plain(linear: nn.Module) -> bool:
    """Whether ``linear`` is called for its product alone, which can be made in FP8."""
    if type(linear) is not Linear or linear.shard is not None or linear.return_bias or not has_no_hooks(linear):
        return False
    weight = linear.weight
    fits = not any(size % FEATURES_MULTIPLE for size in weight.shape) and weight.numel() > 0
    return fits and not has_no_values(weight)


def has_no_hooks(module: nn.Module) -> bool:
    """Whether nothing sees its calls, or stands in their place."""
    return "forward" not in vars(module) and not any(getattr(module, hooks) for hooks in _HOOKS)


def _check_residual(name: str, x: Tensor, residual: Tensor | None, features: int) -> None:
    """Raise ValueError if ``residual`` is not like the norm's input, which is made of x [..., in]."""
    if residual is not None and (residual.shape != (*x.shape[:-1], features) or residual.device != x.device):
        raise ValueError(
            f"{name}: expected a residual of shape {[*x.shape[:-1], features]} on {x.device}, got "
            f"{list(residual.shape)} on {residual.device}"
        )
