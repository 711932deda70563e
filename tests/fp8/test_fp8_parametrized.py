"""Weights that are computed when they are read: refused in FP8, and read once in a call outside of it."""

from __future__ import annotations

import re

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import te_graph as tg

WIDTH = 32
RECIPE = tg.DelayedScaling(amax_history_len=3)
REFUSAL = re.escape("got one that torch.nn.utils.parametrize computes at each use")


class Counted(nn.Module):
    """A parametrization that counts its uses, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.uses = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.uses += 1
        return weight * torch.bernoulli(torch.full_like(weight, 0.5))


def counted(layer: nn.Linear) -> Counted:
    made = Counted()
    parametrize.register_parametrization(layer, "weight", made)
    made.uses = 0
    return made


@pytest.mark.parametrize("is_known", [False, True])
def test_they_are_refused_by_name(device: str, is_known: bool) -> None:
    layer, x = tg.Linear(WIDTH, WIDTH, device=device), torch.randn(5, WIDTH, device=device)
    if is_known:
        with tg.fp8_autocast(recipe=RECIPE):
            layer(x)
    counted(layer)
    for region in ({}, {"enabled": False, "calibrating": True}):
        with pytest.raises(TypeError, match=REFUSAL), tg.fp8_autocast(recipe=RECIPE, **region):
            layer(x)
    parametrize.remove_parametrizations(layer, "weight")
    with tg.fp8_autocast(recipe=RECIPE):
        layer(x)


@pytest.mark.parametrize("is_known", [False, True])
def test_outside_of_fp8_they_are_read_once_in_a_call(device: str, is_known: bool) -> None:
    layer, x = tg.Linear(WIDTH, WIDTH, bias=False, device=device), torch.eye(WIDTH, device=device)
    if is_known:
        with tg.fp8_autocast(recipe=RECIPE):
            layer(x)
    made = counted(layer)
    with tg.fp8_autocast(enabled=False):
        y = layer(x)
    y.sum().backward()
    assert made.uses == 1
    assert same_bits(y.T != 0, layer.parametrizations.weight.original.grad != 0)


def test_calls_and_steps_of_others_do_not_read_them(device: str) -> None:
    layer, other = (tg.Linear(WIDTH, WIDTH, device=device) for _ in range(2))
    x, optimizer = torch.randn(5, WIDTH, device=device), torch.optim.SGD(other.parameters(), lr=0.1)
    with tg.fp8_autocast(recipe=RECIPE):
        other(layer(x))
    made = counted(layer)
    for _ in range(2):
        with tg.fp8_autocast(recipe=RECIPE):
            other(x).sum().backward()
        optimizer.step()
    layer.state_dict()
    assert made.uses == 0


def test_spectral_norm_outside_of_fp8_is_that_of_a_plain_layer(device: str) -> None:
    results = []
    for make in (nn.Linear, tg.Linear):
        torch.manual_seed(0)
        layer = parametrizations.spectral_norm(make(WIDTH, WIDTH, device=device))
        optimizer, x = torch.optim.SGD(layer.parameters(), lr=0.1), torch.ones(5, WIDTH, device=device)
        for _ in range(3):
            layer(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([*layer.parameters(), *layer.buffers()])
    assert all(map(same_bits, *results))


def test_a_weight_that_is_deleted_does_not_disturb_others(device: str) -> None:
    layer, other = (tg.Linear(WIDTH, WIDTH, device=device) for _ in range(2))
    x = torch.randn(5, WIDTH, device=device)
    with tg.fp8_autocast(recipe=RECIPE):
        other(layer(x)).sum().backward()
    del layer.weight
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    with tg.fp8_autocast(recipe=RECIPE):
        other(x)
    assert layer.get_extra_state().shape == (3, 1032)
