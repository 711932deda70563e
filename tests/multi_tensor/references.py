"""What multi-tensor ops are to compute, in plain PyTorch: norms in float64, products rounded once, clipped lists."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensor_lists import copies
from torch import Tensor


def reference_norm(tensors: Sequence[Tensor], p: float) -> float:
    """The norm of all elements of ``tensors`` [...] as one vector, in float64; 0 of no element."""
    values = torch.cat([torch.zeros(0, dtype=torch.float64), *(t.detach().cpu().double().flatten() for t in tensors)])
    if values.numel() == 0:
        return 0.0
    if p == 0:
        return float((values != 0).sum())
    if p == math.inf:
        return float(values.abs().amax())
    largest = float(values.abs().amax())
    if largest == 0 or not math.isfinite(largest):
        return float(values.abs().sum())
    return largest * float((values.abs() / largest).pow(p).sum()) ** (1 / p)


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """What ops on ``tensors`` [...] compute and return in."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def product(tensor: Tensor, factor: Tensor) -> Tensor:
    """Reference: ``tensor`` [...] times ``factor`` [], computed in fp32 (fp64 for fp64), rounded once."""
    wide = wide_dtype(tensor)
    return (tensor.to(wide) * factor.to(tensor.device, wide)).to(tensor.dtype)


def coefficient(total_norm: Tensor, max_norm: float) -> Tensor:
    """Reference: torch's, with its order of operations; NaN stays NaN."""
    return (max_norm / (total_norm + 1e-6)).clamp(max=1.0)


def clipped(tensors: list[Tensor], total_norm: Tensor, max_norm: float) -> list[Tensor]:
    """Reference: what ``tensors`` [...] hold after they were clipped by ``total_norm`` []."""
    coef = coefficient(total_norm, max_norm)
    return copies(tensors) if coef == 1 else [product(tensor, coef) for tensor in tensors]


def clipped_to(gradients: list[Tensor], max_norm: float, p: float = 2.0) -> list[Tensor]:
    """Reference: what ``gradients`` [...] hold after they were clipped to ``max_norm``, all in one piece."""
    return clipped(gradients, torch.ops.te_graph.multi_tensor_norm(gradients, p), max_norm)
