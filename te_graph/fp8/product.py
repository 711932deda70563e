"""The product of a linear layer, in FP8 where the region and the layer let it."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_graph import _C
from te_graph.common.fp8_calls import excuse_region, note_captured_fp8_call
from te_graph.fp8.autocast import current_region, fp8_autocast, note_region
from te_graph.fp8.loaded_state import loaded_modules
from te_graph.fp8.member import Member, check_state, new_state, without_cast
from te_graph.fp8.recomputation import Checkpoints, FirstCall, may_be_checkpointed
from te_graph.fp8.scale_block import INPUT, WEIGHT
from te_graph.fp8.scaling_scope import ScalingScope, scaling_scopes
from te_graph.fp8.weight_mark import WeightMark, plain_weight

_log = logging.getLogger("te_graph")
_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))
MULTIPLE = 16  # of features, which FP8 tensor cores want
_FSDP, _ZERO = "_is_fsdp_managed_module", "ds_id"  # marks of modules (FSDP 1 and 2) and weights (DeepSpeed)


class FP8Module(Protocol):
    """What computes in FP8.

    Attributes:
        weight: [out, in], or [in, out].
        inputs_first: it is [in, out].
        fuse_wgrad_accumulation: the product that is the weight's gradient adds to ``weight.main_grad``.
        fp8: what it has in a scope, with what is known of its scales.
        fp8_evaluated: the same in the scope of evaluations by another recipe, which change nothing of that.
        loaded_state: what was loaded before it had one, [3, n] fp32, behind the mark of the weight at that time.
        has_told_misfit: it has said that it computes in high precision.
    """

    weight: nn.Parameter
    inputs_first: bool
    fuse_wgrad_accumulation: bool
    fp8: Member | None
    fp8_evaluated: Member | None
    loaded_state: tuple[WeightMark | None, Tensor] | None
    has_told_misfit: bool


def product_in_fp8(module: FP8Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """The product of ``module`` for x [..., in] and its weight, [out, in] or [in, out], with bias [out] or without.

    None where FP8 is off or does not fit.
    """
    try:
        member = module.fp8
        if member is not None and member.fuses_wgrad_accumulation == module.fuse_wgrad_accumulation:
            y = member.products.fast_call(x, weight, bias)
            if y is not None:
                return y
        note_region()
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
    if weight.is_meta:  # shapes are those of the plain layer, and there are no values to scale
        excuse_region()
        return None
    checkpoints = Checkpoints() if may_be_checkpointed() else None
    if checkpoints is not None and (first := checkpoints.recall(module)) is not None:
        checkpoints.note(module, first)
        member = first.member
        if member is None:
            return None
        # Others may have computed with the layer in between, such as a teacher with weights of its own.
        if not (member.products.is_cast(weight, False) or _C.HostSteps.is_noting()):
            member.scope.cast_weights(member, records_amax=False)
        return member.products.forward(x, weight, bias, first.dtype, False, first.scale)
    region = current_region()
    if checkpoints is not None and (region is None or not region.enabled):
        checkpoints.note(module, FirstCall())
    if region is None or not (region.enabled or region.calibrating):
        return None
    is_training = torch.is_grad_enabled() or (checkpoints is not None and checkpoints.hides_gradients)
    member = member_of(module, region, is_training or not region.enabled)
    if member is None:
        return None
    if not region.enabled:
        _calibrate(member, x, weight)
        return None
    _check_features(module, x, weight)
    member.products.set_fast_region(region.number)  # for calls that are like this one
    dtype = _dtype_of_result(x, weight)
    is_captured = _C.HostSteps.is_noting()  # then each replay sees to it before, and records the amax
    if is_captured:
        note_captured_fp8_call()
    if not member.products.is_cast(weight, is_training):
        member.scope.cast_weights(member, is_training)
    scale = None
    if checkpoints is not None and checkpoints.noting:
        scale = member.products.begin_input_cast(is_training)
        checkpoints.note(module, FirstCall(member, scale, dtype))
    return member.products.forward(x, weight, bias, dtype, is_training, scale)


def member_of(module: FP8Module, region: fp8_autocast, records_amax: bool) -> Member | None:
    """What ``module`` has in the scope of ``region``, made where it has nothing there; None where FP8 does not fit.

    Args:
        module: gets it.
        region: the present one.
        records_amax: whether the call records amaxes. By another recipe than before, they then begin anew, with what is
            left of the histories; without, the module goes on with these afterwards.
    """
    if is_parametrized(module, "weight"):
        raise TypeError(
            "te_graph.Linear: expected a weight that is a parameter, got one that torch.nn.utils.parametrize computes "
            "at each use: compute this layer outside of fp8_autocast, or remove the parametrization"
        )
    weight, member = module.weight, module.fp8
    # Such weights are whole only while the module is called, and their versions do not tell that they have changed.
    if _FSDP in vars(module):
        raise TypeError(_sharded_message(f"a module of FSDP ({type(module).__name__})"))
    if weight.dtype not in _DTYPES:
        raise TypeError(
            f"te_graph.Linear: expected a weight of float32, float16 or bfloat16, got {weight.dtype}: compute this "
            "layer outside of fp8_autocast, or convert it"
        )
    if hasattr(weight, _ZERO):
        raise TypeError(_sharded_message(type(weight).__name__))
    if weight.is_inference():
        raise TypeError(
            "te_graph.Linear: expected a weight whose changes can be seen, got one that was made in inference mode: "
            "make or load the layer outside of torch.inference_mode()"
        )
    scope = region.scope_on(weight.device)
    is_here = member is not None and member.scope is scope and member.fits(weight)
    if is_here and (not records_amax or member.fuses_wgrad_accumulation == module.fuse_wgrad_accumulation):
        return member
    if not _can_be_multiplied(module, weight):
        return None
    if not records_amax and has_state(module):
        return _member_to_evaluate(module, scope, weight)
    _refuse_first_call_in_capture()
    state, mark = _state_to_move(module, weight)
    module.fp8, module.fp8_evaluated, module.loaded_state = scope.add(module), None, None
    if state is not None:
        module.fp8.untrained_state = state, mark  # which another scope may keep more of
        with torch.no_grad():
            module.fp8.load_(state, mark)
    if scaling_scopes.is_kept():
        module.fp8.first_state = module.fp8.state(), module.fp8.loaded_mark
    return module.fp8


def _can_be_multiplied(module: FP8Module, weight: Tensor) -> bool:
    """Whether ``weight`` [out, in] of ``module`` can be, in FP8; says so once where not."""
    if is_traceable_wrapper_subclass(weight):
        raise TypeError(_sharded_message(type(weight).__name__))
    if not any(size % MULTIPLE for size in weight.shape) and weight.numel() > 0:
        return True
    if not module.has_told_misfit:
        module.has_told_misfit = True
        _log.warning(
            "te_graph.Linear(%d, %d) computes in high precision: FP8 products want numbers of features that %d divides",
            *(*reversed(weight.shape), MULTIPLE),
        )
    return False


def _refuse_first_call_in_capture() -> None:
    if _C.HostSteps.is_noting():
        raise RuntimeError(
            "te_graph.Linear: expected a layer that was called in fp8_autocast before it is captured in it, got the "
            "first call of one that the captured code does not lead to: call it once outside of the capture"
        )


def _state_to_move(module: FP8Module, weight: Tensor) -> tuple[Tensor | None, WeightMark | None]:
    """What ``module``, of ``weight`` [out, in], takes to a new member, [3, n] fp32, with the mark of the weight that
    goes with it."""
    if module.fp8 is not None and module.fp8.untrained_state is not None:
        return module.fp8.untrained_state
    if module.fp8 is not None:
        module.fp8.update_if_due()  # by the rules of the scope that it leaves
        return module.fp8.state(), WeightMark.of(weight)
    if module.loaded_state is not None:
        mark, state = module.loaded_state
        return state, mark
    return None, None


def _member_to_evaluate(module: FP8Module, scope: ScalingScope, weight: Tensor) -> Member:
    """One in ``scope``, with the scales that ``module``, of ``weight`` [out, in], has elsewhere."""
    member = module.fp8_evaluated
    if member is None or member.scope is not scope or not member.fits(weight):
        _refuse_first_call_in_capture()
        member = module.fp8_evaluated = scope.add(module)
        if module.fp8 is not None:
            member.follow(module.fp8)
        else:
            mark, state = module.loaded_state
            with torch.no_grad():
                member.load_(state, mark)
    member.take_scales_()
    return member


def _sharded_message(got: str) -> str:
    return (
        f"te_graph.Linear: expected a weight that is whole on this rank, got {got}, as FSDP, DTensor or ZeRO-3 make "
        "them: compute this layer outside of fp8_autocast, or keep it out of the sharding"
    )


def has_state(module: FP8Module) -> bool:
    """Whether something is known of the scales of ``module``."""
    return module.fp8 is not None or module.loaded_state is not None


def state_of(module: FP8Module) -> Tensor:
    """The scales and histories of ``module``, [3, n] fp32 (``Member.state``); a copy."""
    weight = plain_weight(module)
    if module.fp8 is not None:
        return module.fp8.state()
    if module.loaded_state is None:
        return new_state(torch.device("cpu") if weight is None else weight.device)
    mark, state = module.loaded_state
    return state.clone() if mark is not None and mark.is_of(weight) else without_cast(state)


def load_state_(module: FP8Module, state: Tensor) -> None:
    """Let ``module`` take a ``state`` that ``state_of`` returned, [3, n] fp32, here or elsewhere."""
    if state.is_meta:
        return
    check_state(state)
    mark = WeightMark.of(plain_weight(module))
    module.fp8_evaluated = None
    if module.fp8 is None:
        module.loaded_state = mark, state.detach().clone()
    else:
        with torch.no_grad():
            module.fp8.load_(state, mark)
    loaded_modules().add(module)


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
    with torch.no_grad():
        for tensor, number in ((x, INPUT), (weight, WEIGHT)):
            if tensor.numel():
                member.begin_cast(number)
                newest = member.history(number)[0][0]
                newest.copy_(torch.fmax(newest, tensor.detach().abs().amax().float()))
                member.end_cast(number)
