"""A transformer layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_graph.collectives.peer_group import PeerGroup
from te_graph.common.opaque import opaque
from te_graph.fp8.fused import Stage, has_no_hooks, run_stages
from te_graph.fp8.layer_norm_mlp import LayerNormMLP
from te_graph.fp8.multihead_attention import MASK_TYPES, MultiheadAttention
from te_graph.fp8.tensor_arguments import check_tensors


class TransformerLayer(nn.Module):
    """``h = x + proj(attention(qkv(norm(x))))``, ``y = h + mlp(norm(h))``, with TransformerEngine's names.

    Inside ``fp8_autocast`` it is two fused parts around torch's attention: norm and first product; projection, sum,
    norm and MLP. Outside, with dropout, and where the layer is split over ranks, it is its modules one after the other,
    with the same bits where both are possible.

    Args:
        hidden_size: features of input and result.
        ffn_hidden_size: as of ``te_graph.LayerNormMLP``.
        num_attention_heads: heads of queries.
        num_gqa_groups: heads of keys and values; None: as many.
        layernorm_epsilon: added to variances.
        hidden_dropout, attention_dropout: probabilities, in training, of features of what is added to the residual, and
            of attention weights.
        kv_channels: features of a head; None: ``hidden_size / num_attention_heads``.
        self_attn_mask_type: "causal", "no_mask", or "arbitrary", which takes the call's mask.
        normalization, zero_centered_gamma, activation, bias, fuse_wgrad_accumulation: as of ``te_graph.LayerNormMLP``.
        attn_input_format: "sbhd" for [seq, batch, hidden], or "bshd", for [batch, seq, hidden], which needs a copy less
            behind the attention.
        params_dtype, device: of the parameters.
        set_parallel_mode, tp_group, sequence_parallel: split over ranks, as ``te_graph.Linear`` is.

    Attributes:
        self_attention: with ``layernorm_qkv`` and ``proj``.
        layernorm_mlp: the ``te_graph.LayerNormMLP``.

    Raises:
        TypeError, ValueError, RuntimeError: as of ``te_graph.LayerNormMLP``; numbers that do not go together; a mask
            where none is wanted, or none where one is; "bshd" with ``sequence_parallel``.

    Stream and capture: as ``te_graph.LayerNormLinear`` and ``te_graph.LayerNormMLP``, and what torch's attention does;
        dropout draws random numbers.
    """

    __constants__ = ("hidden_size", "self_attn_mask_type", "hidden_dropout")

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        activation: str = "gelu",
        bias: bool = True,
        attn_input_format: str = "sbhd",
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        fuse_wgrad_accumulation: bool = False,
        set_parallel_mode: bool = False,
        tp_group: PeerGroup | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        _check_mask_type(self_attn_mask_type)
        self.hidden_size = hidden_size
        self.self_attn_mask_type, self.hidden_dropout = self_attn_mask_type, hidden_dropout
        options: dict[str, Any] = {
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "bias": bias,
            "device": device,
            "dtype": params_dtype,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "set_parallel_mode": set_parallel_mode,
            "tp_group": tp_group,
            "sequence_parallel": sequence_parallel,
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            num_gqa_groups,
            kv_channels,
            attention_dropout,
            attn_input_format,
            layernorm_epsilon,
            **options,
        )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, activation=activation, **options
        )

    @opaque  # as of Linear
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        self_attn_mask_type: str | None = None,
        rotary_pos_emb: Tensor | None = None,
    ) -> Tensor:
        """``y``.

        Args:
            hidden_states: [seq, batch, hidden_size], or [batch, seq, hidden_size]. Not mutated.
            attention_mask: [batch or 1, 1, seq, seq] bool, true where a query does not look at a key, with "arbitrary".
            self_attn_mask_type: other than that of the layer; None: that.
            rotary_pos_emb: [at least seq, 1, 1, dim] float32, angles of ``te_graph.RotaryPositionEmbedding``, or None.

        Returns:
            As ``hidden_states``, new.

        Raises:
            TypeError, ValueError, RuntimeError: as the class says.

        Stream and capture: as the class says.
        """
        mask_type = self.self_attn_mask_type if self_attn_mask_type is None else self_attn_mask_type
        _check_mask_type(mask_type)
        if (attention_mask is not None) != (mask_type == "arbitrary"):
            raise ValueError(
                "te_graph.TransformerLayer: expected an attention_mask with self_attn_mask_type='arbitrary' and none "
                f"otherwise, got {'one' if attention_mask is not None else 'none'} with {mask_type!r}"
            )
        try:
            if attention_mask is not None and attention_mask.dtype != torch.bool:
                raise TypeError(
                    "te_graph.TransformerLayer: expected an attention_mask of torch.bool, true where a query does not "
                    f"look at a key, got {attention_mask.dtype}"
                )
            attention, mlp, given = self.self_attention, self.layernorm_mlp, (attention_mask, mask_type, rotary_pos_emb)
            drops = self.training and self.hidden_dropout > 0
            parts = ((attention, MultiheadAttention), (mlp, LayerNormMLP))
            if drops or not all(type(part) is kind and has_no_hooks(part) for part, kind in parts):
                attended = self._dropped(attention(hidden_states, *given))
                y, total = mlp(attended, hidden_states)
                return total + self._dropped(y)
            context = attention.attend(attention.layernorm_qkv(hidden_states), *given)
            stages = [Stage(None, attention.proj), *mlp.stages()]
            y, total = run_stages("te_graph.TransformerLayer", stages, context, hidden_states, self.hidden_size)
            return total + y
        except (TypeError, AttributeError):
            given = {"attention_mask": attention_mask, "rotary_pos_emb": rotary_pos_emb}
            check_tensors("te_graph.TransformerLayer", hidden_states=hidden_states, may_be_none=tuple(given), **given)
            raise

    def _dropped(self, x: Tensor) -> Tensor:
        """x [...] without some of its elements, in training."""
        return F.dropout(x, self.hidden_dropout, self.training)


def _check_mask_type(name: str) -> None:
    if name not in MASK_TYPES:
        raise ValueError(
            f"te_graph.TransformerLayer: expected self_attn_mask_type to be one of {list(MASK_TYPES)}, got {name!r}"
        )
