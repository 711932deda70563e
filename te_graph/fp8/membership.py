"""Which member of which scope a module computes with."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_graph import _C
from te_graph.common.capture_state import is_recording
from te_graph.common.replay_checks import is_collecting
from te_graph.fp8.autocast import fp8_autocast
from te_graph.fp8.fp8_module import FP8Module
from te_graph.fp8.layer_state import has_state
from te_graph.fp8.loaded_state import untrained_state_of
from te_graph.fp8.marked_state import MarkedState
from te_graph.fp8.member import WEIGHT_DTYPES, Member
from te_graph.fp8.scaling_scope import ScalingScope, scaling_scopes
from te_graph.fp8.state_form import new_state
from te_graph.fp8.weight_mark import mark_of_plain
from te_graph.graphs.guards.pure_hooks import computed_by_hooks

_log = logging.getLogger("te_graph")
FEATURES_MULTIPLE = 16  # which FP8 tensor cores want
_FSDP, _ZERO = "_is_fsdp_managed_module", "ds_id"  # marks of modules (FSDP 1 and 2) and weights (DeepSpeed)


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
    if weight.dtype not in WEIGHT_DTYPES:
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
        member.was_called_to_train |= records_amax
        return member
    if not _can_be_multiplied(module, weight):
        return None
    if not records_amax and has_state(module):
        return _member_to_evaluate(module, scope, weight)
    _refuse_first_call_in_capture(weight.device)
    moved = _state_to_move(module, weight)
    before, evaluated = member or module.fp8_evaluated, _evaluated_to_keep(module, scope, weight)
    module.fp8 = evaluated if evaluated is not None and evaluated.scope is scope else scope.add(module)
    module.fp8_evaluated, module.loaded_state = evaluated, None
    module.fp8.own_weight = None if before is None else before.own_weight
    module.fp8.was_called_to_train |= records_amax
    if moved is not None:
        with torch.no_grad():
            module.fp8.load_(moved)
    if scaling_scopes.remembers_first_states():
        module.fp8.first_state = moved or MarkedState(new_state(weight.device), None)
    if _C.HostSteps.is_noting():
        scope.cast_weights(module.fp8, records_amax=False, is_before=True)
    return module.fp8


def check_captured_weight(module: FP8Module, records_amax: bool) -> None:
    """Refuse to capture a call of ``module`` whose weight hooks compute before each call, where a graph cannot cast it
    as eager execution does."""
    if not any(attribute.name == "weight" for attribute in computed_by_hooks(module)):
        return
    computed = "one that hooks compute before each call (torch.nn.utils.prune, weight_norm, spectral_norm)"
    if records_amax:
        raise RuntimeError(
            f"te_graph.Linear: expected a weight that is a parameter, got {computed}, whose casts in a graph delayed "
            "scaling cannot follow: make it a parameter (prune.remove), use te_graph.Float8CurrentScaling, or leave "
            "the layer eager"
        )
    if module.fp8 is None:
        raise RuntimeError(
            f"te_graph.Linear: expected a weight that is a parameter, got {computed}, in the first call of its layer "
            "in fp8_autocast: call the model once in it before the capture"
        )


def check_own_weight(member: Member, weight: Tensor) -> None:
    """Refuse to capture a call that trains with a ``weight`` [out, in] or [in, out] under delayed scaling which is not
    that of the module: before a replay that one is cast and recorded. Behind a call with that one the graph does so
    with others, where it calls the layer with them."""
    own = None if member.own_weight is None else member.own_weight()
    if own is not None and own is not weight and not member.products.is_noted():
        raise RuntimeError(
            "te_graph.Linear: expected the weight that the layer had before the capture, since delayed scaling casts "
            "and records it before each replay, got another tensor, as torch.func.functional_call gives it or what is "
            "captured computes or sets: give the layer that weight before, use te_graph.Float8CurrentScaling, or leave "
            "the layer eager"
        )


def _can_be_multiplied(module: FP8Module, weight: Tensor) -> bool:
    """Whether ``weight`` [out, in] of ``module`` can be, in FP8; says so once where not."""
    if is_traceable_wrapper_subclass(weight):
        raise TypeError(_sharded_message(type(weight).__name__))
    if not any(size % FEATURES_MULTIPLE for size in weight.shape) and weight.numel() > 0:
        return True
    if not module.has_told_misfit:
        module.has_told_misfit = True
        _log.warning(
            "te_graph.Linear(%d, %d) computes in high precision: FP8 products want numbers of features that %d divides",
            *(*reversed(weight.shape), FEATURES_MULTIPLE),
        )
    return False


def _refuse_first_call_in_capture(device: torch.device) -> None:
    if is_recording() or is_collecting() or _C.is_stream_capturing(device):
        raise RuntimeError(
            "te_graph.Linear: expected a layer that was called in fp8_autocast, by the recipe of the capture, before "
            "it is captured, got the first call by that recipe: call it once outside of the capture"
        )


def _state_to_move(module: FP8Module, weight: Tensor) -> MarkedState | None:
    """What ``module``, of ``weight`` [out, in] or [in, out], takes to a new member."""
    untrained = untrained_state_of(module)
    if untrained is not None or module.fp8 is None:
        return untrained
    module.fp8.update_if_due()  # by the recipe that it is due by, whether or not others have led to it before
    return MarkedState(module.fp8.state(), mark_of_plain(weight))


def _member_to_evaluate(module: FP8Module, scope: ScalingScope, weight: Tensor) -> Member:
    """One in ``scope``, with the scales that ``module``, of ``weight`` [out, in], has elsewhere."""
    member = module.fp8_evaluated
    if member is None or member.scope is not scope or not member.fits(weight):
        _refuse_first_call_in_capture(weight.device)
        member = module.fp8_evaluated = scope.add(module)
        untrained = untrained_state_of(module)
        if untrained is not None:
            with torch.no_grad():
                member.load_(untrained)
        if module.fp8 is not None:
            member.follow(module.fp8)
    member.take_scales_()
    return member


def _evaluated_to_keep(module: FP8Module, scope: ScalingScope, weight: Tensor) -> Member | None:
    """What ``module``, of ``weight`` [out, in] or [in, out], has evaluated with, if it can go on with it when it trains
    in ``scope`` from now on, as graphs of evaluations do: it has scales of no history, or becomes what trains. Scales
    that it is to take from another member, or no longer, would be copied in such graphs."""
    evaluated = module.fp8_evaluated
    if evaluated is None or not evaluated.fits(weight):
        return None
    if evaluated.scope is not scope:
        return None if evaluated.scope.is_delayed else evaluated
    fuses = module.fuse_wgrad_accumulation
    return evaluated if evaluated.fuses_wgrad_accumulation == fuses and not evaluated.follows else None


def _sharded_message(got: str) -> str:
    return (
        f"te_graph.Linear: expected a weight that is whole on this rank, got {got}, as FSDP, DTensor or ZeRO-3 make "
        "them: compute this layer outside of fp8_autocast, or keep it out of the sharding"
    )
