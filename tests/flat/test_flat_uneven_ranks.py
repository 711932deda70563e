"""Ranks that begin with other values, or have other backwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, ranks_of
from torch import nn

import te_graph as tg
from te_graph.testing import same_bits

WORLDS = [
    pytest.param(("cpu", 2), id="gloo-2"),
    pytest.param(("cuda", 2), id="nccl-2", marks=pytest.mark.multi_gpu),
]
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)


class WithOthers(nn.Module):
    """Frozen parameters and buffers of all kinds beside one that trains."""

    def __init__(self, seed: int, device: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def drawn(*shape: int) -> torch.Tensor:  # shape
            return torch.randn(shape, generator=generator).to(device)

        self.trained = nn.Parameter(drawn(3))
        self.frozen = nn.Parameter(drawn(4, 5).t(), requires_grad=False)
        self.low = nn.Parameter(drawn(7).bfloat16(), requires_grad=False)
        self.register_buffer("mask", drawn(5) > 0)
        self.register_buffer("count", torch.tensor(seed, device=device))
        self.register_buffer("empty", torch.empty(0, device=device))
        self.register_buffer("expanded", drawn(1).expand(3))
        self.register_buffer("elsewhere", torch.zeros(2, device="meta"), persistent=False)
        self.register_buffer("conjugate", torch.complex(drawn(3), drawn(3)).conj())
        self.register_buffer("negative", torch._neg_view(drawn(3)))
        self.register_buffer("nested", torch.nested.nested_tensor([drawn(2), drawn(3)]), persistent=False)


def scenario_others(rank: Rank) -> None:
    module, first = WithOthers(rank.rank, rank.device), WithOthers(0, rank.device)
    expanded, version = module.expanded.clone(), module.frozen._version
    flat = tg.FlatParameters(module)
    for name in ("trained", "frozen", "low", "mask", "count", "conjugate", "negative"):
        mine, other = (getattr(one, name).detach().resolve_conj().resolve_neg() for one in (module, first))
        assert same_bits(mine, other), name
    assert same_bits(module.expanded, expanded) and module.frozen._version > version
    assert module.frozen.stride() == (1, 5)
    flat.close()
    module = WithOthers(rank.rank, rank.device)
    if rank.rank == 1:
        module.register_buffer("more", torch.zeros(3, device=rank.device))
    with pytest.raises(RuntimeError, match=r"expected the same model on all ranks, got .*more"):
        tg.FlatParameters(module)


def test_frozen_parameters_and_buffers_are_those_of_the_first_rank(ranks: Any) -> None:
    ranks.run(scenario_others, 1)


def scenario_by_hand(rank: Rank, overlap: bool) -> None:
    """A rank without a last micro-batch reduces by hand what others reduce in their backward."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(rank.device)
    expected = [torch.zeros_like(one) for one in module.parameters()]
    drawn = [torch.randn(3, 64).to(rank.device) for _ in range(3)]
    for x in (drawn[0], drawn[1], drawn[0]):  # of both ranks together
        for total, grad in zip(expected, torch.autograd.grad(module(x).sum(), list(module.parameters())), strict=True):
            total.add_(grad / 2)
    flat = tg.FlatParameters(module, bucket_bytes=1, overlap_grad_reduce=overlap)
    for _ in range(3):
        flat.zero_grad()
        module(drawn[2]).sum().backward()  # learns how often each gradient comes
    flat.zero_grad()
    with flat.no_sync():
        module(drawn[0]).sum().backward()
    if rank.rank == 0:
        module(drawn[1]).sum().backward()
    else:
        flat.reduce_gradients()
    for parameter, total in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, total)
    flat.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_rank_without_a_last_micro_batch_reduces_by_hand(ranks: Any, overlap: bool) -> None:
    ranks.run(scenario_by_hand, 2, overlap)


def scenario_not_reduced(rank: Rank) -> None:
    """A sharded step or clip with what each rank has computed alone is an error; nothing is stepped."""
    torch.manual_seed(0)
    module = nn.Linear(64, 64).to(rank.device)
    flat = tg.FlatParameters(module, shard="optimizer")
    optimizer = flat.optimizer(torch.optim.SGD, lr=0.1)
    x, before = torch.ones(3, 64, device=rank.device), module.weight.detach().clone()
    optimizer.step()  # without gradients
    for read in (optimizer.step, lambda: tg.clip_grad_norm_(flat, 1.0)):
        with flat.no_sync():
            module(x).sum().backward()
        with pytest.raises(
            RuntimeError, match="expected gradients of flat parameters that have been reduced, but more"
        ):
            read()
        assert same_bits(module.weight.detach(), before)
    flat.reduce_gradients()
    optimizer.step()
    assert not same_bits(module.weight.detach(), before)
    optimizer.zero_grad()
    with flat.no_sync():
        module(x).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    module(x).sum().backward()
    optimizer.step()
    flat.close()


def test_sharded_gradients_that_were_not_reduced_are_not_stepped(ranks: Any) -> None:
    ranks.run(scenario_not_reduced, 3)


def scenario_state_dict(rank: Rank, goes_on: bool) -> None:
    """One rank alone calls for what all have a part of, where the others train on or go elsewhere."""
    process_group = dist.new_group()
    group = tg.PeerGroup(process_group, timeout=4.0, buffer_bytes=64 << 20, device=rank.device)
    torch.manual_seed(0)
    module = nn.Linear(64, 64).to(rank.device)
    flat = tg.FlatParameters(module, shard="optimizer", peer_group=group)
    optimizer = flat.optimizer(torch.optim.AdamW, lr=0.1)
    x = torch.ones(3, 64, device=rank.device)
    module(x).sum().backward()
    optimizer.step()
    assert sorted(optimizer.state_dict()["state"]) == [0, 1]
    message = "rank 0 calls FlatOptimizer.state_dict, which all ranks call"
    if rank.rank == 0:
        with pytest.raises(RuntimeError, match=message):
            optimizer.state_dict()
    elif goes_on:
        with pytest.raises(RuntimeError, match=message):
            for _ in range(100):  # what is between peers fails later than it is launched
                module(x).sum().backward()
                optimizer.step()
                module.weight.sum().item()
    dist.barrier()
    flat.close()
    group.close()


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_state_dict_that_one_rank_calls_is_named_on_all(ranks: Any, goes_on: bool) -> None:
    ranks.run(scenario_state_dict, 4, goes_on)
