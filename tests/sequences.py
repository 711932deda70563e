"""What the tests of graphed() share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def counts(sequence: Any) -> tuple[int, int, int, int]:
    """(captures, replays, misses, eager calls) of a graphed function."""
    stats = sequence.stats()
    return stats["captures"], stats["replays"], stats["misses"], stats["eager_calls"]


def tensors(device: str, count: int = 3, size: int = 5) -> list[Tensor]:  # [size] each
    return [torch.randn(size, device=device) for _ in range(count)]


def reference_norm(grads: Sequence[Tensor]) -> float:
    """The 2-norm of all elements, in float64 on the CPU."""
    return torch.cat([grad.detach().double().cpu().flatten() for grad in grads]).norm().item()


def called(function: Callable[..., Any], times: int, *args: Any) -> Any:
    """The result of the last of ``times`` calls."""
    for _ in range(times):
        result = function(*args)
    return result
