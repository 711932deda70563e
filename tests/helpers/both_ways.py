"""Programs that run eagerly and with their callables graphed, and callables whose gradient passes through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

Graph = Callable[..., Any]  # (callable, *samples, **options) -> what replaces it: itself in the eager run


def both(program: Callable[[Graph], Any], *, has_replays: bool = True) -> None:
    """Run ``program`` eagerly and graphed, from the same random state; compare what it returns."""
    handles = []

    def graph(target: Any, *samples: Tensor, **options: Any) -> Any:
        made = tg.make_graphed_callables(target, samples, **options)
        handles.extend(one.te_graph for one in (made if isinstance(made, tuple) else (made,)))
        return made

    torch.manual_seed(0)
    expected = program(lambda target, *samples, **options: target)
    torch.manual_seed(0)
    assert_bitwise_equal(program(graph), expected)
    assert any(handle.info()["forward_replays"] for handle in handles) or not has_replays


def leaf(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=device, dtype=dtype, requires_grad=True)


class Position(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, device=device))

    def forward(self, x: Tensor) -> Tensor:  # [n, 8]
        return x + self.table


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # [...]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class SameGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # [...]
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


PASSING: dict[str, Callable[[str], Any]] = {
    "identity": lambda device: nn.Identity(),
    "flatten": lambda device: nn.Flatten(),
    "dropout 0": lambda device: nn.Dropout(0.0),
    "bias": Position,
    "cat": lambda device: lambda x: torch.cat([x[:, :4], x[:, 4:]], -1),
    "straight through": lambda device: SameGradient.apply,
    "reversal": lambda device: Reversal.apply,
    "contiguous": lambda device: lambda x: x.contiguous(),
    "permuted": lambda device: lambda x: x.t().t(),
    "sum": lambda device: lambda x: x.sum(0, keepdim=True),
}
