"""What the tests of the class of graphed modules share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from twins import run

import te_graph as tg
from te_graph.testing import assert_bitwise_equal


def batch() -> Tensor:  # [2, 4]
    return torch.randn(2, 4, requires_grad=True)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:  # [...]
        return weight / 2


def graphed(module: nn.Module) -> nn.Module:
    return tg.make_graphed_callables(module, (batch(),))


def assert_same_as_twin(module: nn.Module, twin: nn.Module) -> None:
    x = batch()
    assert_bitwise_equal(run(module, x), run(twin, x))
    assert_bitwise_equal(
        {name: p.grad for name, p in module.named_parameters()}, {name: p.grad for name, p in twin.named_parameters()}
    )


def assert_refused(module: nn.Module) -> None:
    with pytest.raises(RuntimeError, match=r"since capture; call .te_graph.reset\(\)"):
        module(batch())
