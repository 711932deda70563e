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


ZEROS = {
    "zero_": lambda grads: [one.zero_() for one in grads],
    "foreach": torch._foreach_zero_,
    "detached": lambda grads: [one.detach().mul_(0.0) for one in grads],
    "by parts": lambda grads: [part.zero_() for one in grads for part in one.split(2)],
}


@DTYPES
@pytest.mark.parametrize("by", ZEROS)
@pytest.mark.parametrize("is_own", [False, True])
def test_zeros_of_a_loop_forget_what_was_reduced(dtype: torch.dtype, by: str, is_own: bool) -> None:
    """As those of zero_grad do; also where ``.grad`` is a tensor of the user's own."""
    model = nn.Linear(4, 4, dtype=dtype)
    flat = tg.FlatParameters(model, gradient_scale=0.5)
    optimizer = flat.optimizer(torch.optim.SGD, lr=0.1)
    has_main_grads = dtype != torch.float32
    for parameter in model.parameters() if is_own and not has_main_grads else ():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        backward(model)
        with flat.no_sync():
            backward(model)
        ZEROS[by]([one.main_grad if has_main_grads else one.grad for one in model.parameters()])
        before = model.weight.detach().clone()
        optimizer.step()
        assert same_bits(model.weight.detach(), before)
        backward(model)
        assert (model.weight.main_grad if has_main_grads else model.weight.grad).eq(1).all()
        optimizer.zero_grad(set_to_none=False)
    flat.close()


def test_a_gradient_of_zeros_stays_added_to_what_was_reduced() -> None:
    """No zeros are taken for the user's where a backward has made them, nor where the user writes other values, too."""
    model, x = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.ones(1, 4)
    flat = tg.FlatParameters(model, gradient_scale=0.5)
    model[1](model[0](x)).sum().backward()
    expected = model[0].weight.grad.clone()
    with flat.no_sync():
        (model[1](model[0](x) * 0.0).sum()).backward()
    for parameter in model.parameters():
        torch.nan_to_num_(parameter.grad)
    with flat.no_sync():
        (model[1](model[0](x) * 0.0).sum()).backward()
    flat.reduce_gradients()
    assert same_bits(model[0].weight.grad, expected) and model[0].weight.grad.any()
    flat.close()


def test_a_gradient_that_is_replaced_forgets_what_was_reduced() -> None:
    model = nn.Linear(4, 4)
    flat = tg.FlatParameters(model, gradient_scale=0.5)
    backward(model)
    with flat.no_sync():
        backward(model)
    model.weight.grad = torch.full((4, 4), 6.0)
    backward(model)
    assert model.weight.grad.eq(4).all() and model.bias.grad.eq(3).all()
    flat.close()


@DTYPES
@pytest.mark.parametrize("zeroes", [False, True])
def test_close_leaves_what_was_reduced_together_with_what_has_come_since(dtype: torch.dtype, zeroes: bool) -> None:
    model = nn.Linear(4, 4, dtype=dtype)
    flat = tg.FlatParameters(model, gradient_scale=0.5)
    backward(model)
    with flat.no_sync():
        backward(model)
    if zeroes:
        (model.weight.grad if dtype == torch.float32 else model.weight.main_grad).zero_()
        model.zero_grad(set_to_none=False)
    flat.close()
    assert model.weight.grad.eq(0 if zeroes else 3).all() and model.bias.grad.eq(0 if zeroes else 3).all()
