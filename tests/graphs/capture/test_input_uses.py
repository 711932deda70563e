"""An input that a callable uses several times: its gradients are added up as by autograd, in little memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from both_ways import Graph, both, leaf
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")


def twice(x: Tensor) -> Tensor:
    return x * 0.1 + x * 0.7


class Block(nn.Module):
    """[n, 8] -> [n, 8], with a residual connection."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, device=device), nn.Linear(32, 8, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Shared(torch.autograd.Function):
    """Two gradients of it are one tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, p: Tensor) -> Tensor:
        return x * 2 + y + p

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tripled = grad * 3
        return tripled, grad * 2, tripled


class SharedGradient(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(64, 8, device=device))

    def forward(self, x: Tensor) -> Tensor:  # [64, 8]
        return Shared.apply(x, x, self.p)


USES: dict[str, Callable[[str], Any]] = {
    "two": lambda device: twice,
    "residual": Block,
    "one tensor": lambda device: lambda x: x + x,
    "itself": lambda device: lambda x: x.t() @ x,
    "other strides": lambda device: lambda x: x[:8] + x[:8].t(),
    "shared with that of a parameter": SharedGradient,
    "three": lambda device: lambda x: x * 0.1 + x * 0.7 + x.sin(),
    "a part and the whole": lambda device: lambda x: torch.cat([x * 0.3, x[:4]]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("kind", USES)
@pytest.mark.one_of(5)
def test_uses_are_added_up(device: str, kind: str, dtype: torch.dtype) -> None:
    """Where others use the input before or after the callable, too, and again where they do not."""

    target = USES[kind](device)
    if dtype.is_complex and isinstance(target, nn.Module):
        dtype = torch.float16

    def program(graph: Graph) -> list[Tensor]:
        target = USES[kind](device)
        target = graph(target.to(dtype) if isinstance(target, nn.Module) else target, leaf(device, 64, 8, dtype=dtype))
        seen = []
        for others in (0, 0, 1, 0, 2, 0, 0):
            x = leaf(device, 64, 8, dtype=dtype)
            hidden = x * 1
            before = hidden * 0.3 if others == 1 else None
            y = target(hidden)
            after = hidden * 0.3 if others == 2 else None
            ends = [end for end in (before, y, after) if end is not None]
            torch.autograd.backward(ends, [torch.randn_like(end) for end in ends])
            seen += [x.grad, *(p.grad.clone() for p in getattr(target, "parameters", list)())]
        return seen

    both(program)


@pytest.mark.parametrize("change", [lambda x: x.mul_(0.3), lambda x: x[1:].mul_(0.3), lambda x: x.t().add_(1)])
def test_an_input_that_is_changed_in_place_after_the_call_is_used_elsewhere(device: str, change: Any) -> None:
    def program(graph: Graph) -> list[Tensor]:
        target, seen = graph(twice, leaf(device, 64, 8)), []
        for _ in range(2):
            x = leaf(device, 64, 8)
            hidden = x * 1
            y = target(hidden)
            change(hidden)
            torch.autograd.backward([y, hidden], [torch.randn_like(y), torch.randn_like(hidden)])
            seen.append(x.grad)
        return seen

    both(program)


def test_the_sum_of_two_uses_takes_no_memory_of_its_own(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grads: list[Tensor] = []
    uses: list[list[Tensor]] = []
    add_slot = tg._C.GraphedCallable.add_slot

    def watched(graphed: Any, **slot: Any) -> None:
        grads.extend(slot["grad_inputs"])
        uses.extend(slot["use_grads"])
        add_slot(graphed, **slot)

    monkeypatch.setattr(tg._C.GraphedCallable, "add_slot", watched)
    tg.make_graphed_callables(Block(device), (leaf(device, 4, 8),))
    assert grads[0].data_ptr() in [use.data_ptr() for use in uses[0]]


def test_the_sum_of_two_uses_in_a_chain(device: str) -> None:
    def program(graph: Graph) -> list[Tensor]:
        blocks = tuple(Block(device) for _ in range(3))
        seen = []
        first, second, third = graph(blocks, (leaf(device, 4, 8),), chain=True, max_in_flight=2)
        for step in range(6):
            x = leaf(device, 4, 8)
            y = second(first(x))
            loss = third(y).square().sum()
            if step % 3 == 1:
                loss = loss + y.sin().sum()
            loss.backward()
            seen += [x.grad, *(p.grad.clone() for block in blocks for p in block.parameters())]
            if step == 3:
                for block in blocks:
                    block.zero_grad()
        return seen

    both(program)
