"""A norm and the MLP behind it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from te_graph.collectives.peer_group import PeerGroup
from te_graph.common.opaque import opaque
from te_graph.common.whole_layer import WholeLayer
from te_graph.fp8.activation import Activation
from te_graph.fp8.engine_checkpoint import NORM_NAMES, rename_keys_
from te_graph.fp8.fused import Stage, run_stages
from te_graph.fp8.linear import Linear
from te_graph.fp8.norm import Norm

_ENGINE_NAMES = {
    **NORM_NAMES,
    "fc1_weight": "fc1.weight",
    "fc1_bias": "fc1.bias",
    "fc2_weight": "fc2.weight",
    "fc2_bias": "fc2.bias",
}


class LayerNormMLP(nn.Module, WholeLayer):
    """``y = act(norm(x) W1^T + b1) W2^T + b2``, and with a residual that of x + residual.

    Inside ``fp8_autocast`` the norm and the activation are cast to FP8 where they are made, and so is the gradient of
    the activation's input: nothing of them is written in high precision. Outside, and where the layer is split over
    ranks, it is a norm, an activation and two ``te_graph.Linear``.

    Args:
        hidden_size: features of input and result.
        ffn_hidden_size: features between the two layers, of the whole layer.
        eps, normalization, zero_centered_gamma: as of ``te_graph.LayerNormLinear``.
        bias, device, dtype, params_dtype, fuse_wgrad_accumulation: as of ``te_graph.Linear``, for both.
        activation: "gelu" (by tanh, as TransformerEngine's), "gelu_erf", "relu", "silu"; gated, of the first half of
            2 * ``ffn_hidden_size`` features, times the second one: "geglu", "geglu_erf", "reglu", "swiglu".
        set_parallel_mode: split the first layer by columns and the second one by rows, over ``tp_group``, with
            ``sequence_parallel`` as of ``te_graph.Linear``. Of gated activations a rank has rows of both halves.

    Attributes:
        layer_norm: the norm.
        fc1, fc2: the ``te_graph.Linear``.
        activation: between them.

    Raises:
        TypeError, ValueError, RuntimeError: as of ``te_graph.LayerNormLinear``; an activation of another name.

    Stream and capture: inside a region a call launches the statistics of rows, two casts and two products; a backward a
        cast with column sums, one of the activation's gradient, four products, and the norm's. Else as
        ``te_graph.LayerNormLinear``.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        params_dtype: torch.dtype | None = None,
        fuse_wgrad_accumulation: bool = False,
        set_parallel_mode: bool = False,
        tp_group: PeerGroup | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.activation = Activation(activation)
        options = {
            "bias": bias,
            "device": device,
            "dtype": dtype,
            "params_dtype": params_dtype,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "tp_group": tp_group,
            "sequence_parallel": sequence_parallel,
        }
        modes = ("column", "row") if set_parallel_mode else (None, None)
        halves = 2 if self.activation.is_gated else 1
        self.fc1 = Linear(hidden_size, halves * ffn_hidden_size, parallel_mode=modes[0], stride=halves, **options)
        self.fc2 = Linear(ffn_hidden_size, hidden_size, parallel_mode=modes[1], **options)
        self.hidden_size, kept = hidden_size, self.fc1.weight
        self.layer_norm = Norm(hidden_size, eps, normalization, zero_centered_gamma, kept.device, kept.dtype)

    @opaque  # as of Linear
    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """``y``, and with a residual (y, input + residual).

        Args:
            input: [..., hidden_size], as of ``te_graph.Linear``. Not mutated.
            residual: [..., hidden_size], of the same shape, or None, as of ``te_graph.LayerNormLinear``. Not mutated.

        Returns:
            [..., hidden_size], new; the sum [..., hidden_size], new.

        Raises:
            TypeError, ValueError, RuntimeError: as the class says.

        Stream and capture: as the class says.
        """
        y, total = run_stages("te_graph.LayerNormMLP", self.stages(), input, residual, self.hidden_size)
        return y if residual is None else (y, total)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        """From checkpoints of TransformerEngine's, too."""
        rename_keys_(state_dict, prefix, _ENGINE_NAMES)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def stages(self) -> list[Stage]:
        """Its parts, for a layer that fuses them with its own."""
        return [Stage(self.layer_norm, self.fc1), Stage(self.activation, self.fc2)]
