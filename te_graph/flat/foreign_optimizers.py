"""Optimizers that would step flat parameters without seeing their gradients."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from te_graph.common.gradient_state import expect_whole_gradients
from te_graph.flat.optimizer import FlatOptimizer


@functools.cache
def refuse_foreign_optimizers() -> None:
    """From now on a step of an optimizer raises where it would pass over gradients in ``main_grad``, or would step
    whole parameters of which this rank has reduced a part."""
    register_optimizer_step_pre_hook(_check)
    register_optimizer_step_post_hook(_check_closure)


def _check_closure(optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    """Once more, where gradients have come since."""
    if len(args) > 1 or kwargs.get("closure") is not None:  # the first one is the optimizer
        _check(optimizer, args, kwargs)


def _check(optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    if isinstance(optimizer, FlatOptimizer):
        return
    name = type(optimizer).__name__
    expect_whole_gradients(
        f"{name}.step",
        (parameter for group in optimizer.param_groups for parameter in group["params"]),
        f"make it with FlatParameters.optimizer({name}, ...)",
    )
