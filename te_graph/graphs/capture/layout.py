"""How tensors lie in memory, and copies that lie there as the originals do."""

from __future__ import annotations

import torch
from torch import Tensor


def static_copy(sample: Tensor) -> Tensor:
    """A copy of ``sample`` [...] in memory of its own, with its layout if that is dense."""
    copy = torch.empty_like(sample, requires_grad=False).copy_(sample.detach())
    return copy.requires_grad_(sample.requires_grad)


def order_of_dims(tensor: Tensor) -> tuple[int, ...] | None:
    """The dimensions of ``tensor`` [...] as they lie in memory, outermost first; None where one of them is expanded, or
    nothing lies there."""
    strides = tensor.stride()
    if tensor.numel() == 0 or any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, strides, strict=True)):
        return None
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim)))


def may_overlap(tensor: Tensor) -> bool:
    """Whether several elements of ``tensor`` [...] may lie in the same memory, as after ``expand`` or ``unfold``."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return False
    reach = 0  # how far the dims of smaller strides go
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def zeros_in_order(like: Tensor, order: tuple[int, ...] | None) -> Tensor:
    """Zeros of the shape and dtype of ``like`` [...], whose dimensions lie in ``order``, or, where
    that is None or of another number of dimensions, as those of ``like``."""
    if order is None or len(order) != like.dim():
        return torch.zeros_like(like, requires_grad=False)
    return torch.empty_permuted(like.shape, order, dtype=like.dtype, device=like.device).zero_()


def copy_with_gaps(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` [...] and of what lies between its elements, with the same strides."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.detach().as_strided([last + 1 if tensor.numel() else 0], [1]).clone()
    return torch.empty_like(memory).set_(memory.untyped_storage(), 0, tensor.shape, tensor.stride())
