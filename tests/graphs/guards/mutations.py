"""What tests share that change something between calls and ask for eager's result or an error that names it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from calls import replays
from torch import Tensor, nn
from twins import run

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

Build = Callable[[], tuple[Callable[[Tensor], Tensor], Any]]


def batch(device: str) -> Tensor:  # [3, 4]
    return torch.randn(3, 4, device=device, requires_grad=True)


def linear(device: str, value: float = 1.0, bias: bool = True) -> nn.Linear:
    """A layer that multiplies by a constant matrix: [3, 4] -> [3, 4]."""
    layer = nn.Linear(4, 4, bias=bias, device=device)
    nn.init.constant_(layer.weight, value)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def both(build: Build, device: str, **options: Any) -> tuple[Callable, Any, Callable, Any]:
    """What ``build`` makes, graphed, and once more for eager execution: each with what it can be changed through."""
    torch.manual_seed(0)
    call, owner = build()
    torch.manual_seed(0)
    twin, other = build()
    return make_graphed_callables(call, (batch(device),), **options), owner, twin, other


def assert_equal_runs(graphed: Callable, twin: Callable, device: str) -> None:
    x, seen = batch(device), []
    for call in (graphed, twin):
        torch.manual_seed(1)
        seen.append(run(call, x))
    assert_bitwise_equal(*seen)


def assert_seen(build: Build, change: Callable[[Any], Any], words: str, device: str) -> None:
    """After ``change`` a call equals eager with on_mismatch="eager", and the reason says ``words``; such a reason is an
    error otherwise (test_on_mismatch.py)."""
    graphed, owner, twin, other = both(build, device, on_mismatch="eager")
    for _ in range(2):
        assert_equal_runs(graphed, twin, device)
    assert replays(graphed) == 2
    change(owner)
    change(other)
    assert_equal_runs(graphed, twin, device)
    assert replays(graphed) == 2
    (reason,) = graphed.te_graph.info()["eager_calls"]
    assert re.search(f"{words}.* since capture", reason), reason


def assert_not_seen(build: Build, change: Callable[[Any], Any], device: str) -> None:
    """After ``change`` calls go on replaying, and equal eager."""
    graphed, owner, twin, other = both(build, device)
    for count in range(1, 4):
        assert_equal_runs(graphed, twin, device)
        assert replays(graphed) == count
        change(owner)
        change(other)
