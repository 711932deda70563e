"""graph_layers needs no more memory than an eager step and the graphs that stay, at its peak. The reference is torch's
allocator, of which the recorder has no part."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import te_graph as tg

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("repeatable")]

_WIDTH, _TOKENS, _LAYERS = 256, 4096, 8


class Model(nn.Module):
    """Most of its memory is activations: 60 MiB of each layer, beside 6 MiB of weights and gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True, device="cuda")
            for _ in range(_LAYERS)
        )
        self.head = nn.Linear(_WIDTH, 1000, device="cuda")

    def forward(self, x: Tensor) -> Tensor:  # x: [batch, tokens, width] -> [batch, tokens, 1000]
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def peak_of(call: Callable[[], object]) -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("with_backward", [True, False])
def test_the_peak_is_that_of_a_step_and_the_graphs(with_backward: bool) -> None:
    model, x = Model(), torch.randn(4, _TOKENS // 4, _WIDTH, device="cuda")

    def step() -> None:
        model(x).square().mean().backward()

    step()  # gradients and workspaces are there
    eager = peak_of(step)
    reports = []
    peak = peak_of(lambda: reports.append(tg.graph_layers(model, step if with_backward else (x,))))
    assert len(reports[0].layers) == _LAYERS
    print(f"peak {peak >> 20} MiB, of an eager step {eager >> 20}, graphs {reports[0].bytes >> 20}")
    assert peak <= eager + reports[0].bytes
