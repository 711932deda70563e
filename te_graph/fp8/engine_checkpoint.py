"""Keys of TransformerEngine's checkpoints, in the words of te_graph's modules."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

EXTRA_STATE = "_extra_state"  # torch's key for what get_extra_state returns
NORM_NAMES = {"layer_norm_weight": "layer_norm.weight", "layer_norm_bias": "layer_norm.bias"}


def rename_keys_(state_dict: dict[str, Any], prefix: str, names: Mapping[str, str]) -> None:
    """Give what ``state_dict`` has of a module of TransformerEngine the keys of that of te_graph at ``prefix``.

    Args:
        state_dict: of tensors of any shapes. Mutated.
        prefix: of the module.
        names: by TransformerEngine's ones.
    """
    for name, own_name in names.items():
        if f"{prefix}{name}" in state_dict:
            state_dict[f"{prefix}{own_name}"] = state_dict.pop(f"{prefix}{name}")
    drop_extra_state_(state_dict, prefix)


def drop_extra_state_(state_dict: dict[str, Any], prefix: str) -> None:
    """Leave out TransformerEngine's extra state of the module at ``prefix``: bytes, of a pickle where its scales are
    delayed, which may run any code."""
    state = state_dict.get(f"{prefix}{EXTRA_STATE}")
    if isinstance(state, io.BytesIO) or (isinstance(state, Tensor) and state.dtype == torch.uint8):
        del state_dict[f"{prefix}{EXTRA_STATE}"]


def join_qkv_(state_dict: dict[str, Any], prefix: str, groups: int) -> None:
    """Make one weight and bias of three.

    Args:
        state_dict: may have ``query_weight``, ``key_weight``, ``value_weight`` [rows, in] and biases [rows] of the
            module at ``prefix``. Mutated: has ``weight`` and ``bias`` instead, by groups of heads.
        prefix: of the module.
        groups: that divide the rows of each.
    """
    for kind in ("weight", "bias"):
        keys = [f"{prefix}{part}_{kind}" for part in ("query", "key", "value")]
        parts = [state_dict.get(key) for key in keys]
        if all(isinstance(part, Tensor) and part.dim() and part.shape[0] % groups == 0 for part in parts):
            by_groups = [state_dict.pop(key).unflatten(0, (groups, -1)) for key in keys]
            state_dict[f"{prefix}{kind}"] = torch.cat(by_groups, dim=1).flatten(0, 1)
