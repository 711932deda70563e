"""What the tests of guards share: a net that reaches tensors in many ways, and what a call of it has to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import replays
from torch import Tensor, nn
from twins import eager_copy, run

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal


def batch(device: str) -> Tensor:  # [3, 4]
    return torch.randn(3, 4, device=device, requires_grad=True)


class Config:
    def __init__(self, gain: Tensor) -> None:
        self.gain = gain


class Net(nn.Module):
    """Reaches tensors through parameters, buffers, lists, dictionaries and plain objects."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(4, 4, device=device), nn.GELU()
        self.layers = nn.ModuleList([nn.Linear(4, 4, device=device), nn.Tanh()])
        self.register_buffer("shift", torch.randn(4, device=device))
        self.scale = torch.randn(4, device=device)
        self.constants = [torch.randn(4, device=device), torch.randn(4, device=device)]
        self.table = {"bias": torch.randn(4, device=device)}
        self.config = Config(torch.randn(4, device=device))

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        x = self.act(self.up(x)) + self.shift * self.scale
        for layer in self.layers:
            x = layer(x) * self.constants[0] + self.constants[1]
        return x + self.table["bias"] * self.config.gain


def graphed_net(device: str, **options: Any) -> tuple[Net, Net]:
    net = Net(device)
    twin = eager_copy(net)
    make_graphed_callables(net, (batch(device),), **options)
    return net, twin


def assert_replays(net: Any, twin: Callable, device: str, calls: int = 2) -> None:
    before = replays(net)
    for _ in range(calls):
        x = batch(device)
        assert_bitwise_equal(run(net, x), run(twin, x))
    assert replays(net) == before + calls


def assert_refused(net: Any, device: str, words: str) -> None:
    before, x = replays(net), batch(device)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"{words}.* since capture"):
            net(x)
    assert replays(net) == before


class Memory:
    """Remembers all that a net reaches, and puts it back."""

    def __init__(self, net: Net) -> None:
        owners = [*net.modules(), net.config]
        self._members = [(owner, owner.__dict__) for owner in owners]
        inner = [value for owner in owners for value in vars(owner).values() if isinstance(value, dict)]
        self._dicts = [(table, dict(table)) for table in [*map(vars, owners), *inner]]
        self._list = net.constants, list(net.constants)
        tensors = [*net.parameters(), *net.buffers(), *net.constants, net.scale, net.table["bias"], net.config.gain]
        self._tensors = [(tensor, tensor.data, tensor.requires_grad) for tensor in tensors]

    def restore(self) -> None:
        for owner, members in self._members:
            owner.__dict__ = members
        for table, content in self._dicts:
            table.clear()
            table.update(content)
        self._list[0][:] = self._list[1]
        for tensor, data, requires_grad in self._tensors:
            tensor.data = data
            tensor.requires_grad_(requires_grad)


def double(tensor: Tensor) -> Tensor:
    return tensor.detach() * 2
