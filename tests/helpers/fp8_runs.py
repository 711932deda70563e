"""The FP8 layers of examples/fp8_linear.py, made small and alike, with what tests compare of them."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from twins import gradients_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
fp8_linear = importlib.import_module("fp8_linear")

SIZES = (32, 48, 64, 16)
ROWS = 16


def new_layers(seed: int, device: str, mechanism: str = "flag", history_length: int = 2) -> Any:
    """Three layers, [16, 32] -> [16, 16]; the same ones for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    linears = []
    for inner, outer in itertools.pairwise(SIZES):
        linear = nn.Linear(inner, outer, device=device, dtype=torch.bfloat16)
        for parameter in linear.parameters():
            values = torch.randn(parameter.shape, generator=generator) / inner**0.5
            parameter.data.copy_(values)
        linears.append(linear)
    return fp8_linear.Fp8Layers(linears, history_length, mechanism)


def an_input(device: str, factor: float = 1.0) -> Tensor:
    """[16, 32] bf16, which requires a gradient, as the boundary of the backward has to."""
    return (torch.randn(ROWS, SIZES[0], device=device) * factor).to(torch.bfloat16).requires_grad_()


def run(call: Callable[..., Tensor], x: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Forward and backward on a leaf copy of ``x`` [16, 32]: the result [16, 16] and the input's gradient [16, 32].

    The gradient of the result depends on its values."""
    x = x.detach().clone().requires_grad_()
    result = call(x, **kwargs)
    result.backward(result.detach() * 0.25 + 0.5)
    return result.detach().clone(), x.grad


def everything(layers: Any) -> dict[str, Any]:
    """Copies of all that a micro-batch may change: parameters, gradients, FP8 copies, scales, histories, flags."""
    parameters = dict(layers.named_parameters())
    tensors = parameters | dict(layers.named_buffers()) | {"amax": layers.weights.amax, "block": layers.state.block}
    return {name: t.detach().clone() for name, t in tensors.items()} | {"gradients": gradients_of(parameters)}


def addresses(layers: Any) -> list[int]:
    """Where all that a graph of ``layers`` refers to lies."""
    weights = layers.weights
    tensors = [*layers.parameters(), *layers.buffers(), *weights.data, *weights.transposed]
    tensors += [weights.scale, weights.scale_inv, weights.amax, layers.state.block]
    return [tensor.data_ptr() for tensor in tensors]
