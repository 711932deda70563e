"""Ranks that share scales: what they reduce, and in which order, depends on the program alone."""

from __future__ import annotations

import copy
import gc
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import WORLDS, Rank, ranks_of
from tensor_lists import same_bits
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


def scales_of_their_own(rank: Rank) -> None:
    x = torch.randn(WIDTH, WIDTH, device=rank.device)
    dist.broadcast(x, 0)
    gc.disable()
    try:
        old = new_layer(rank)
        with region():
            old(x)
        old.itself = [old]  # a cycle: freed when the collector runs
        del old
        if rank.rank == 0:
            gc.collect()
        first, second = new_layer(rank), new_layer(rank)
        for _ in range(3):
            with region():
                first(x)
                second(x * 1024)
    finally:
        gc.enable()
    largest = x.abs().max().cpu()
    for layer, factor in ((first, 1), (second, 1024)):
        layer.fp8.update_if_due()
        assert layer.get_extra_state()[0, 2].cpu() == torch.tensor(448.0) / (largest * factor)


def test_ranks_that_free_modules_at_other_times_reduce_the_same_columns(ranks) -> None:
    ranks.run(scales_of_their_own, 0)


def a_scope_that_stays(rank: Rank) -> None:
    """Where all modules are gone on one rank, and one is still there on another."""
    recipe = tg.DelayedScaling(amax_history_len=5)
    x = torch.randn(WIDTH, WIDTH, device=rank.device)
    numbers = []
    for _ in range(2):
        layer = new_layer(rank)
        with tg.fp8_autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
            layer(x)
        numbers.append(layer.fp8.number)
        del layer
        gc.collect()
    assert numbers == [0, 1]


def test_the_scope_of_a_group_stays_where_its_modules_go(ranks) -> None:
    ranks.run(a_scope_that_stays, 0)


def test_columns_without_a_group_are_used_again(device: str) -> None:
    numbers = set()
    for _ in range(3):
        layer = tg.Linear(WIDTH, WIDTH, device=device)
        with tg.fp8_autocast(recipe=tg.DelayedScaling(amax_history_len=6)):
            layer(torch.randn(2, WIDTH, device=device))
        numbers.add(layer.fp8.number)
        del layer
        gc.collect()
    assert numbers == {0}


def states_that_are_saved(rank: Rank, is_zero: bool) -> None:
    """In the middle of a step gradients' newest amaxes are each rank's own, so each saves its own state. An update is
    due on all of them, also where a rank's gradient was zero."""
    results = []
    for is_resumed in (False, True):
        torch.manual_seed(0)
        layer = new_layer(rank)
        for step in range(4):
            x = torch.full((WIDTH, WIDTH), 1.0 + rank.rank + step, device=rank.device)
            with region():
                y = layer(x)
            factor = 0.0 if is_zero and rank.rank == 1 and step == 1 else 1.0 + rank.rank
            (y * factor).sum().backward()
            if is_resumed and step == 1:
                state, grad = copy.deepcopy(layer.state_dict()), layer.weight.grad
                layer = new_layer(rank)
                layer.load_state_dict(state)
                layer.weight.grad = grad
                own = state["_extra_state"].contiguous()
                others = [torch.empty_like(own) for _ in range(rank.world)]
                dist.all_gather(others, own)
                newest = [other[2, 8].item() for other in others]
                assert newest == [0.0 if is_zero and number == 1 else 1.0 + number for number in range(rank.world)]
        layer.fp8.update_if_due()
        results.append([layer.weight.grad, layer.get_extra_state()])
    assert all(map(same_bits, *results))


@pytest.mark.parametrize("is_zero", [False, True])
def test_a_training_is_resumed_with_the_state_of_each_rank(ranks, is_zero: bool) -> None:
    ranks.run(states_that_are_saved, 0, is_zero)


def test_layers_leave_the_scope_of_a_group_that_is_destroyed() -> None:
    """Groups of the same name, one after the other, have scopes of their own."""
    layer, x = tg.Linear(WIDTH, WIDTH, bias=False), torch.randn(4, WIDTH)
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            group = dist.group.WORLD
            for _ in range(2):
                with region():
                    y = layer(x)
                y.sum().backward()
            assert layer.fp8.scope.group is group
            twins = [copied(region()) for copied in (copy.copy, copy.deepcopy)]
            assert all(twin.group is group and twin.number == region().number for twin in twins)
            with pytest.raises(TypeError, match=r"cannot pickle '.*ProcessGroup' object"):
                pickle.dumps(region())
        finally:
            dist.destroy_process_group()
    with tg.fp8_autocast(recipe=RECIPE):
        layer(x).sum().backward()
    assert layer.fp8.scope.group is None
