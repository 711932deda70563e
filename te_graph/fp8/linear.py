"""A linear layer that multiplies in FP8 inside ``fp8_autocast``."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812: torch's own name for it
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from te_graph import _C
from te_graph.common.before_capture import ReadyForCapture
from te_graph.fp8.autocast import current_region, fp8_autocast, note_region
from te_graph.fp8.recomputation import Checkpoints, FirstCall, may_be_checkpointed
from te_graph.fp8.scaling_scope import INPUT, WEIGHT, Member, new_state

_log = logging.getLogger("te_graph")
MULTIPLE = 16  # of features, which FP8 tensor cores want
_EXTRA_STATE = "_extra_state"  # torch's key for what get_extra_state returns


class Linear(nn.Linear, ReadyForCapture):
    """``y = x W^T + b``, as ``torch.nn.Linear``; inside ``fp8_autocast`` all three products of forward and backward are
    made of FP8 operands.

    Inputs, weights and gradients are cast by the region's recipe; products are added up in float32 and rounded once.
    Weights are cast when they have changed, all those of a scope in one launch. Any number of tokens will do. Where 16
    does not divide both numbers of features, the layer computes in high precision, and says so once. On the CPU, and on
    GPUs without FP8, products are made in float32 of the same FP8 operands.

    Without a recorded gradient nothing is noted of the scales: an evaluation changes no state.

    Args:
        in_features, out_features, bias, device, dtype: as of ``torch.nn.Linear``.
        params_dtype: another name of ``dtype``.
        return_bias: return (y without the bias, bias).

    Raises:
        TypeError: both ``dtype`` and ``params_dtype``. In a call, inside a region: an input that is not of the weight's
            dtype, without ``torch.autocast``; a weight that is sharded.
        ValueError: in a call, inside a region: a weight on another device than the input; float16 under
            ``torch.autocast``.

    Stream and capture: a call launches one cast and one product, a backward a cast and two products, on the current
        stream; allocates what they write. A cast of all weights comes first where one has changed, an update of the
        scales where a module is called twice without one between.
    """

    _fp8: Member | None
    _loaded_state: Tensor | None  # [3, ...] for the member to come

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
    ) -> None:
        if dtype is not None and params_dtype is not None:
            raise TypeError("te_graph.Linear: expected dtype or params_dtype, which mean the same, got both")
        super().__init__(in_features, out_features, bias, device, dtype if params_dtype is None else params_dtype)
        self._begin()
        self.return_bias = return_bias

    def _begin(self) -> None:
        """Begin without FP8 state; all that it has beside ``torch.nn.Linear``."""
        self.return_bias = False
        self._fp8, self._loaded_state, self._has_told_misfit = None, None, False

    def _end(self) -> None:
        """Have no more than ``torch.nn.Linear``."""
        for name in ("return_bias", "_fp8", "_loaded_state", "_has_told_misfit"):
            del self.__dict__[name]

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """``input`` [..., in] -> [..., out], of its dtype or that of ``torch.autocast``."""
        bias = None if self.return_bias else self.bias
        note_region()
        y = _in_fp8(self, input, bias)
        if y is None:
            y = F.linear(input, self.weight, bias)
        return (y, self.bias) if self.return_bias else y

    def make_ready_for_capture(self) -> None:
        """Have a place in the scope of the present region, and cast weights."""
        region = current_region()
        if region is not None and region.enabled:
            member = self._fp8
            if (
                member is None
                or member.scope is not region.scope_on(self.weight.device)
                or not member.fits(self.weight)
            ):
                _member_of(self, region)
        if self._fp8 is not None and self._fp8.fits(self.weight):
            self._fp8.scope.cast_weights(torch.is_grad_enabled())

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which has scales and FP8 weights of its own."""
        return {**self.__dict__, "_fp8": None, "_loaded_state": self.get_extra_state()}

    def get_extra_state(self) -> Tensor:
        """The scales and histories, [3, 8 + at least 1024] fp32 (``Member.state``)."""
        if self._fp8 is not None:
            return self._fp8.state()
        return new_state(self.weight.device) if self._loaded_state is None else self._loaded_state

    def set_extra_state(self, state: Tensor) -> None:
        """Take what ``get_extra_state`` returned, here or elsewhere."""
        if self._fp8 is None:
            self._loaded_state = state.detach().clone()
        else:
            with torch.no_grad():
                self._fp8.load_(state)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        """A checkpoint of ``torch.nn.Linear`` has all that is needed."""
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing = args[2]
        with contextlib.suppress(ValueError):
            missing.remove(f"{prefix}{_EXTRA_STATE}")


def _in_fp8(module: Linear, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """The product of ``module`` for x [..., in], with bias [out] or without; None where FP8 is off or does not fit."""
    checkpoints = Checkpoints() if may_be_checkpointed() else None
    if checkpoints is not None and (first := checkpoints.recall(module)) is not None:
        member = module._fp8
        checkpoints.note(module, first)
        return member.linear.forward(x, module.weight, bias, first.dtype, False, first.scale)
    region = current_region()
    if region is None or not (region.enabled or region.calibrating):
        return None
    weight, member = module.weight, module._fp8
    if member is None or member.scope is not region.scope_on(weight.device) or not member.fits(weight):
        member = _member_of(module, region)
        if member is None:
            return None
    if not region.enabled:
        _calibrate(member, x, weight)
        return None
    dtype = _dtype_of_result(x, weight)
    is_training = torch.is_grad_enabled() or (checkpoints is not None and bool(checkpoints.noting))
    if not member.linear.is_cast(weight, is_training):
        member.scope.cast_weights(is_training, is_noted=not _C.HostSteps.is_noting())
    if checkpoints is not None and checkpoints.noting:
        scale = member.linear.begin_input_cast()
        checkpoints.note(module, FirstCall(scale, dtype))
        return member.linear.forward(x, weight, bias, dtype, True, scale)
    return member.linear.forward(x, weight, bias, dtype, is_training, None)


def _member_of(module: Linear, region: fp8_autocast) -> Member | None:
    """What ``module`` has in the scope of ``region``, made where it has nothing there; None where FP8 does not fit."""
    weight = module.weight
    if is_traceable_wrapper_subclass(weight) or hasattr(weight, "ds_id"):
        raise TypeError(
            f"te_graph.Linear: expected a weight that is whole on this rank, got {type(weight).__name__}, as FSDP, "
            "DTensor or ZeRO-3 make them: compute this layer outside of fp8_autocast, or keep it out of the sharding"
        )
    if any(size % MULTIPLE for size in weight.shape) or weight.numel() == 0:
        if not module._has_told_misfit:
            module._has_told_misfit = True
            _log.warning(
                "te_graph.Linear(%d, %d) computes in high precision: FP8 products want numbers of features that %d "
                "divides",
                module.in_features,
                module.out_features,
                MULTIPLE,
            )
        return None
    if _C.HostSteps.is_noting():
        raise RuntimeError(
            "te_graph.Linear: expected a layer that was called in fp8_autocast before it is captured in it, got the first "
            "call of one that the captured code does not lead to: call it once outside of the capture"
        )
    state = module.get_extra_state() if module._fp8 is not None or module._loaded_state is not None else None
    module._fp8 = region.scope_on(weight.device).add(module)
    if state is not None:
        with torch.no_grad():
            module._fp8.load_(state)
    module._loaded_state = None
    return module._fp8


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
            f"te_graph.Linear: expected an input of dtype {weight.dtype}, that of the weight, got {x.dtype}; cast it, or "
            "call the layer under torch.autocast"
        )
    return x.dtype


def _calibrate(member: Member, x: Tensor, weight: Tensor) -> None:
    """Record the magnitudes of x [..., in] and weight [out, in], which are not cast."""
    if not member.scope.is_delayed:
        return
    with torch.no_grad():
        for tensor, number in ((x, INPUT), (weight, WEIGHT)):
            if tensor.numel():
                member.use(number)
                newest = member.history(number)[0][0]
                newest.copy_(torch.maximum(newest, tensor.detach().abs().amax().float()))
