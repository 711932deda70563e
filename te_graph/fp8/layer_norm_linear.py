"""A norm and the linear layer behind it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from te_graph.collectives.peer_group import PeerGroup
from te_graph.common.opaque import opaque
from te_graph.common.whole_layer import WholeLayer
from te_graph.fp8.engine_checkpoint import NORM_NAMES, rename_keys_
from te_graph.fp8.fused import Stage, run_stages
from te_graph.fp8.linear import Linear
from te_graph.fp8.norm import Norm

_ENGINE_NAMES = {**NORM_NAMES, "weight": "linear.weight", "bias": "linear.bias"}


class LayerNormLinear(nn.Module, WholeLayer):
    """``y = norm(x) W^T + b``, and with a residual ``y = norm(x + residual) W^T + b``.

    Inside ``fp8_autocast`` the norm is cast to FP8 where it is made, with the addition before it: nothing of it is
    written in high precision but the sum. Outside, and where the layer is split over ranks, it is a norm and a
    ``te_graph.Linear``. The layer norm's sums have a fixed order of their own (csrc/fp8/layer_norm.h), so that its bits
    may differ from those of ``torch.nn.functional.layer_norm``.

    Args:
        in_features, out_features, bias, device, dtype, params_dtype, fuse_wgrad_accumulation, parallel_mode, tp_group,
            sequence_parallel: as of ``te_graph.Linear``; ``parallel_mode`` is "column" or None.
        eps: added to the variance.
        normalization: "LayerNorm" or "RMSNorm".
        zero_centered_gamma: the norm's weight is what is added to 1, and begins at zero.

    Attributes:
        layer_norm: the norm; ``weight`` [in], and ``bias`` [in] or None.
        linear: the ``te_graph.Linear``.

    Raises:
        TypeError, ValueError, RuntimeError: as of ``te_graph.Linear``; ``parallel_mode`` is "row"; a residual that is
            not of the input's shape and device.

    Stream and capture: inside a region a call launches the statistics of rows (with the addition), one cast and one
        product; under current scaling a memset and a kernel that finds the scale between them. A backward launches a
        cast with column sums, two products, sums of rows, and the norm's gradients with theirs. Else as
        ``te_graph.Linear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        fuse_wgrad_accumulation: bool = False,
        parallel_mode: str | None = None,
        tp_group: PeerGroup | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        if parallel_mode == "row":
            raise ValueError("te_graph.LayerNormLinear: expected parallel_mode 'column' or None, got 'row'")
        self.linear = Linear(
            in_features,
            out_features,
            bias,
            device,
            dtype,
            params_dtype=params_dtype,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            parallel_mode=parallel_mode,
            tp_group=tp_group,
            sequence_parallel=sequence_parallel,
        )
        self.in_features, kept = in_features, self.linear.weight
        self.layer_norm = Norm(in_features, eps, normalization, zero_centered_gamma, kept.device, kept.dtype)

    @opaque  # as of Linear
    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """``y``, and with a residual (y, input + residual).

        Args:
            input: [..., in], as of ``te_graph.Linear``. Not mutated.
            residual: [..., in], of the same shape, or None. Of another dtype it is added as torch adds it, and the norm
                is not fused. Not mutated.

        Returns:
            [..., out], new; the sum [..., in], new.

        Raises:
            TypeError, ValueError, RuntimeError: as the class says.

        Stream and capture: as the class says.
        """
        stages = [Stage(self.layer_norm, self.linear)]
        y, total = run_stages("te_graph.LayerNormLinear", stages, input, residual, self.in_features)
        return y if residual is None else (y, total)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        """From checkpoints of TransformerEngine's, too."""
        rename_keys_(state_dict, prefix, _ENGINE_NAMES)
        super()._load_from_state_dict(state_dict, prefix, *args)
