"""Loss scaling over ranks: the reference are the steps that are written out here."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import Rank, ranks_of
from torch import nn

import te_graph as tg

WORLDS = [
    pytest.param(("cpu", 2), id="gloo-2"),
    pytest.param(("cpu", 3), id="gloo-3"),
    pytest.param(("cuda", 2), id="nccl-2", marks=pytest.mark.multi_gpu),
]
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)


def scenario_scaler(rank: Rank, dtype: torch.dtype, fused: bool) -> None:
    """Where one rank finds an infinity all skip the step, and all have the same scale."""
    model = nn.Linear(200, 200, bias=False, device=rank.device, dtype=dtype)
    flat = tg.FlatParameters(model, shard="optimizer")
    optimizer = flat.optimizer(torch.optim.SGD, lr=0.125, fused=fused)
    scaler = tg.FlatGradScaler(rank.device.partition(":")[0], init_scale=8.0, growth_interval=100)
    plain = torch.amp.GradScaler(rank.device.partition(":")[0], init_scale=8.0)
    x = torch.ones(2, 200, device=rank.device, dtype=dtype)
    expected, scale = model.weight.detach().float(), 8.0

    def backward(scaler: torch.amp.GradScaler, factor: float) -> None:
        y = model(x).float()
        scaler.scale(y[:, :-1].sum() + y[:, -1].sum() * factor).backward()

    backward(plain, 1.0)
    where = "in part on each rank"
    with pytest.raises(RuntimeError, match=rf"GradScaler.step: expected .* {where}: make a te_graph.FlatGradScaler"):
        plain.step(optimizer)
    if dtype == torch.float32:
        with pytest.raises(
            RuntimeError, match=r"clip_grad_norm_: gradients of flat .* are reduced on this rank in part"
        ):
            tg.clip_grad_norm_(model.parameters(), 1.0)
    flat.zero_grad()
    for step in range(6):
        is_bad = step in (1, 4)
        # In the part of one rank alone.
        backward(scaler, float("inf") if is_bad and rank.rank == 1 else 1.0)
        if step % 3 == 1:
            scaler.unscale_(optimizer)
            assert [one.item() for one in scaler._found_inf_per_device(optimizer).values()] == [float(is_bad)]
            norm = tg.clip_grad_norm_(flat, float("inf"))
            assert norm.isfinite().item() != is_bad
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if is_bad:
            scale /= 2
        else:
            expected -= 0.125 * 2
        assert scaler.get_scale() == scale, step
        torch.testing.assert_close(model.weight.float(), expected, rtol=1e-2, atol=2e-2)
    flat.close()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["grad", "main_grad"])
def test_ranks_skip_steps_together(ranks, dtype, fused):
    ranks.run(scenario_scaler, 10, dtype, fused)


def scenario_alone(rank: Rank) -> None:
    """What one rank unscales alone is matched with no other collective."""
    group = tg.PeerGroup(dist.new_group(), timeout=10.0, buffer_bytes=64 << 20, device=rank.device)
    model = nn.Linear(64, 64, device=rank.device)
    flat = tg.FlatParameters(model, shard="optimizer", peer_group=group)
    optimizer = flat.optimizer(torch.optim.SGD, lr=0.125)
    scaler = tg.FlatGradScaler(rank.device.partition(":")[0], init_scale=8.0)
    x = torch.ones(2, 64, device=rank.device)
    scaler.scale(model(x).sum()).backward()
    with pytest.raises(RuntimeError, match=r"aborted .*all_reduce"):
        if rank.rank == 0:
            scaler.unscale_(optimizer)
            scaler._found_inf_per_device(optimizer)[x.device].item()
            group.check()
        for _ in range(100):  # what is between peers fails later than it is launched
            model(x).sum().backward()
            model.weight.sum().item()
    dist.barrier()
    flat.close()
    group.close()


def test_a_rank_that_unscales_alone_is_an_error_on_all(ranks):
    ranks.run(scenario_alone, 11)
