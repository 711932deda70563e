"""A capture that fails puts back what its warm-up did to memory without an operator: other weights, arrays, hooks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from memory_changes import CHANGES, Held
from torch import Tensor, nn
from twins import eager_copy, run

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Fragile(Held):
    """No graph can hold it."""

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        x = super().forward(x)
        return x * (2.0 if x.detach().sum().item() > 1e9 else 1.0)


@pytest.mark.parametrize("change", CHANGES)
def test_a_failed_capture_leaves_no_trace(device: str, change: Callable) -> None:
    model, x = Fragile(change).to(device), torch.randn(3, 6, device=device)
    model(x).sum().backward()
    before = model.state()
    with pytest.raises(RuntimeError):
        make_graphed_callables(model, (x,))
    assert_bitwise_equal(model.state(), before)


@pytest.mark.parametrize("change", CHANGES)
def test_a_failed_late_capture_does_what_eager_execution_does(device: str, change: Callable) -> None:
    model = Fragile(change).to(device)
    twin, x = eager_copy(model), torch.randn(3, 6, device=device)
    make_graphed_callables(model, on_mismatch="eager")
    for _ in range(2):
        assert_bitwise_equal(run(model, x), run(twin, x))
        assert_bitwise_equal(model.state()[1:], twin.state()[1:])


def test_weights_that_a_function_exchanges_are_put_back() -> None:
    model = Held(CHANGES[0])
    weight = model.linear.weight
    values = weight.detach().clone()
    with pytest.raises(RuntimeError):
        make_graphed_callables(lambda x: model(x), (torch.randn(3, 6),))
    assert model.linear.weight is weight
    assert_bitwise_equal(weight.detach(), values)


class Repeated(nn.Module):
    """Writes a buffer whose elements are one, and others besides. [n, 6] -> [n, 6]"""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.ones(1).expand(6))

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        self.scale.fill_(0.5)
        self.calls.add_(1)
        return self.norm(x) * self.scale


@pytest.mark.parametrize("is_late", [False, True])
def test_an_expanded_buffer_that_is_written_is_put_back(device: str, is_late: bool) -> None:
    model = Repeated().to(device)
    twin, x = eager_copy(model), torch.randn(3, 6, device=device)
    make_graphed_callables(model, None if is_late else (x,))
    assert_bitwise_equal(model.state_dict(), twin.state_dict())
    for _ in range(2):
        assert_bitwise_equal(run(model, x), run(twin, x))
        assert_bitwise_equal(model.state_dict(), twin.state_dict())
    assert model.te_graph.info()["forward_replays"] == 2
