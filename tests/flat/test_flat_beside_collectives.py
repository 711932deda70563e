"""Reductions beside a backward whose graphs have collectives of another group, for many steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import Rank, ranks_of
from torch import Tensor, nn

import te_graph as tg
from te_graph.testing import same_bits

WORLDS = [
    pytest.param(("cpu", 2), id="gloo-2"),
    pytest.param(("cuda", 2), id="nccl-2", marks=pytest.mark.multi_gpu),
]
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
WIDTH, LAYERS, MICROBATCHES = 64, 3, 2
STEPS = {"cpu": 5, "cuda": 10_000}
COMPARED = 5


class Split(nn.Module):
    """A layer whose result is the sum of what ranks compute, in the forward and in the backward."""

    def __init__(self, group: tg.PeerGroup) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:  # [..., WIDTH]
        y = tg.tensor_parallel.copy_to_tp(self.norm(x), self._group)
        return x + tg.tensor_parallel.reduce_from_tp(self.second(torch.tanh(self.first(y))), self._group)


def train(rank: Rank, steps: int, overlap: bool) -> list[Tensor]:
    """Parameters [...] after ``steps`` of them."""
    torch.manual_seed(3)
    shard = "optimizer" if overlap else "none"
    with tg.PeerGroup() as group:
        model = nn.Sequential(*(Split(group) for _ in range(LAYERS))).to(rank.device)
        gathered = list(model) if overlap else ()
        flat = tg.FlatParameters(
            model,
            bucket_bytes=4 * WIDTH * WIDTH,
            overlap_grad_reduce=overlap,
            shard=shard,
            overlap_param_gather=gathered,
        )
        samples = [torch.randn(4, WIDTH, device=rank.device) for _ in range(MICROBATCHES)]
        arguments = tuple((samples[0].clone().requires_grad_(number > 0),) for number in range(LAYERS))
        tg.make_graphed_callables(tuple(model), arguments, chain=True)
        optimizer = flat.optimizer(torch.optim.SGD, lr=1e-4, momentum=0.9)
        for _ in range(steps):
            with flat.no_sync():
                for x in samples[:-1]:
                    model(x).square().mean().backward()
            model(samples[-1]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        flat.wait_for_parameters()
        found = [parameter.detach().clone() for parameter in model.parameters()]
        assert all(layer.te_graph.info()["backward_replays"] == steps * MICROBATCHES for layer in model)
        group.check()
        flat.peer_group.check()
        flat.close()
    return found


def scenario_many_steps(rank: Rank) -> None:
    kind = rank.device.partition(":")[0]
    for found, expected in zip(train(rank, COMPARED, True), train(rank, COMPARED, False), strict=True):
        assert same_bits(found, expected)
    assert all(one.isfinite().all() for one in train(rank, STEPS[kind], True))


def test_reductions_run_beside_graphs_with_collectives_of_another_group(ranks: Any) -> None:
    ranks.run(scenario_many_steps, 1)
