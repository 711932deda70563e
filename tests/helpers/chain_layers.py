"""Layers to make chains of, and how tests call them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Nets = Sequence[nn.Module]


class Layer(nn.Module):
    """Saves its input for the backward, and not its result: [n, 6] -> [n, 6]."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, 9), nn.Dropout(dropout), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 6]
        return self.down(self.drop(torch.tanh(self.up(x))))


class Shift(nn.Module):
    """Saves neither input nor result: [n, 6] -> [n, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 6]
        return x * 2 + self.shift


class Squash(nn.Module):
    """Saves its result: [n, 6] -> [n, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 6]
        return torch.tanh(self.linear(x))


def batch(device: str, rows: int = 4, requires_grad: bool = True) -> Tensor:
    return torch.randn(rows, 6, device=device, requires_grad=requires_grad)  # [rows, 6]


def layers_on(device: str, *kinds: type[nn.Module]) -> list[nn.Module]:
    """A layer of each kind; three of ``Layer`` when none is given."""
    return [kind().to(device) for kind in kinds or (Layer, Layer, Layer)]


def in_turn(layers: Nets, x: Tensor) -> Tensor:
    """Call the layers one after the other, holding nothing in between: [n, 6] -> [n, 6]."""
    for layer in layers:
        x = layer(x)
    return x


def forward_and_backward(nets: Nets, x: Tensor) -> None:  # [n, 6]
    in_turn(nets, x).square().sum().backward()


def parameters_of(layers: Nets) -> list[Tensor]:
    return [parameter for layer in layers for parameter in layer.parameters()]
