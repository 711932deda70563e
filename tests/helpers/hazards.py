"""What the tests of hazards share: a small model, its batches, and what is right after a reset."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from twins import eager_copy, run

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal


def mlp(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).to(device)


def batch(device: str, requires_grad: bool = True) -> Tensor:  # [3, 4]
    return torch.randn(3, 4, device=device, requires_grad=requires_grad)


def assert_right_when_captured_again(model: nn.Module, sample: Tensor, x: Tensor) -> nn.Module:
    """Reset ``model``, capture it with ``sample`` [...] and call it with ``x`` [...]; returns its new eager twin."""
    model.te_graph.reset()
    twin = eager_copy(model)
    make_graphed_callables(model, (sample,))
    assert_bitwise_equal(run(model, x), run(twin, x))
    return twin
