"""Loss scaling for gradients that lie in flat buffers, in part on each rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from te_graph.flat.optimizer import FlatOptimizer


class FlatGradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler``, also for the optimizers that ``FlatParameters.optimizer`` makes.

    Those of torch look for gradients in ``.grad``, all of which this rank has. With ``shard="optimizer"`` each rank has
    reduced a part, and with a ``tp_group`` other ranks have other parameters: where one of them finds an infinity all
    skip the step, and all have the same scale. Gradients in ``main_grad`` are found there. Other optimizers are treated
    as by torch's, with whose arguments this is made.

    Stream and capture: as torch's, and an all-reduce of one element over each of these groups. With a fused optimizer
    ``step`` does not wait for the device.
    """

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """As torch's.

        Args:
            optimizer: whose gradients are unscaled, unless ``unscale_`` has been called, and stepped.
            args, kwargs: for its ``step``.

        Returns:
            What its ``step`` returns; None where it is skipped.
        """
        if not isinstance(optimizer, FlatOptimizer):
            return super().step(optimizer, *args, **kwargs)
        optimizer.is_scaled_over_ranks = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer.is_scaled_over_ranks = False

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: Tensor,  # []
        found_inf: Tensor,  # []
        allow_fp16: bool,
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, FlatOptimizer):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        flat = optimizer.flat
        found_inf = found_inf.to(flat.buffers[0].data.device)
        with torch.no_grad(), optimizer.own_gradients("FlatGradScaler.unscale_") as grads:
            if not allow_fp16 and any(grad.dtype == torch.float16 for grad in grads):
                raise ValueError(
                    "FlatGradScaler.unscale_: expected gradients of float32 or bfloat16, got torch.float16"
                )
            if grads:
                torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale.to(found_inf.device))
            flat.max_over_parts_(found_inf)
        return {found_inf.device: found_inf}
