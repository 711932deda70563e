"""Layers whose results have gradients that lie in another order of dimensions: graphs compute with that order."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import eager_copy

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
_CHANNELS = 3


class _Weighted(torch.autograd.Function):
    """x * scale, where the gradient of ``scale`` depends on how that of the result lies in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:  # [n, 3, h, w], [1]
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # [n, 3, h, w]
        (scale,) = ctx.saved_tensors
        in_memory = torch.empty_like(grad).copy_(grad).as_strided([grad.numel()], [1])
        places = torch.arange(grad.numel(), device=grad.device, dtype=grad.dtype)
        return grad * scale, (in_memory * places).sum().reshape(1)


class Block(nn.Module):
    """[n, 3, h, w] -> the same"""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:  # [n, 3, h, w]
        return _Weighted.apply(torch.tanh(x), self.scale)


class Pair(Block):
    """[n, 3, h, w] -> two of the same"""

    def forward(self, x: Tensor) -> dict[str, Any]:  # [n, 3, h, w]
        return {"one": [super().forward(x.sin()), 1], "other": super().forward(x.cos())}


class Model(nn.Module):
    """[n, 3, h, w] -> the same; between its layers the channels are last."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList([kind(), kind()]), nn.LayerNorm(_CHANNELS)

    def forward(self, x: Tensor) -> Tensor:  # [n, 3, h, w]
        for layer in self.layers:
            x = layer(x)
            if isinstance(x, dict):
                x = torch.cat([x["one"][0], x["other"]], dim=1)[:, 1:4] * x["other"].contiguous()
            x = self.norm(x.movedim(1, -1)).movedim(-1, 1)
        return x


class Chain(Model):
    """Its layers feed each other."""

    def forward(self, x: Tensor) -> Tensor:  # [n, 3, h, w]
        for layer in self.layers:
            x = layer(x)
        return self.norm(x.movedim(1, -1)).movedim(-1, 1)


def step(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


def batch(device: str, rows: int = 2) -> Tensor:  # [rows, 3, 5, 7]
    return torch.randn(rows, _CHANNELS, 5, 7, device=device)


@pytest.mark.parametrize(
    ("model", "kind", "rows"), [(Model, Block, 2), (Model, Block, 1), (Model, Pair, 2), (Chain, Block, 2)]
)
def test_gradients_reach_the_graph_as_they_lie_in_the_step(
    device: str, model: type[Model], kind: type[Block], rows: int
) -> None:
    model = model(kind).to(device)
    twin = eager_copy(model)
    sample = batch(device, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = tg.graph_layers(model, lambda: step(model, sample))
        for count in (rows, rows, 3):  # the last one is captured as it comes
            x = batch(device, count)
            assert_bitwise_equal(step(model, x), step(twin, x))
    assert len(report.layers) == 2
    assert all(layer.te_graph.info()["backward_replays"] == 3 for layer in model.layers)


def test_with_another_number_of_dimensions_gradients_are_read_as_results_lie(device: str) -> None:
    model = Model(Block).to(device)
    tg.graph_layers(model, lambda: step(model, batch(device)))
    with pytest.warns(UserWarning, match=r"gradient of output 0 has strides \[15, 1, 3\].* reads it with \[15, 5, 1\]"):
        step(model, torch.randn(2, _CHANNELS, 5, device=device))
    info = model.layers[0].te_graph.info()
    assert (info["backward_replays"], info["recaptures"], info["eager_calls"]) == (1, 1, {})


def test_a_step_without_a_backward_shows_no_order_and_a_warning_says_so(device: str) -> None:
    model = Model(Block).to(device)
    tg.graph_layers(model, (batch(device),))
    with pytest.warns(UserWarning, match=r"the gradient of output 0 has strides .*Give graph_layers a step with its"):
        step(model, batch(device))


class _Auxiliary(torch.autograd.Function):
    """x * 2 and x * 3, of which the latter gives no gradient, not even zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:  # [...]
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> Tensor | None:  # [...] each
        return None if grad is None else grad * 2


class Scaled(Block):
    def forward(self, x: Tensor) -> Tensor:  # [n, 3, h, w]
        return torch.tanh(x) * self.scale


def test_a_result_may_get_no_gradient(device: str) -> None:
    model = Chain(Scaled).to(device)
    twin, sample = eager_copy(model), batch(device)

    def gradients(model: nn.Module, of_used: bool) -> list[Tensor | None]:
        model.zero_grad()
        used, unused = _Auxiliary.apply(model.layers[1](model.layers[0](sample)))
        (used if of_used else unused).square().sum().backward()
        return [layer.scale.grad for layer in model.layers]

    report = tg.graph_layers(model, lambda: gradients(model, of_used=False))
    assert len(report.layers) == 2
    assert gradients(model, of_used=False) == gradients(twin, of_used=False) == [None, None]
    assert_bitwise_equal(gradients(model, of_used=True), gradients(twin, of_used=True))
    assert [layer.te_graph.info()["forward_replays"] for layer in model.layers] == [2, 2]
