"""Ranks that share scales: what they reduce, and in which order, depends on the program alone."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import WORLDS, Rank, ranks_of
from torch import Tensor, nn

import te_graph as tg

ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
RECIPE = tg.DelayedScaling(amax_history_len=4)
WIDTH = 16


def region() -> tg.fp8_autocast:
    return tg.fp8_autocast(recipe=RECIPE, amax_reduction_group=dist.group.WORLD)


def new_layer(rank: Rank) -> tg.Linear:
    return tg.Linear(WIDTH, WIDTH, bias=False, device=rank.device)


def blocks_in_order(rank: Rank) -> None:
    """40 layers are in two blocks of columns; the loop inside one region lets casts of weights ask for updates."""
    beside = [object() for _ in range(12345 * rank.rank)]  # other addresses
    model = nn.Sequential(*(new_layer(rank) for _ in range(40)))
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(WIDTH, WIDTH, device=rank.device)
    sizes, all_reduce = [], dist.all_reduce

    def counted(tensor: Tensor, *arguments: object) -> object:
        sizes.append(tensor.numel())
        return all_reduce(tensor, *arguments)

    with mock.patch.object(dist, "all_reduce", counted), region():
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    del beside
    everywhere = [None] * rank.world
    dist.all_gather_object(everywhere, (sizes, [(layer.fp8.block.order, layer.fp8.number) for layer in model]))
    assert sizes and everywhere == [everywhere[0]] * rank.world
    places = [(layer.fp8.block.order, layer.fp8.number) for layer in model]
    assert places == sorted(places)


def test_updates_of_several_blocks_come_in_one_order_on_all_ranks(ranks) -> None:
    ranks.run(blocks_in_order, 0)
