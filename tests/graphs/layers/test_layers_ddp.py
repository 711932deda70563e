"""graph_layers of what DistributedDataParallel wraps: the gradients are those of an eager one on the same batches."""

from __future__ import annotations

import contextlib

import pytest
import torch
from blocks import Block, InTurn, batch
from ranks import WORLDS, Rank, Ranks, ranks_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from twins import eager_copy, gradients_of

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS[1:])


class Norm(InTurn):
    """Has a buffer, which DistributedDataParallel sends from the first rank to the others before a forward."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [n, 6]
        return super().forward(self.norm(x))


def train_two_steps(rank: Rank) -> None:
    model = Norm(Block(), Block()).to(rank.device)
    twin = eager_copy(model)
    wrapped = [DistributedDataParallel(one, broadcast_buffers=True) for one in (model, twin)]
    report = tg.graph_layers(wrapped[0], batch(rank.device))
    assert report.layers == ("layers.0", "layers.1")
    assert wrapped[0].require_backward_grad_sync
    assert wrapped[0].require_forward_param_sync is wrapped[1].require_forward_param_sync
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in wrapped]
    torch.manual_seed(rank.rank)  # unequal data
    for _ in range(2):
        x, seen = batch(rank.device), []
        for one, optimizer in zip(wrapped, optimizers, strict=True):
            one(x).square().mean().backward()
            seen.append(gradients_of([*one.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
        assert_bitwise_equal(*seen)
        assert_bitwise_equal(dict(model.state_dict()), dict(twin.state_dict()))
    assert [layer.te_graph.info()["forward_replays"] for layer in model.layers] == [2, 2]


def test_two_steps_on_unequal_batches(ranks: Ranks, seed: int) -> None:
    ranks.run(train_two_steps, seed)


def train_static_graph(rank: Rank, as_view: bool) -> None:
    """The watched step is the first iteration, of which the reducer keeps what it has found."""
    model = InTurn(Block(), Block()).to(rank.device)
    model.unused = nn.Linear(6, 6, device=rank.device)
    wrapped = [
        DistributedDataParallel(one, static_graph=True, gradient_as_bucket_view=as_view)
        for one in (model, eager_copy(model))
    ]
    torch.manual_seed(rank.rank)  # unequal data
    x = batch(rank.device)

    def gradients(one: nn.Module) -> object:
        one(x).square().mean().backward()
        seen = gradients_of([*one.parameters()])
        one.zero_grad()
        return seen

    gradients(wrapped[1])
    report = tg.graph_layers(wrapped[0], lambda: wrapped[0](x).square().mean().backward())
    assert report.layers == ("layers.0", "layers.1")
    for _ in range(3):
        assert_bitwise_equal(*map(gradients, wrapped))
        assert_bitwise_equal(*(one.reducer._get_local_used_map() for one in wrapped))
    assert [layer.te_graph.info()["forward_replays"] for layer in model.layers] == [3, 3]


@pytest.mark.parametrize("as_view", [False, True])
def test_a_static_graph_that_begins_with_the_watched_step(ranks: Ranks, seed: int, as_view: bool) -> None:
    ranks.run(train_static_graph, seed, as_view)


def train_after_a_forward(rank: Rank, watched: str, forwards: str) -> None:
    """No backward follows the watched step, nor some forwards behind it, which the reducer waits for all the same."""
    model = InTurn(Block(), Block()).to(rank.device)
    wrapped = [DistributedDataParallel(one) for one in (model, eager_copy(model))]
    torch.manual_seed(rank.rank)  # unequal data
    x = batch(rank.device)
    if watched == "function":  # of the user's code, which runs as it is
        tg.graph_layers(wrapped[0], lambda: wrapped[0](x).square().mean())
        wrapped[1](x).square().mean()
    else:
        tg.graph_layers(wrapped[0], x)
    for forward in forwards:
        seen = []
        for one in wrapped:
            with torch.set_grad_enabled(forward != "n"), one.no_sync() if forward == "a" else contextlib.nullcontext():
                loss = one(x).square().mean()
            if forward in "ab":
                loss.backward()
            seen.append(gradients_of([*one.parameters()]))
        assert_bitwise_equal(*seen)
    assert [layer.te_graph.info()["recaptures"] for layer in model.layers] == [0, 0]


@pytest.mark.parametrize("watched", ["function", "batch"])
@pytest.mark.parametrize("forwards", ["abb", "bfb", "nfab", "ffb"])
def test_forwards_without_a_backward_are_to_the_reducer_what_eager_ones_are(
    ranks: Ranks, seed: int, watched: str, forwards: str
) -> None:
    """f: a forward, n: one without gradients, a: with a backward that is not reduced, b: with one that is."""
    ranks.run(train_after_a_forward, seed, watched, forwards)
