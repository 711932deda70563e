"""Optimizers that would step flat parameters without seeing their gradients."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from te_graph.common.gradient_state import flat_of, gradient_state
from te_graph.flat.optimizer import FlatOptimizer


@functools.cache
def refuse_foreign_optimizers() -> None:
    """From now on a step of an optimizer raises where it would pass over gradients in ``main_grad``, or would step
    whole parameters of which this rank has reduced a part."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    if isinstance(optimizer, FlatOptimizer):
        return
    flats = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            flat = flat_of(parameter)
            if flat is None:
                continue
            flats.add(flat)
            gradient = gradient_state(parameter).flat_gradient
            is_passed_over = parameter.grad is None and not gradient.is_missing()
            if is_passed_over or (flat.sharding_group is not None and not gradient.is_missing()):
                where = "lie in main_grad" if is_passed_over else "are reduced on this rank in part only"
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step: gradients of flat parameters {where}, which it does not know: "
                    f"make it with FlatParameters.optimizer({type(optimizer).__name__}, ...)"
                )
    for flat in flats:
        flat.expect_reduced(f"{type(optimizer).__name__}.step")
