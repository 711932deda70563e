"""The attention of a transformer layer: a norm with queries, keys and values, torch's attention, and a projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from te_graph.collectives.peer_group import PeerGroup
from te_graph.fp8.autocast import is_in_region
from te_graph.fp8.engine_checkpoint import drop_extra_state_, join_qkv_
from te_graph.fp8.layer_norm_linear import LayerNormLinear
from te_graph.fp8.linear import Linear
from te_graph.fp8.rotary import apply_rotary_pos_emb
from te_graph.fp8.split_qkv import SplitQKV, split_qkv

MASK_TYPES = ("causal", "no_mask", "arbitrary")
FORMATS = ("sbhd", "bshd")


class MultiheadAttention(nn.Module):
    """Self-attention, without what is added to it and dropped of it afterwards.

    Rows of the first weight are those of each group of heads one after the other: of its queries, its key, its value,
    as TransformerEngine and Megatron-LM have them, so that ranks have whole groups.

    Args:
        hidden_size: features of input and result.
        num_attention_heads: of queries, of all ranks.
        num_gqa_groups: of keys and values; None: as many.
        kv_channels: features of a head; None: hidden_size / num_attention_heads.
        attention_dropout: the probability that an attention weight is dropped in training.
        attn_input_format: "sbhd" for [seq, batch, hidden], or "bshd".
        layernorm_epsilon, normalization, zero_centered_gamma: as ``eps`` and the like of ``te_graph.LayerNormLinear``.
        bias, device, dtype, fuse_wgrad_accumulation, tp_group, sequence_parallel: as of ``te_graph.Linear``.
        set_parallel_mode: split over the ranks of ``tp_group``.

    Attributes:
        layernorm_qkv: the ``te_graph.LayerNormLinear``.
        proj: the ``te_graph.Linear``.

    Raises:
        ValueError: numbers that do not go together, names that are none.
    """

    __constants__ = ("head_dim", "groups", "heads_per_group", "attention_dropout", "attn_input_format")

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        attn_input_format: str = "sbhd",
        layernorm_epsilon: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        fuse_wgrad_accumulation: bool = False,
        set_parallel_mode: bool = False,
        tp_group: PeerGroup | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        if kv_channels is None and hidden_size % num_attention_heads:
            raise ValueError(
                f"te_graph.TransformerLayer: expected hidden_size that the {num_attention_heads} heads divide, or "
                f"kv_channels, got {hidden_size}"
            )
        ranks = tp_group.world_size if set_parallel_mode and tp_group is not None else 1
        if num_attention_heads % groups or groups % ranks:
            raise ValueError(
                f"te_graph.TransformerLayer: expected num_gqa_groups that divides the {num_attention_heads} heads, and "
                f"that the {ranks} ranks divide, got {groups}"
            )
        if attn_input_format not in FORMATS:
            names = " or ".join(map(repr, FORMATS))
            raise ValueError(
                f"te_graph.TransformerLayer: expected attn_input_format {names}, got {attn_input_format!r}"
            )
        if sequence_parallel and attn_input_format != "sbhd":
            raise ValueError(
                "te_graph.TransformerLayer: expected attn_input_format 'sbhd' with sequence_parallel, which splits "
                f"dimension 0 over the ranks, got {attn_input_format!r}"
            )
        self.head_dim = hidden_size // num_attention_heads if kv_channels is None else kv_channels
        self.groups, self.heads_per_group = groups // ranks, num_attention_heads // groups
        self.attention_dropout, self.attn_input_format = attention_dropout, attn_input_format
        modes = ("column", "row") if set_parallel_mode else (None, None)
        options = {
            "bias": bias,
            "device": device,
            "dtype": dtype,
            "fuse_wgrad_accumulation": fuse_wgrad_accumulation,
            "tp_group": tp_group,
            "sequence_parallel": sequence_parallel,
        }
        self.layernorm_qkv = LayerNormLinear(
            hidden_size,
            groups * (self.heads_per_group + 2) * self.head_dim,
            eps=layernorm_epsilon,
            normalization=normalization,
            zero_centered_gamma=zero_centered_gamma,
            parallel_mode=modes[0],
            **options,
        )
        self.proj = Linear(num_attention_heads * self.head_dim, hidden_size, parallel_mode=modes[1], **options)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        self_attn_mask_type: str = "causal",
        rotary_pos_emb: Tensor | None = None,
    ) -> Tensor:
        """The projected attention of hidden_states [seq, batch, hidden] or [batch, seq, hidden], of the same shape."""
        qkv = self.layernorm_qkv(hidden_states)
        return self.proj(self.attend(qkv, attention_mask, self_attn_mask_type, rotary_pos_emb))

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        """From checkpoints of TransformerEngine's, too."""
        join_qkv_(state_dict, f"{prefix}layernorm_qkv.", self.groups)
        drop_extra_state_(state_dict, f"{prefix}core_attention.")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def attend(
        self, qkv: Tensor, attention_mask: Tensor | None, self_attn_mask_type: str, rotary_pos_emb: Tensor | None
    ) -> Tensor:
        """The attention of queries, keys and values, [seq, batch, all of them], or [batch, seq, all of them]; of heads
        one after the other. The mask [batch or 1, 1, seq, seq] is true where nothing is looked at; angles are
        [seq, 1, 1, dim]."""
        split = SplitQKV.apply if is_in_region() else split_qkv
        query, key, value = split(qkv, self.groups, self.heads_per_group)
        is_batch_first = self.attn_input_format == "bshd"
        if is_batch_first:
            query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        # Now [seq, batch, heads, head_dim] each.
        if rotary_pos_emb is not None:
            query, key = (apply_rotary_pos_emb(each, rotary_pos_emb) for each in (query, key))
        result = F.scaled_dot_product_attention(
            *(part.permute(1, 2, 0, 3) for part in (query, key, value)),
            attn_mask=~attention_mask if self_attn_mask_type == "arbitrary" else None,
            dropout_p=self.attention_dropout if self.training else 0.0,
            is_causal=self_attn_mask_type == "causal",
            enable_gqa=self.heads_per_group > 1,
        )  # [batch, heads, seq, head_dim]
        return result.permute(0, 2, 1, 3).flatten(2) if is_batch_first else result.permute(2, 0, 1, 3).flatten(2)
