"""A refused call of a graphed function puts back what it did to memory without an operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from memory_changes import CHANGES, Held
from torch import Tensor

from te_graph import CaptureError, graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


@pytest.mark.parametrize("change", CHANGES)
def test_a_refused_call_leaves_no_trace(device: str, change: Callable) -> None:
    held = Held(change).to(device)

    def step(x: Tensor) -> Tensor:  # [3, 6]
        return x * 2 if torch.no_grad()(held)(x).sum().item() > 1e9 else x

    x, step = torch.ones(3, 6, device=device), graphed(step)
    step(x)
    before = held.state()
    with pytest.raises((CaptureError, RuntimeError)):
        for _ in range(3):  # one that differs from the call before is not captured, but runs
            before = held.state()
            step(x)
    assert_bitwise_equal(held.state(), before)


def test_an_expanded_tensor_is_written_by_each_call(device: str) -> None:
    scale, calls = torch.ones(1, device=device).expand(4), torch.zeros(2, device=device)

    @graphed
    def step(value: Tensor) -> Tensor:  # []
        calls.add_(1)
        return scale.fill_(0.5) + value

    value = torch.ones((), device=device)
    for number in range(1, 5):
        assert step(value).tolist() == [1.5] * 4
        assert scale.tolist() == [0.5] * 4
        assert calls.tolist() == [number] * 2
    assert step.info()["forward_replays"] > 0
