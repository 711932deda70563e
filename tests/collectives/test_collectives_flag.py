"""The flag of a group, ``found_inf``: it tells optimizers that the group was aborted, and only the group writes it."""

import math
from functools import partial

import pytest
import torch
from collective_ranks import open_group
from ranks import Rank, ranks_of
from tensor_lists import all_same_bits, copies
from torch import nn

import te_graph as tg

ranks = pytest.fixture(ranks_of, scope="module", params=[pytest.param(("cuda", 2), marks=pytest.mark.multi_gpu)])
ops = torch.ops.te_graph


def scenario_read_only(rank: Rank) -> None:
    with open_group(rank) as group:
        flag, tensor = group.found_inf, torch.ones(3, device=rank.device)
        assert flag.shape == () and flag.item() == 0
        parameter = nn.Parameter(tensor.clone())
        parameter.grad = torch.full_like(tensor, math.inf)
        for write in (
            partial(tg.clip_grad_norm_, [parameter], 1.0, found_inf=flag),
            partial(ops.multi_tensor_zero_, [flag]),
            partial(tg.all_reduce_, flag, group),
            partial(tg.all_reduce_out, flag, torch.ones((), device=rank.device), group),
        ):
            with pytest.raises(RuntimeError, match="got an inference tensor"):
                write()
        assert group.found_inf.item() == 0
        for write in (partial(flag.copy_, tensor[0]), flag.zero_):  # which torch does, and raises then
            with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
                write()
        group.check()


def scenario_optimizer(rank: Rank) -> None:
    """A captured step: a gradient that is not finite skips one step; a group that was aborted skips all."""
    with open_group(rank) as group:
        parameter = nn.Parameter(torch.randn(100, device=rank.device))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True, capturable=True)
        flag = torch.zeros((), device=rank.device)
        optimizer.grad_scale, optimizer.found_inf = None, flag
        parameter.grad = torch.ones_like(parameter)

        @tg.graphed
        def step() -> None:
            flag.zero_()
            tg.clip_grad_norm_([parameter], 1.0, found_inf=flag)
            torch.maximum(flag, group.found_inf, out=flag)
            optimizer.step()

        def changes(value: float) -> bool:
            before = copies([parameter])
            parameter.grad.fill_(value)
            step()
            return not all_same_bits([parameter], before)

        assert [changes(value) for value in (1, 2, 3, math.inf, 4, math.nan, 5)] == [True] * 3 + [False, True] * 2
        assert step.info()["forward_replays"] >= 3
        group.abort()
        assert not changes(6) and flag.item() == 1 and group.found_inf.item() == 1


def scenario_side_stream(rank: Rank) -> None:
    """Groups that are made while another stream is busy, on streams that do not wait for it."""
    for _ in range(5):
        torch.cuda._sleep(20_000_000)
        with torch.cuda.stream(torch.cuda.Stream()), open_group(rank) as group:
            got = tg.all_reduce(torch.ones(1000, device=rank.device), group)
            assert bool((got == rank.world).all()) and group.found_inf.item() == 0
            group.check()


def scenario_pool_of_another_device(rank: Rank) -> None:
    """The current GPU is not the group's while the pool is made."""
    with open_group(rank) as group:
        torch.cuda.set_device((rank.rank + 1) % rank.world)
        pool = group.mem_pool()
        torch.cuda.set_device(rank.rank)
        with torch.cuda.use_mem_pool(pool):
            out = torch.empty(1 << 20, device=rank.device)
        tg.all_reduce_out(out, torch.ones(1 << 20, device=rank.device), group)
        assert bool((out == rank.world).all())
        del out, pool


def test_only_the_group_writes_its_flag(ranks, seed):
    ranks.run(scenario_read_only, seed)


def test_an_optimizer_skips_steps_by_a_flag_of_its_own_and_the_groups(ranks, seed):
    ranks.run(scenario_optimizer, seed)


def test_a_group_may_be_made_on_a_side_stream(ranks, seed):
    ranks.run(scenario_side_stream, seed)


@pytest.mark.gpus_apart
def test_a_pool_is_made_on_the_device_of_its_group(ranks, seed):
    ranks.run(scenario_pool_of_another_device, seed)
