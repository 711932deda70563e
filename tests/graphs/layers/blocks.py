"""Little layers and models that call them in different ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6


class Block(nn.Module):
    """[n, 6] -> [n, 6]"""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        return x + self.down(torch.tanh(self.up(x)))


class Masked(Block):
    def forward(self, x: Tensor, *, mask: Tensor, scale: float = 1.0) -> Tensor:  # [n, 6], bool [n, 1]
        return super().forward(x).masked_fill(mask, 0.0) * scale


class Reading(Block):
    """What no graph can hold."""

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        return super().forward(x) * (2.0 if x.sum().item() > 1e9 else 1.0)


class InTurn(nn.Module):
    """Calls what it is given one after the other: [n, 6] -> [n, 1]."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, **options: Any) -> Tensor:  # [n, 6]
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, **options)
        return self.last(x)


def batch(device: str, rows: int = 5) -> Tensor:  # [rows, 6]
    return torch.randn(rows, WIDTH, device=device)
