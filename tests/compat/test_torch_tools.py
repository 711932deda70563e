"""Tools of torch over a model with graphed layers: what each makes of it has the bits of eager execution."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from companions import assert_replayed, state_of
from torch import Tensor, nn
from torch.func import functional_call

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Net(nn.Module):
    """Two blocks to be graphed between eager ends: [n, 6] -> [n, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 3]
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def net_and_twin(device: str, on_mismatch: str = "raise") -> tuple[Net, Net]:
    model = Net().to(device)
    twin = copy.deepcopy(model)
    tg.graph_layers(model, batch(device), on_mismatch=on_mismatch)
    return model, twin


def batch(device: str) -> Tensor:  # [5, 6]
    return torch.randn(5, 6, device=device)


def test_autocast_and_grad_scaler(device: str) -> None:
    model = Net().to(device)
    twin = copy.deepcopy(model)
    with torch.autocast(device, torch.float16):
        tg.graph_layers(model, batch(device))
    scalers = [torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, twin)]
    for step in range(6):
        x, seen = batch(device), []
        for each, scaler, optimizer in zip((model, twin), scalers, optimizers, strict=True):
            with torch.autocast(device, torch.float16):
                loss = each(x).float().square().mean() * (torch.inf if step == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen.append([loss.detach(), state_of(each), scaler.get_scale()])
        assert_bitwise_equal(*seen)
    assert_replayed(model.blocks, 6)


def test_functional_call_with_other_parameters(device: str) -> None:
    model, twin = net_and_twin(device, on_mismatch="eager")
    other, x = {name: tensor * 2 for name, tensor in state_of(model).items()}, batch(device)
    assert_bitwise_equal(*(functional_call(each, other, (x,)).detach() for each in (model, twin)))
    assert_bitwise_equal(*(each(x).detach() for each in (model, twin)))
    assert [block.te_graph.info()["forward_replays"] for block in model.blocks] == [1, 1]


def test_functional_call_with_other_parameters_is_refused_by_name(device: str) -> None:
    model, _ = net_and_twin(device)
    other = {name: (tensor * 2).requires_grad_() for name, tensor in state_of(model).items()}
    with pytest.raises(RuntimeError, match=r"blocks.0 \(Sequential\): weight of 0 "):
        functional_call(model, other, (batch(device),))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace(device: str) -> None:
    model, twin = net_and_twin(device)
    traced, x = torch.jit.trace(model, (batch(device),)), batch(device)
    assert_bitwise_equal(traced(x).detach(), twin(x).detach())
    assert_bitwise_equal(model(x).detach(), twin(x).detach())


def test_export(device: str) -> None:
    model, twin = net_and_twin(device)
    exported, x = torch.export.export(model, (batch(device),)), batch(device)
    assert_bitwise_equal(exported.module()(x).detach(), twin(x).detach())
    assert_bitwise_equal(model(x).detach(), twin(x).detach())


def test_export_by_the_compiler_is_refused(device: str) -> None:
    model, _ = net_and_twin(device)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="te_graph replays a graph there"):
        torch.export.export(model, (batch(device),), strict=True)


def test_compiled_autograd_is_refused(device: str) -> None:
    model, twin = net_and_twin(device)
    compiled = partial(torch._dynamo.compiled_autograd._enable, torch.compile(backend="eager"))
    with (
        compiled(),
        pytest.raises(RuntimeError, match=r"^blocks.1 .* does not support compiled autograd, which traces"),
    ):
        model(batch(device)).sum().backward()
    with compiled(), pytest.raises(RuntimeError, match=r"^graph_layers: called where compiled autograd is on"):
        tg.graph_layers(twin, batch(device))
