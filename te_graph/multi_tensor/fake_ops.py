"""What torch.compile and fake tensors know of ops whose list may be empty: no tensor says which device is meant.

The other ops have their shapes in C++, where a result lies on the device of the arguments.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from te_graph import _C


def register() -> None:
    """Tell torch.compile and fake tensors."""
    for name, fake in {
        "multi_tensor_norm": _norm,
        "multi_tensor_norm_partial": _norm_partial,
        "multi_tensor_norms": _norms,
        "multi_tensor_clip_norm_": _clip_norm,
    }.items():
        torch.library.register_fake(f"te_graph::{name}", fake)


def _norm(tensors: Sequence[Tensor], p: float = 2.0) -> Tensor:
    return _empty("multi_tensor_norm", tensors, (), _dtype(tensors))


def _norm_partial(tensors: Sequence[Tensor], p: float = 2.0) -> Tensor:
    return _empty("multi_tensor_norm_partial", tensors, (_C.NORM_PARTIAL_WORDS,), torch.int64)


def _norms(tensors: Sequence[Tensor], p: float = 2.0) -> Tensor:
    return _empty("multi_tensor_norms", tensors, (len(tensors),), _dtype(tensors))


def _clip_norm(
    tensors: Sequence[Tensor], max_norm: float, p: float = 2.0, *, found_inf: Tensor | None = None
) -> Tensor:
    norm = _empty("multi_tensor_clip_norm_", tensors, (), _dtype(tensors))
    if found_inf is not None and found_inf.device != norm.device:
        raise ValueError(f"multi_tensor_clip_norm_: expected found_inf on {norm.device}, got {found_inf.device}")
    return norm


def _dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _empty(op: str, tensors: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """On the device of ``tensors``, [...] each; all of it, since one on meta among others is enough to come here."""
    device = tensors[0].device if tensors else torch.device("cpu")
    for number, tensor in enumerate(tensors):
        if tensor.device != device:
            raise ValueError(f"{op}: expected tensors[{number}] on {device}, got {tensor.device}")
    return torch.empty(shape, dtype=dtype, device=device)
