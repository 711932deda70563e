"""The product of a linear layer, in FP8 where the region and the layer let it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.captured_backward import noting_in_backward
from te_graph.common.fake_mode import has_no_values, is_in_fake_mode, is_traced
from te_graph.common.fp8_calls import excuse_region, note_captured_fp8_call
from te_graph.fp8.autocast import current_region, note_call
from te_graph.fp8.fp8_module import FP8Module
from te_graph.fp8.member import Member
from te_graph.fp8.membership import check_captured_weight, check_own_weight, member_of
from te_graph.fp8.recipes import DelayedScaling
from te_graph.fp8.recomputation import Checkpoints, FirstCall, may_be_checkpointed
from te_graph.fp8.scale_block import Role


def product_in_fp8(module: FP8Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The product of ``module`` for x [..., in] and its weight, [out, in] or [in, out], with bias [out] or without.

    None where FP8 is off or does not fit.
    """
    try:
        member = module.fp8
        is_usual = member is not None and member.fuses_wgrad_accumulation == module.fuse_wgrad_accumulation
        if is_usual and not is_in_fake_mode():
            y = _C.fast_fp8_product(member.products, x, weight, bias)
            if y is not None:
                return y
        note_call()
        return _unusual_product(module, x, weight, None if bias is None else bias.contiguous())
    except ValueError:
        _check_features(module, x, weight)  # which a fast call leaves to the op
        raise
    except RuntimeError as error:
        if torch._C._functorch.peek_interpreter_stack() is None:
            raise
        raise RuntimeError(
            "te_graph.Linear: expected a call outside of the transforms of torch.func, for which FP8 products have no "
            "rules, got one in vmap, grad, jvp or the like: call it there outside of fp8_autocast"
        ) from error


def _unusual_product(module: FP8Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """``product_in_fp8`` where there is more to look at than a fast call does; bias [out] is contiguous."""
    call = prepare_call(module, x, weight)
    if call is None:
        return None
    with call.noting():
        call.cast_weight(weight)
        scale = call.scale()
        y = call.member.products.forward(x, weight, bias, call.dtype, call.records_amax, scale)
        call.note(weight, scale)
        return y


@dataclass(frozen=True)
class PreparedCall:
    """How a module is about to be called in FP8.

    Attributes:
        member: what it computes with.
        dtype: of the result.
        records_amax: for delayed scaling.
        first: the call that a checkpoint repeats by this one.
        noted_by: checkpoints in which this is the first one.
    """

    module: FP8Module
    member: Member
    dtype: torch.dtype
    records_amax: bool
    first: FirstCall | None = None
    noted_by: Checkpoints | None = None

    def noting(self) -> contextlib.AbstractContextManager[Any]:
        """Around the casts and the call."""
        return noting_in_backward(self.member.scope.device) if self.first is None else self.first.noting()

    def cast_weight(self, weight: Tensor) -> None:
        """Cast ``weight``, [out, in] or [in, out], if it has changed."""
        member = self.member
        if self.first is not None:
            # Others may have computed with the layer in between, such as a teacher with weights of its own; and the
            # weight may be another tensor each time, as one that a hook computes.
            member.scope.cast_again(member, weight, self.first.weight_cast)
            return
        if _C.HostSteps.is_noting_backward():
            member.scope.cast_in_backward(member, weight)
            return
        records_in_graph = _C.HostSteps.is_noting() and self.records_amax and member.scope.is_delayed
        if records_in_graph:
            check_own_weight(member, weight)
        if not member.products.is_cast(weight, self.records_amax):
            member.scope.cast_weights(member, self.records_amax)
        if records_in_graph:
            # Before each replay, or in it.
            member.products.recorded = _C.WeightMark(weight), member.products.cast_number

    def scale(self) -> Tensor | None:
        """The scale of the input's cast [1], where a checkpoint repeats it or will; just before the call."""
        if self.first is not None:
            return self.first.scale
        return None if self.noted_by is None else self.member.products.begin_input_cast(self.records_amax)

    def note(self, weight: Tensor, scale: Tensor | None) -> None:
        """Tell checkpoints, behind the call, which waits for the cast of ``weight``, [out, in] or [in, out]; ``scale``
        [1] is that of the input."""
        if self.noted_by is not None:
            first = FirstCall(self.member, scale, self.member.last_cast(weight), self.dtype)
            self.noted_by.note(self.module, first)


def prepare_call(module: FP8Module, x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> PreparedCall | None:
    """How ``module`` is called for x [..., in], with its weight, [out, in] or [in, out]; None: not in FP8.

    Args:
        module: gets what it needs.
        x: its input; where ``dtype`` is given, that of the products before it.
        weight: read once, as a property may draw another one each time.
        dtype: of the result, where that is known.
    """
    if has_no_values(weight):  # shapes are those of the plain layer, and there are no values to scale
        _refuse_trace()
        excuse_region()
        return None
    checkpoints = Checkpoints() if may_be_checkpointed() else None
    if checkpoints is not None and (first := checkpoints.recall(module)) is not None:
        checkpoints.note(module, first)
        return None if first.member is None else PreparedCall(module, first.member, first.dtype, False, first)
    region = current_region()
    if checkpoints is not None and (region is None or not region.enabled):
        checkpoints.note(module, FirstCall())
    if region is None or not (region.enabled or region.calibrating):
        return None
    is_training = torch.is_grad_enabled() or (checkpoints is not None and checkpoints.hides_gradients)
    if region.enabled and _C.HostSteps.is_noting():
        check_captured_weight(module, is_training and isinstance(region.recipe, DelayedScaling))
    member = member_of(module, region, is_training or not region.enabled)
    if member is None:
        return None
    if not region.enabled:
        _calibrate(member, x, weight)
        return None
    if dtype is None:
        _check_features(module, x, weight)
        dtype = _dtype_of_result(x, weight)
    member.products.set_fast_region(region.number)  # for calls that are like this one
    if _C.HostSteps.is_noting():  # then each replay sees to the cast before, and records the amax
        note_captured_fp8_call()
    noted_by = checkpoints if checkpoints is not None and checkpoints.noting else None
    return PreparedCall(module, member, dtype, is_training, noted_by=noted_by)


def _refuse_trace() -> None:
    """Raise RuntimeError if a program is made of what would be computed in FP8."""
    region = current_region()
    if region is not None and region.enabled and is_traced():
        raise RuntimeError(
            "te_graph.Linear: expected a call outside of fp8_autocast where torch.export or make_fx traces without "
            "values, since scales are state that a program does not have, got one in a region: trace the model outside "
            "of it, or in fp8_autocast(enabled=False), for a program in high precision"
        )


def _check_features(module: FP8Module, x: Tensor, weight: Tensor) -> None:
    """Raise ValueError if x [...] has other features than ``weight``, [out, in] or [in, out], takes."""
    features = weight.shape[0 if module.inputs_first else 1]
    if x.dim() == 0 or x.shape[-1] != features:
        got = x.shape[-1] if x.dim() else "a scalar"
        raise ValueError(f"te_graph.Linear: expected an input of {features} features, got {got}")


def _dtype_of_result(x: Tensor, weight: Tensor) -> torch.dtype:
    """Of the product of x [..., in] and weight [out, in]: as ``torch.nn.functional.linear`` has it."""
    kind = x.device.type
    if x.device != weight.device:
        raise ValueError(f"te_graph.Linear: expected an input on {weight.device}, where the weight is, got {x.device}")
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if dtype == torch.float16:
            raise ValueError(
                "te_graph.Linear: expected torch.autocast of torch.bfloat16 inside fp8_autocast, got torch.float16"
            )
        return dtype
    if x.dtype != weight.dtype:
        raise TypeError(
            f"te_graph.Linear: expected an input of dtype {weight.dtype}, that of the weight, got {x.dtype}; cast it, "
            "or call the layer under torch.autocast"
        )
    return x.dtype


def _calibrate(member: Member, x: Tensor, weight: Tensor) -> None:
    """Record the amaxes of x [..., in] and weight [out, in], which are not cast."""
    if not member.scope.is_delayed:
        return
    if _C.HostSteps.is_noting():
        raise RuntimeError(
            "te_graph.Linear: expected no calibration inside a capture, whose replays would not note that scales are "
            "due for an update: calibrate before the capture, and capture outside of fp8_autocast(calibrating=True)"
        )
    member.products.trains = True
    with torch.no_grad():
        for tensor, role in ((x, Role.INPUT), (weight, Role.WEIGHT)):
            if tensor.numel():
                member.begin_cast(role)
                newest = member.history(role)[0][0]
                newest.copy_(torch.fmax(newest, tensor.detach().abs().amax().float()))
                member.end_cast(role)
