"""Gradients that are set to zero, or dropped, by whoever does so: what comes then is what plain tensors would have."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import te_graph as tg
from te_graph.testing import same_bits

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
KINDS = pytest.mark.parametrize("set_to_none", [False, True])


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).float().sum().backward()


@DTYPES
@KINDS
def test_zero_grad_of_an_optimizer_whose_parameters_are_no_longer_flat(dtype: torch.dtype, set_to_none: bool) -> None:
    """As torch's, of what close() leaves in ``.grad``."""
    model = nn.Linear(4, 4, dtype=dtype)
    flat = tg.FlatParameters(model)
    optimizer = flat.optimizer(torch.optim.AdamW)
    backward(model)
    flat.close()
    left = model.weight.grad
    assert left.ne(0).any()
    optimizer.zero_grad(set_to_none=set_to_none)
    assert model.bias.grad is None if set_to_none else model.bias.grad.eq(0).all()
    assert model.weight.grad is (None if set_to_none else left)
    with pytest.raises(RuntimeError, match=r"close\(\) has been called"):
        optimizer.step()


@DTYPES
@KINDS
def test_zero_grad_of_an_optimizer_whose_parameters_are_flat_elsewhere(dtype: torch.dtype, set_to_none: bool) -> None:
    model = nn.Linear(4, 4, dtype=dtype)
    first = tg.FlatParameters(model)
    optimizer = first.optimizer(torch.optim.AdamW)
    first.close()
    second = tg.FlatParameters(model, gradient_scale=0.5)
    backward(model)
    with second.no_sync():
        backward(model)
    optimizer.zero_grad(set_to_none=set_to_none)
    backward(model)
    grad = model.weight.grad if dtype == torch.float32 else model.weight.main_grad
    assert grad.eq(1).all()  # 0.5 of two samples
    second.close()


@KINDS
def test_zero_grad_of_an_optimizer_with_frozen_parameters(set_to_none: bool) -> None:
    """What is left in their ``.grad`` goes, too."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    backward(model)
    model[0].requires_grad_(False)
    plain = copy.deepcopy(model)
    for one, left in zip(plain.parameters(), model.parameters(), strict=True):
        one.grad = left.grad.clone()
    flat = tg.FlatParameters(model)
    optimizers = [
        flat.optimizer(torch.optim.SGD, model.parameters(), lr=0.1),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    ]
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=set_to_none)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or same_bits(one.grad, other.grad)
    flat.close()
