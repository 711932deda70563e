"""Queries, keys and values, which one product makes, taken apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def split_qkv(qkv: Tensor, groups: int, heads_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each group of ``qkv`` [a, b, groups * (heads_per_group + 2) * dim] the queries, the key and the value.

    Returns:
        [a, b, groups * heads_per_group, dim], and [a, b, groups, dim] twice; views, but for several queries a group.
    """
    parts = qkv.unflatten(-1, (groups, heads_per_group + 2, -1)).split([heads_per_group, 1, 1], dim=3)
    query, key, value = (part.flatten(2, 3) for part in parts)
    return query, key, value


class SplitQKV(torch.autograd.Function):
    """``split_qkv`` whose gradients are put side by side by one launch."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, groups: int, heads_per_group: int) -> tuple[Tensor, Tensor, Tensor]:
        """As ``split_qkv``, [a, b, groups * (heads_per_group + 2) * dim] -> [a, b, heads, dim] each."""
        return split_qkv(qkv, groups, heads_per_group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """grads [a, b, heads, dim] each -> [a, b, groups * (heads_per_group + 2) * dim]."""
        return torch.ops.te_graph.concat_qkv(*grads), None, None
