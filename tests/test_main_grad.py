"""main_grad: gradients accumulated in fp32 beside parameters of another dtype, as Megatron keeps them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from twins import mlp, sample

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_main_grad_is_added_to_in_fp32_and_grad_stays_none(device: str, dtype: torch.dtype) -> None:
    module = mlp(device, dtype)
    eager = copy.deepcopy(module)
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    expected = [torch.zeros_like(p, dtype=torch.float32) for p in eager.parameters()]
    graphed = tg.make_graphed_callables(module, (sample(device, dtype),))
    for _ in range(4):
        x = sample(device, dtype)
        eager.zero_grad()
        for m in (eager, graphed):
            m(x).float().square().sum().backward()
        for total, parameter in zip(expected, eager.parameters(), strict=True):
            total.add_(parameter.grad)
        for total, parameter in zip(expected, graphed.parameters(), strict=True):
            assert parameter.grad is None
            assert torch.equal(total, parameter.main_grad)


def test_reset_main_grads_lets_the_next_backward_store(device: str) -> None:
    graphed = tg.make_graphed_callables(
        mlp(device, torch.bfloat16), (sample(device, torch.bfloat16),), grad_dtype=torch.float32
    )
    x = sample(device, torch.bfloat16)
    graphed(x).float().square().sum().backward()
    once = [p.main_grad.clone() for p in graphed.parameters()]
    assert all(g.dtype == torch.float32 and g.count_nonzero() > 0 for g in once)
    for p in graphed.parameters():
        p.main_grad.fill_(float("nan"))
    tg.reset_main_grads(graphed.parameters())
    graphed(x).float().square().sum().backward()
    assert all(torch.equal(p.main_grad, g) for p, g in zip(graphed.parameters(), once, strict=True))
    graphed(x).float().square().sum().backward()
    assert all(torch.equal(p.main_grad, 2 * g) for p, g in zip(graphed.parameters(), once, strict=True))


def test_grad_dtype_of_the_parameter_keeps_grad(device: str) -> None:
    graphed = tg.make_graphed_callables(mlp(device), (sample(device),), grad_dtype=torch.float32)
    graphed(sample(device)).sum().backward()
    assert all(p.grad is not None and not hasattr(p, "main_grad") for p in graphed.parameters())


def test_replaced_main_grad_is_an_error_that_names_it(device: str) -> None:
    graphed = tg.make_graphed_callables(
        mlp(device, torch.bfloat16), (sample(device, torch.bfloat16),), grad_dtype=torch.float32
    )
    graphed[0].weight.main_grad = torch.zeros_like(graphed[0].weight.main_grad)
    with pytest.raises(RuntimeError, match=r"main_grad of weight of 0 .*reset\(\)"):
        graphed(sample(device, torch.bfloat16))


def test_reset_main_grads_refuses_a_parameter_without_one(device: str) -> None:
    with pytest.raises(ValueError, match="expected parameters with a main_grad, got number 0"):
        tg.reset_main_grads(nn.Linear(2, 2, device=device).parameters())
