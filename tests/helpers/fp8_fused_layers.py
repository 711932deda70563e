"""Fused FP8 layers of every kind, one training of them, and their results by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg

HIDDEN, WIDTH = 32, 48
CURRENT = tg.Float8CurrentScaling()
KINDS: dict[str, Callable[..., nn.Module]] = {
    "LayerNormLinear": lambda **given: tg.LayerNormLinear(HIDDEN, WIDTH, **given),
    "LayerNormLinear, RMSNorm, zero-centered": lambda **given: tg.LayerNormLinear(
        HIDDEN, WIDTH, bias=False, normalization="RMSNorm", zero_centered_gamma=True, **given
    ),
    "LayerNormMLP": lambda **given: tg.LayerNormMLP(HIDDEN, WIDTH, **given),
    "LayerNormMLP, RMSNorm, swiglu": lambda **given: tg.LayerNormMLP(
        HIDDEN, WIDTH, bias=False, normalization="RMSNorm", activation="swiglu", **given
    ),
    "LayerNormMLP, relu": lambda **given: tg.LayerNormMLP(HIDDEN, WIDTH, activation="relu", **given),
}
kinds = pytest.mark.parametrize("kind", KINDS)


def a_layer(kind: str, device: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    layer = KINDS[kind](device=device, dtype=dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return layer


def trained(
    layer: nn.Module, x: Tensor, residual: Tensor | None, grads: list[Tensor], recipe: Any = CURRENT
) -> dict[str, Tensor]:
    """The same of a call, eagerly."""
    x = x.detach().requires_grad_()
    residual = None if residual is None else residual.detach().requires_grad_()
    with tg.fp8_autocast(recipe=recipe):
        results = layer(x, residual) if residual is not None else (layer(x),)
    torch.autograd.backward(results, grads[: len(results)])
    found = {"y": results[0].detach(), "x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}
    return found if residual is None else {**found, "sum": results[1].detach(), "residual": residual.grad}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    different = [name for name in got if not same_bits(got[name], expected[name])]
    assert not different, different


def width_of(layer: nn.Module) -> int:
    return WIDTH if isinstance(layer, tg.LayerNormLinear) else HIDDEN
