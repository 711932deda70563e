"""Writes of graphed functions are seen from their first call on: by autograd, and by casts of weights to FP8."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from list_writes import WRITES
from torch import nn

import te_graph as tg
from te_graph import graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_backward_that_waits_raises_after_each_call(device: str, write: Callable) -> None:
    weights = [torch.ones(4, device=device) for _ in range(2)]
    step = graphed(lambda: write(weights))
    for _ in range(4):
        x = torch.ones(4, device=device, requires_grad=True)
        waiting = (x * weights[0]).sum()
        step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            waiting.backward()
    assert step.info()["forward_replays"] > 0


@pytest.mark.parametrize("foreach", [True, False])
def test_a_backward_that_waits_for_an_optimizer_raises(device: str, foreach: bool) -> None:
    model = nn.Linear(4, 4, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    step = graphed(optimizer.step)
    for _ in range(4):
        x = torch.randn(2, 4, device=device, requires_grad=True)
        waiting = model(x).sum()
        model(x).sum().backward()
        step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            waiting.backward()
        optimizer.zero_grad(set_to_none=False)


def fp8_steps(wrap: Callable) -> list:
    torch.manual_seed(0)
    model = nn.Sequential(*(tg.Linear(32, 32, params_dtype=torch.float32) for _ in range(2)))
    weights, recipe = [layer.weight for layer in model], tg.DelayedScaling(amax_history_len=4)
    decay = wrap(torch.no_grad()(lambda: torch._foreach_mul_(weights, 0.5)))
    x, seen = torch.randn(16, 32), []
    for _ in range(4):
        with tg.fp8_autocast(recipe=recipe):
            y = model(x)
        y.sum().backward()
        seen.append(y.detach())
        decay()
    return seen


def test_fp8_layers_cast_weights_anew_that_a_list_write_has_changed() -> None:
    assert_bitwise_equal(fp8_steps(graphed), fp8_steps(lambda function: function))


def test_fp8_weights_become_stale_by_the_first_call() -> None:
    weights = [torch.randn(16, 16)]
    casts = tg.Fp8Weights(weights)
    casts.cast_()
    graphed(lambda: torch._foreach_mul_(weights, 0.5))()
    assert casts.is_stale
