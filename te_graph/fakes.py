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
    return _on_device_of(tensors, (), _dtype(tensors))


def _norm_partial(tensors: Sequence[Tensor], p: float = 2.0) -> Tensor:
    return _on_device_of(tensors, (_C.NORM_STATE_WORDS,), torch.int64)


def _norms(tensors: Sequence[Tensor], p: float = 2.0) -> Tensor:
    return _on_device_of(tensors, (len(tensors),), _dtype(tensors))


def _clip_norm(
    tensors: Sequence[Tensor], max_norm: float, p: float = 2.0, *, found_inf: Tensor | None = None
) -> Tensor:
    return _on_device_of(tensors, (), _dtype(tensors))


def _dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def _on_device_of(tensors: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=tensors[0].device if tensors else "cpu")
