"""Copies of tensors that lie in memory as the originals do."""

from __future__ import annotations

import torch
from torch import Tensor


def static_copy(sample: Tensor) -> Tensor:
    """A copy of ``sample`` [...] in memory of its own, with its layout if that is dense."""
    copy = torch.empty_like(sample, requires_grad=False).copy_(sample.detach())
    return copy.requires_grad_(sample.requires_grad)


def copy_with_gaps(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` [...] and of what lies between its elements, with the same strides."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.detach().as_strided([last + 1 if tensor.numel() else 0], [1]).clone()
    return torch.empty_like(memory).set_(memory.untyped_storage(), 0, tensor.shape, tensor.stride())
