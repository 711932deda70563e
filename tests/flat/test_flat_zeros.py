"""Gradients that are set to zero, or dropped, by whoever does so: what comes then is what plain tensors would have."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import Rank, ranks_of
from torch import nn

import te_graph as tg
from te_graph.testing import same_bits

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ranks = pytest.fixture(ranks_of, scope="module", params=[pytest.param(("cpu", 2), id="gloo-2")])
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


STEPS = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1}),
}


def scenario_zeros_are_stepped(rank: Rank, by: str, dtype: torch.dtype, step: str) -> None:
    """Zeros are equal on all ranks, so they need no reduction."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64, dtype=dtype), nn.Linear(64, 64, dtype=dtype))
    flat = tg.FlatParameters(model, shard="optimizer")
    cls, options = STEPS[step]
    optimizers = [flat.optimizer(cls, layer.parameters(), **options) for layer in model]
    masters = [nn.Parameter(one.detach().float()) for one in model.parameters()]
    plain = cls(masters, **options)
    zero = {
        "optimizer": lambda: [one.zero_grad(set_to_none=False) for one in optimizers],
        "module": lambda: model.zero_grad(set_to_none=False),
        "parts": lambda: (optimizers[0].zero_grad(set_to_none=False), model[1].zero_grad(set_to_none=False)),
    }[by]
    for _ in range(3):
        with flat.no_sync():
            backward(model)
        with pytest.raises(RuntimeError, match="expected gradients of flat parameters that have been reduced"):
            optimizers[0].step()
        model[0].zero_grad(set_to_none=False)
        with pytest.raises(RuntimeError, match="expected gradients of flat parameters that have been reduced"):
            optimizers[0].step()
        zero()
        assert tg.clip_grad_norm_(flat, 1.0) == 0
        for optimizer in optimizers:
            optimizer.step()
        for master in masters:
            master.grad = torch.zeros_like(master)
        plain.step()
        for one, master in zip(model.parameters(), masters, strict=True):
            assert same_bits(one.detach(), master.detach().to(dtype))
    backward(model)
    for optimizer in optimizers:
        optimizer.step()
    flat.close()


@DTYPES
@pytest.mark.parametrize("by", ["optimizer", "module", "parts"])
def test_zeros_need_no_reduction(ranks: Any, seed: int, by: str, dtype: torch.dtype) -> None:
    for step in STEPS:
        ranks.run(scenario_zeros_are_stepped, seed, by, dtype, step)


def scenario_zeros_of_a_graph(rank: Rank) -> None:
    """What replays set to zero is zero for what comes then, on the host as well."""
    model = nn.Linear(4, 64)
    flat = tg.FlatParameters(model, shard="optimizer")
    optimizer = flat.optimizer(torch.optim.SGD, lr=0.0)
    zero = tg.graphed(lambda: optimizer.zero_grad(set_to_none=False))
    for _ in range(5):
        backward(model)
        with flat.no_sync():
            backward(model)
        zero()
        optimizer.step()
        backward(model)
        expected = torch.full_like(model.weight, 2.0).flatten()
        for begin, end in flat.own_parts(flat.buffers[0]):
            lies = flat.buffers[0].layout.offsets[flat.buffers[0].names.index("weight")]
            first, last = max(begin - lies, 0), min(end - lies, expected.numel())
            assert same_bits(model.weight.grad.flatten()[first:last], expected[first:last])
        flat.zero_grad()
    assert zero.info()["forward_replays"] > 0, zero.info()
    flat.close()


def test_zeros_of_replays_need_no_reduction(ranks: Any, seed: int) -> None:
    ranks.run(scenario_zeros_of_a_graph, seed)
