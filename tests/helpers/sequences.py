"""What the tests of graphed() share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from te_graph import graphed
from te_graph.testing import assert_bitwise_equal


def counts(replayed: Any) -> tuple[int, int, int, int]:
    """(captures, replays, misses, eager calls) of a graphed function."""
    info = replayed.info()
    eager = info["eager_calls"]
    misses = sum(count for reason, count in eager.items() if reason.endswith(" since capture"))
    return info["signatures"] + info["recaptures"], info["forward_replays"], misses, sum(eager.values())


def captures(replayed: Any) -> int:
    """Captures of a graphed function so far."""
    return counts(replayed)[0]


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


def assert_follows(function: Callable[[Tensor], Tensor], change: Callable[[], Any], device: str = "cpu") -> None:
    """Three calls, the change, three calls; the second captures and the third replays."""
    replayed, x = graphed(function), torch.ones(3, device=device)
    for _ in range(3):
        assert_bitwise_equal(replayed(x).clone(), function(x))
    assert counts(replayed) == (1, 2, 0, 1)
    before = function(x)
    change()
    assert not torch.equal(function(x), before) or torch.equal(before, torch.zeros_like(before))
    for _ in range(3):
        assert_bitwise_equal(replayed(x).clone(), function(x))
    assert counts(replayed) == (2, 4, 1, 2)
