"""te_graph.Linear inside wrappers of data parallelism: DistributedDataParallel on top, FSDP and ZeRO-3 refused by name.

The reference of DistributedDataParallel is the same model without it, whose gradients are averaged by hand.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ranks import WORLDS, Rank, ranks_of
from tensor_lists import same_bits
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import te_graph as tg

ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
WIDTH = 32
RECIPES = {"delayed": tg.DelayedScaling(amax_history_len=3), "current": tg.Float8CurrentScaling()}


def new_model(rank: Rank) -> nn.Sequential:
    torch.manual_seed(0)
    options = {"device": rank.device, "dtype": torch.bfloat16}
    return nn.Sequential(tg.Linear(WIDTH, 2 * WIDTH, **options), nn.GELU(), tg.Linear(2 * WIDTH, WIDTH, **options))


def batches(rank: Rank, steps: int = 3) -> list[Tensor]:
    """[5, WIDTH] each, other ones on each rank."""
    generator = torch.Generator().manual_seed(10 + rank.rank)
    shape = (5, WIDTH)
    return [torch.randn(shape, generator=generator).to(rank.device, torch.bfloat16) for _ in range(2 * steps)]


def train(model: nn.Module, rank: Rank, recipe: object, by_hand: bool) -> list[Tensor]:
    """Gradients and weights of three steps of two micro-batches."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number, x in enumerate(batches(rank)):
        is_last = number % 2 == 1
        if not by_hand:
            model.require_backward_grad_sync = is_last
        with tg.fp8_autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
            loss = model(x).float().square().mean()
        loss.backward()
        if not is_last:
            continue
        if by_hand:
            for parameter in model.parameters():
                parameter.grad.div_(rank.world)
                dist.all_reduce(parameter.grad)
        found += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(parameter.detach().clone() for parameter in model.parameters())]


def scenario_ddp(rank: Rank, name: str, bucket_view: bool) -> None:
    recipe = RECIPES[name]
    expected = train(new_model(rank), rank, recipe, by_hand=True)
    for is_graphed in (False, True):
        model = new_model(rank)
        if is_graphed:
            sample = batches(rank)[0].clone()
            inner = torch.zeros(5, 2 * WIDTH, device=rank.device, dtype=torch.bfloat16, requires_grad=True)
            with tg.fp8_autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
                tg.make_graphed_callables((model[0], model[2]), ((sample,), (inner,)))
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
        actual = train(ddp, rank, recipe, by_hand=False)
        assert all(map(same_bits, actual, expected)), is_graphed
        if is_graphed:
            assert [model[number].te_graph.info()["forward_replays"] for number in (0, 2)] == [6, 6]


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_data_parallel_training_is_that_of_averaged_gradients(
    ranks: object, seed: int, name: str, bucket_view: bool
) -> None:
    ranks.run(scenario_ddp, seed, name, bucket_view)


def scenario_fsdp(rank: Rank) -> None:
    x, recipe = batches(rank)[0].float(), RECIPES["current"]
    beside = tg.Linear(WIDTH, WIDTH, device=rank.device)
    with tg.fp8_autocast(recipe=recipe):
        expected = beside(x).clone()
    device = torch.device(rank.device)
    wrappers = (
        fully_shard,
        lambda model: FullyShardedDataParallel(model, use_orig_params=True, device_id=device),
        lambda model: FullyShardedDataParallel(model, use_orig_params=False, device_id=device),
    )
    for wrap in wrappers:
        for is_known in (False, True):  # whether it has computed in FP8 before
            model = new_model(rank).float()
            if is_known:
                with tg.fp8_autocast(recipe=recipe):
                    model(x)
            sharded = wrap(model)
            expected_error = "expected a weight that is whole on this rank, got a module of FSDP"
            with pytest.raises(TypeError, match=expected_error), tg.fp8_autocast(recipe=recipe):
                sharded(x)
            # Other layers of the scope do not meet what is sharded.
            with tg.fp8_autocast(recipe=recipe):
                with torch.no_grad():
                    beside.weight.mul_(1)
                assert same_bits(beside(x), expected)


def test_modules_of_fsdp_are_refused_by_name(ranks: object, seed: int) -> None:
    ranks.run(scenario_fsdp, seed)


@pytest.mark.parametrize("is_known", [False, True])
def test_weights_of_zero_are_refused_by_name(device: str, is_known: bool) -> None:
    """Between two calls DeepSpeed leaves an empty tensor, with a mark, in the place of a weight."""
    layer, x = tg.Linear(WIDTH, WIDTH, device=device), torch.randn(3, WIDTH, device=device)
    if is_known:
        with tg.fp8_autocast(recipe=RECIPES["current"]):
            layer(x)
    whole = copy.deepcopy(layer.weight.data)
    layer.weight.data, layer.weight.ds_id = torch.empty(0, device=device), 0
    for data in (layer.weight.data, whole):
        layer.weight.data = data
        expected_error = "expected a weight that is whole on this rank, got Parameter"
        with pytest.raises(TypeError, match=expected_error), tg.fp8_autocast(recipe=RECIPES["current"]):
            layer(x)
