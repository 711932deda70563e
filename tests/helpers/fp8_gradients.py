"""A small FP8 layer, and its gradients one by one, as a reference of what is added up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import te_graph as tg

IN, OUT = 32, 48
RECIPE = tg.Float8CurrentScaling()


def a_layer(device: str, dtype: torch.dtype = torch.bfloat16, graphed: bool = False) -> tg.Linear:
    torch.manual_seed(0)
    layer = tg.Linear(IN, OUT, device=device, dtype=dtype)
    if graphed:
        with tg.fp8_autocast(recipe=RECIPE):
            tg.make_graphed_callables(layer, (a_sample(device, dtype),), max_in_flight=2, on_mismatch="eager")
    return layer


def a_sample(device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(7, IN, device=device).to(dtype).requires_grad_()


def call(layer: nn.Module, x: Tensor) -> Tensor:
    with tg.fp8_autocast(recipe=RECIPE):
        return layer(x)


def grad_for(y: Tensor) -> Tensor:
    """For y [...]: numbers of bfloat16, whatever y is of, with sums that are none."""
    return torch.linspace(-1.3, 0.7, y.numel(), device=y.device).view_as(y).bfloat16().to(y.dtype)


def backward(layer: nn.Module, x: Tensor) -> None:
    y = call(layer, x)
    y.backward(grad_for(y))


def gradients_of(layer: tg.Linear, samples: list[Tensor], dtype: torch.dtype, name: str = "weight") -> list[Tensor]:
    """Of each of ``samples`` the gradient of a parameter, of ``dtype``."""
    other = tg.Linear(IN, OUT, device=layer.weight.device, dtype=dtype)
    with torch.no_grad():
        other.weight.copy_(layer.weight)
        other.bias.copy_(layer.bias)
    gradients = []
    for x in samples:
        y = call(other, x.detach().to(dtype))
        gradients += torch.autograd.grad(y, getattr(other, name), grad_for(y))
    return gradients
