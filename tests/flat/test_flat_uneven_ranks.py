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
            RuntimeError,
            match="expected gradients of flat parameters that have been reduced, got that of bias and 1 more",
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


@torch.no_grad()
def scenario_set_by_hand(rank: Rank, dtype: torch.dtype) -> None:
    """Whoever sets gradients: those of this rank alone are refused, by name, until they are reduced."""
    module = nn.Linear(128, 64, bias=False).to(rank.device, dtype)
    flat = tg.FlatParameters(module, shard="optimizer")
    optimizer = flat.optimizer(torch.optim.SGD, lr=1.0, fused=True)
    graphed_step = tg.graphed(lambda: optimizer.step())
    clips = (lambda: tg.clip_grad_norm_(flat, 1e9), lambda: nn.utils.clip_grad_norm_(module.parameters(), 1e9))

    def set_by_hand() -> None:
        module.weight.grad = torch.full_like(module.weight, rank.rank + 1.0)

    def expect_refused() -> None:
        for read in (*clips, optimizer.step, graphed_step):
            with pytest.raises(RuntimeError, match=r"reduced, got that of weight, which .* flat.reduce_gradients\(\)"):
                read()

    def step() -> float:
        module.weight.zero_()
        for clip in clips:
            clip()
        optimizer.step()
        return module.weight.unique().item()

    def backward() -> None:
        with torch.enable_grad():
            module(torch.ones(1, 128, device=rank.device, dtype=dtype)).sum().backward()

    def set_to_zero() -> None:
        optimizer.zero_grad(set_to_none=False)
        assert step() == 0.0

    set_by_hand()  # before the first backward
    expect_refused()
    flat.reduce_gradients()
    assert step() == -1.5
    for drop in (flat.zero_grad, optimizer.zero_grad, module.zero_grad, set_to_zero):
        drop()
        backward()
        assert step() == -1.0
        drop()
        set_by_hand()
        expect_refused()
        flat.reduce_gradients()
        assert step() == -1.5
    optimizer.zero_grad()
    backward()
    graphed_step()
    if dtype == torch.float32:  # what takes the place of a reduced one
        module.weight.grad = module.weight.grad * 2
        assert step() == -2.0
    else:  # what is to be added to it
        set_by_hand()
        expect_refused()
        flat.reduce_gradients()
        assert step() == -2.5
    optimizer.zero_grad()
    flat.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gradients_that_are_set_by_hand_are_not_stepped_unreduced(ranks: Any, dtype: torch.dtype) -> None:
    ranks.run(scenario_set_by_hand, 5, dtype)


def scenario_captured_drops(rank: Rank, sets_to_none: bool) -> None:
    """A capture, which drops gradients and puts them back, leaves them reduced for the replay behind it."""
    torch.manual_seed(0)
    module = nn.Linear(128, 64).to(rank.device, torch.bfloat16)
    flat = tg.FlatParameters(module, shard="optimizer")
    optimizer = flat.optimizer(torch.optim.AdamW, lr=0.1, fused=True)

    @tg.graphed
    def step() -> None:
        tg.clip_grad_norm_(flat, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=sets_to_none)

    for _ in range(4):
        before = module.weight.detach().clone()
        module(torch.ones(1, 128, device=rank.device, dtype=torch.bfloat16)).sum().backward()
        step()
        assert not same_bits(module.weight.detach(), before)
    assert step.info()["graphs"] == 1
    flat.close()


@pytest.mark.parametrize("sets_to_none", [True, False])
def test_what_a_captured_step_drops(ranks: Any, sets_to_none: bool) -> None:
    ranks.run(scenario_captured_drops, 6, sets_to_none)


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
