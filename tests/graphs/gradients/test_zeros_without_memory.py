"""The derivative of ``torch.sgn`` is a tensor without memory, which autograd adds to others by rules of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from twins import backward_of

from te_graph import graphed, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # x, w: [3]
    "alone": lambda x, w: torch.sgn(x * w),
    "of leaves": lambda x, w: torch.sgn(x) + torch.sgn(w),
    "added to others": lambda x, w: torch.sgn(x * w) * 2 + (x + 1) * w,
    "times infinity": lambda x, w: torch.sgn(x.sqrt()) + w,
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_gradients_of_callables(device: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    def gradients(call: Callable[[Tensor], Tensor], w: Tensor) -> list[Tensor]:  # [3]
        x = torch.tensor([0.0, 1.0, 4.0], device=device, requires_grad=True)
        w.grad = None
        backward_of(call(x))
        return [x.grad.clone(), w.grad.clone()]

    w = nn.Parameter(torch.randn(3, device=device))
    call = make_graphed_callables(lambda x: function(x, w), (torch.ones(3, device=device, requires_grad=True),))
    for _ in range(2):
        assert_bitwise_equal(gradients(call, w), gradients(lambda x: function(x, w), w))
    assert call.te_graph.info()["backward_replays"] == 2


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_gradients_in_functions(device: str, function: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, w = (torch.tensor(values, device=device, requires_grad=True) for values in ([0.0, 1.0, 4.0], [2.0, -3.0, 1.0]))

    def step() -> Tensor:
        loss = function(x, w).sum()
        loss.backward()
        return loss.detach()

    replayed, seen = graphed(step), []
    for call in (replayed, step):
        x.grad, w.grad = torch.ones_like(x), -torch.zeros_like(w)
        seen.append([[call().clone(), x.grad.clone(), w.grad.clone()] for _ in range(4)])
    assert_bitwise_equal(*seen)
    assert replayed.info()["forward_replays"] == 3
