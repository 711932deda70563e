"""Advice for refusals inside the step of an optimizer: what makes it work on the device alone."""

from __future__ import annotations

import sys

from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Adagrad, Optimizer

_FUSED_ON_CPU_ALONE = (Adagrad,)


def advice() -> str:
    """What to say about the optimizer whose step is running on this thread, by a GradScaler or not; else empty."""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        optimizer = frame.f_locals.get("optimizer") if isinstance(owner, GradScaler) else owner
        if isinstance(optimizer, Optimizer):
            return f"; {_advice_for(optimizer)}"
        frame = frame.f_back
    return ""


def advice_on_change(change: str) -> str:
    """What to say about ``change`` of a Python object at every call; empty where it is of no optimizer's."""
    return "; a GradScaler's step and update belong into one function" if "._per_optimizer_states" in change else ""


def _advice_for(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    is_on_cpu = all(p.device.type == "cpu" for group in optimizer.param_groups for p in group["params"])
    options = ("fused",) if is_on_cpu else ("capturable", "fused")
    if not is_on_cpu and isinstance(optimizer, _FUSED_ON_CPU_ALONE):
        options = ("capturable",)
    for option in options:
        if any(not group.get(option, True) for group in optimizer.param_groups):
            return f"{name}({option}=True) can be captured"
    if is_on_cpu and any(isinstance(group.get("lr"), Tensor) for group in optimizer.param_groups):
        return (
            f"on the CPU a learning rate of {name} that is a tensor is read: give a number, or leave the step outside"
        )
    if is_on_cpu and "capturable" in optimizer.defaults:
        return f"a step of {name} can be captured on a GPU alone, with capturable=True: leave it outside"
    return f"no option lets a step of {name} be captured: leave it outside"
