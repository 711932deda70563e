"""Silent hazards of graph replay in what code in a backward reads of modules: training flags and hooks.

A module has these whatever its attributes are, and a guard does not find them among what code names.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hazards import batch
from torch import Tensor, nn

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

Read = Callable[["Scaled"], float]
Change = Callable[["Scaled"], Any]


class Times(torch.autograd.Function):
    """Scales the gradient by what ``read`` tells of ``module`` in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, read: Read) -> Tensor:  # [n, 4] -> [n, 4]
        ctx.module, ctx.read = module, read
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # [n, 4] -> [n, 4]
        return grad * ctx.read(ctx.module), None, None


@dataclasses.dataclass
class Settings:
    gain: float = 2.0


class Scaled(nn.Module):
    def __init__(self, read: Read, device: str) -> None:
        super().__init__()
        self.inner, self.settings, self._read = nn.Linear(4, 4, device=device), Settings(), read

    def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        return Times.apply(self.inner(x), self, self._read)


READS: dict[str, tuple[Read, Change, Change, str]] = {
    "flag of the callable": (
        lambda net: 2.0 if net.training else 1.0,
        lambda net: setattr(net, "training", False),
        lambda net: net.train(),
        "training flag of Scaled",
    ),
    "flag of a submodule": (
        lambda net: 2.0 if net.inner.training else 1.0,
        lambda net: net.inner.eval(),
        lambda net: net.train(),
        "training flag of inner",
    ),
    "hooks": (
        lambda net: 2.0 + len(net.inner._forward_hooks),
        lambda net: net.inner.register_forward_hook(print),
        lambda net: net.inner._forward_hooks.clear(),
        "forward hooks of inner",
    ),
    "fields": (
        lambda net: sum(dataclasses.asdict(net.settings).values()),
        lambda net: setattr(net.settings, "gain", 3.0),
        lambda net: setattr(net.settings, "gain", 2.0),
        "settings.*gain.* changed",
    ),
    "attributes by vars": (
        lambda net: sum(vars(net.settings).values()),
        lambda net: setattr(net.settings, "gain", 3.0),
        lambda net: setattr(net.settings, "gain", 2.0),
        "settings.*gain.* changed",
    ),
}


@pytest.mark.parametrize(("read", "change", "undo", "name"), READS.values(), ids=READS)
def test_what_a_backward_reads_of_a_module_is_seen_between_forward_and_backward(device, read, change, undo, name):
    net, x = make_graphed_callables(Scaled(read, device), (batch(device),)), batch(device)
    for _ in range(2):
        (grad,) = torch.autograd.grad(net(x).sum(), x)
        assert_bitwise_equal(grad, torch.full((len(x), 4), read(net), device=device) @ net.inner.weight.detach())
    y = net(x)
    with contextlib.ExitStack() as undone:
        undone.callback(undo, net)
        change(net)
        with pytest.raises(RuntimeError, match=rf"{name}.* since the forward, and code that the backward runs reads"):
            y.sum().backward()


def test_a_flag_that_the_backward_does_not_read_may_change(device):
    net = make_graphed_callables(Scaled(lambda net: net.settings.gain, device), (batch(device),))
    y = net(batch(device))
    net.eval()
    y.sum().backward()


def test_a_gradient_that_appears_is_not_seen_by_a_backward_a_documented_limit(device):
    net = make_graphed_callables(
        Scaled(lambda net: 2.0 if net.inner.weight.grad is None else 1.0, device), (batch(device),)
    )
    x = batch(device)
    y = net(x)
    net.inner.weight.grad = torch.zeros_like(net.inner.weight)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert_bitwise_equal(grad, torch.full((len(x), 4), 2.0, device=device) @ net.inner.weight.detach())
