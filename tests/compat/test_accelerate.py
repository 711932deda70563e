"""Accelerate over a model with graphed layers, in one process and in two: the bits of eager training."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from companions import assert_replayed, state_of
from ranks import WORLDS, Rank, Ranks, ranks_of
from torch import Tensor, nn

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS[:2])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 8]
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return x


def trained(model: Net, data: Tensor, rank: Rank, is_graphed: bool) -> dict[str, Tensor]:
    """After three steps of two micro-batches of ``data`` [6, 5, 6]."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    environment = dict(os.environ)
    os.environ |= {"RANK": str(rank.rank), "LOCAL_RANK": str(rank.rank), "WORLD_SIZE": str(rank.world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": str(rank.world)}
    try:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
        assert accelerator.num_processes == rank.world
        wrapped, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        if is_graphed:
            with accelerator.autocast():
                tg.graph_layers(model, data[0])
        torch.manual_seed(7 + rank.rank)
        for batch in data:
            with accelerator.accumulate(wrapped):
                accelerator.backward(wrapped(batch).float().square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(wrapped.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        return state_of(model)
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        os.environ.clear()
        os.environ.update(environment)


def trains_as_eager(rank: Rank) -> None:
    model = Net()
    twin, data = copy.deepcopy(model), torch.randn(rank.world, 6, 5, 6)[rank.rank]
    assert_bitwise_equal(trained(model, data, rank, True), trained(twin, data, rank, False))
    assert_replayed(model.layers, 6)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_accumulation_and_clipping(ranks: Ranks, seed: int) -> None:
    ranks.run(trains_as_eager, seed)
