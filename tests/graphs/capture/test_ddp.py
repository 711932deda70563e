"""DistributedDataParallel around graphed modules, in every order of graphing and wrapping.

The references are an eager copy of the same model under DistributedDataParallel, and averages over the ranks of
gradients that plain eager copies compute.
"""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import WORLDS, Rank, Ranks, ranks_of
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from twins import backward_of, eager_copy, gradients_of, mlp, sample

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)


# What the scenarios share. All ranks draw the same numbers: each knows the batches of all.


class Block(nn.Module):
    """A residual MLP: [n, 16] -> [n, 16]."""

    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:  # [n, 16]
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Eager ends, and between them blocks to be graphed; the blocks in ``skip`` are left out."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.blocks = nn.ModuleList(Block(norm) for _ in range(3))

    def forward(self, x: Tensor, skip: tuple[int, ...] = ()) -> Tensor:  # [n, 6] -> [n, 3]
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            x = x if number in skip else block(x)
        return self.head(x)


def graph_blocks(model: Net) -> None:
    x = torch.randn(4, 16, device=model.stem.weight.device, requires_grad=True)
    make_graphed_callables(tuple(model.blocks), ((x,),) * len(model.blocks))


def batches(rank: Rank) -> list[Tensor]:
    """A batch [4, 6] for each rank."""
    return [torch.randn(4, 6, device=rank.device) for _ in range(rank.world)]


def wrap(model: nn.Module, rank: Rank, **options: Any) -> DistributedDataParallel:
    """Several small buckets, so that some are reduced while the backward is still running."""
    devices = [rank.device] if rank.device.startswith("cuda") else None
    return DistributedDataParallel(model, device_ids=devices, bucket_cap_mb=0.002, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train_alone(model: Net, data: list[Tensor]) -> None:
    """Steps without DistributedDataParallel; the last gradients stay."""
    optimizer = sgd(model)
    for x in data:
        optimizer.zero_grad()
        backward_of(model(x))
        optimizer.step()


def graph_then_wrap(model: Net, rank: Rank, data: list[Tensor], **options: Any) -> DistributedDataParallel:
    graph_blocks(model)
    return wrap(model, rank, **options)


def wrap_then_graph(model: Net, rank: Rank, data: list[Tensor], **options: Any) -> DistributedDataParallel:
    ddp = wrap(model, rank, **options)
    graph_blocks(ddp.module)
    return ddp


def graph_train_then_wrap(model: Net, rank: Rank, data: list[Tensor], **options: Any) -> DistributedDataParallel:
    graph_blocks(model)
    train_alone(model, data)
    return wrap(model, rank, **options)


ORDERS = {order.__name__: order for order in (graph_then_wrap, wrap_then_graph, graph_train_then_wrap)}


def both(
    order: str, rank: Rank, norm: type[nn.Module] = nn.LayerNorm, **options: Any
) -> tuple[DistributedDataParallel, DistributedDataParallel]:
    """A graphed model and its eager copy, both under DistributedDataParallel. Ranks that train before do so apart."""
    model = Net(norm).to(rank.device)
    twin = eager_copy(model)
    data = [batches(rank)[rank.rank] for _ in range(2)]
    graphed = ORDERS[order](model, rank, data, **options)
    if order == "graph_train_then_wrap":
        train_alone(twin, data)
    return graphed, wrap(twin, rank, **options)


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return gradients_of(dict(model.named_parameters()))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def averages(model: nn.Module, micro_batches: list[list[Tensor]]) -> dict[str, Tensor]:
    """The gradients of plain eager copies of ``model``, one for each rank, averaged over the ranks."""
    each = []
    for of_rank in zip(*micro_batches, strict=True):
        plain = eager_copy(model)
        plain.zero_grad(set_to_none=True)
        for x in of_rank:
            backward_of(plain(x))
        each.append(gradients(plain))
    return {name: sum(grads[name] / len(each) for grads in each) for name in each[0]}


def assert_replayed(ddp: DistributedDataParallel) -> None:
    for block in ddp.module.blocks:
        info = block.te_graph.info()
        assert info["forward_replays"] == info["backward_replays"] > 0, info
        assert not info["eager_calls"], info


# The scenarios and their tests.


def training(rank: Rank, order: str, options: dict[str, Any], set_to_none: bool) -> None:
    graphed, eager = both(order, rank, **options)
    optimizers = [sgd(graphed), sgd(eager)]
    for _ in range(3):
        micro_batches = [batches(rank) for _ in range(2)]
        expected = averages(eager.module, micro_batches)
        for ddp in (graphed, eager):
            ddp.zero_grad(set_to_none=set_to_none)
        for ddp in (graphed, eager):
            with ddp.no_sync():
                backward_of(ddp(micro_batches[0][rank.rank]))
        assert_bitwise_equal(gradients(graphed), gradients(eager))
        for ddp in (graphed, eager):
            backward_of(ddp(micro_batches[1][rank.rank]))
        assert_bitwise_equal(gradients(graphed), gradients(eager))
        for name, parameter in graphed.module.named_parameters():
            assert torch.equal(parameter.grad, expected[name]), name
            assert parameter.grad.isfinite().all(), name
        for optimizer in optimizers:
            optimizer.step()
        assert_bitwise_equal(state(graphed), state(eager))
    assert_replayed(graphed)


OPTIONS = {
    "plain": {},
    "gradients are views of buckets": {"gradient_as_bucket_view": True},
    "unused parameters are searched for": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.one_of(5)
def test_gradients_are_averages_over_the_ranks_as_in_eager(
    ranks: Ranks, order: str, options: str, set_to_none: bool, seed: int
) -> None:
    ranks.run(training, seed, order, OPTIONS[options], set_to_none)


def static_graph(rank: Rank, order: str, as_view: bool) -> None:
    graphed, eager = both(order, rank, static_graph=True, gradient_as_bucket_view=as_view)
    for _ in range(4):
        data = batches(rank)
        for ddp in (graphed, eager):
            ddp.zero_grad()
            backward_of(ddp(data[rank.rank]))
        assert_bitwise_equal(gradients(graphed), gradients(eager))
    assert_replayed(graphed)


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_a_static_graph_gives_the_gradients_of_eager(ranks: Ranks, order: str, as_view: bool, seed: int) -> None:
    ranks.run(static_graph, seed, order, as_view)


def skipped_blocks(rank: Rank, order: str, as_view: bool) -> None:
    graphed, eager = both(order, rank, find_unused_parameters=True, gradient_as_bucket_view=as_view)
    every_rank, no_rank = (1,), ()
    for skip in (no_rank, (1,) if rank.rank == 0 else no_rank, every_rank, every_rank, (0, 2), no_rank):
        data = batches(rank)
        for ddp in (graphed, eager):
            ddp.zero_grad()
            backward_of(ddp(data[rank.rank], skip))
        assert_bitwise_equal(gradients(graphed), gradients(eager))
    assert_replayed(graphed)


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_graphed_blocks_that_a_rank_does_not_use_are_found_unused(
    ranks: Ranks, order: str, as_view: bool, seed: int
) -> None:
    ranks.run(skipped_blocks, seed, order, as_view)


def communication_hook(rank: Rank, order: str) -> None:
    graphed, eager = both(order, rank)
    reduced = {id(graphed): 0, id(eager): 0}

    def count(ddp: DistributedDataParallel, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        reduced[id(ddp)] += bucket.buffer().numel()
        return allreduce_hook(None, bucket)

    for ddp in (graphed, eager):
        ddp.register_comm_hook(ddp, count)
    numel = sum(parameter.numel() for parameter in eager.parameters())
    for step in range(3):
        data = batches(rank)
        for ddp in (graphed, eager):
            ddp.zero_grad()
            backward_of(ddp(data[rank.rank]))
            assert reduced[id(ddp)] == (step + 1) * numel
        assert_bitwise_equal(gradients(graphed), gradients(eager))


@pytest.mark.parametrize("order", ORDERS)
def test_every_gradient_of_every_step_goes_through_the_reducer_once(ranks: Ranks, order: str, seed: int) -> None:
    ranks.run(communication_hook, seed, order)


def buffers(rank: Rank, order: str) -> None:
    graphed, eager = both(order, rank, norm=nn.BatchNorm1d)
    optimizers = [sgd(graphed), sgd(eager)]
    for _ in range(3):
        data = batches(rank)
        for ddp, optimizer in zip((graphed, eager), optimizers, strict=True):
            ddp.zero_grad()
            backward_of(ddp(data[rank.rank]))
            optimizer.step()
        assert_bitwise_equal(state(graphed), state(eager))
    assert_replayed(graphed)


@pytest.mark.parametrize("order", ORDERS)
def test_buffers_that_are_broadcast_from_the_first_rank_reach_the_graphs(ranks: Ranks, order: str, seed: int) -> None:
    ranks.run(buffers, seed, order)


def hooks_of_the_user(rank: Rank, order: str) -> None:
    graphed, eager = both(order, rank)
    seen: list[list[Tensor]] = [[], []]
    for ddp, notes in zip((graphed, eager), seen, strict=True):
        block = ddp.module.blocks[1]
        block.up.weight.register_hook(lambda grad: grad * 3)
        block.up.bias.register_post_accumulate_grad_hook(lambda p, notes=notes: notes.append(p.grad.clone()))
    for _ in range(2):
        data = batches(rank)
        for ddp in (graphed, eager):
            backward_of(ddp(data[rank.rank]))
        assert_bitwise_equal(gradients(graphed), gradients(eager))
    assert len(seen[0]) == 2
    assert_bitwise_equal(*seen)


@pytest.mark.parametrize("order", ORDERS)
def test_hooks_of_the_user_run_before_the_reducers(ranks: Ranks, order: str, seed: int) -> None:
    ranks.run(hooks_of_the_user, seed, order)


def unwrapping(rank: Rank, order: str) -> None:
    graphed, eager = both(order, rank)
    models = graphed.module, eager.module
    data = batches(rank)[rank.rank]
    for ddp in (graphed, eager):
        ddp.zero_grad()
        backward_of(ddp(data))
    assert_bitwise_equal(*map(gradients, models))
    del ddp, graphed, eager
    gc.collect()
    own = [batches(rank)[rank.rank] for _ in range(2)]
    for model in models:
        model.zero_grad()
        for x in own:
            backward_of(model(x))
    assert_bitwise_equal(*map(gradients, models))
    for name, expected in averages(models[1], [[x] for x in own]).items():
        assert torch.equal(models[0].get_parameter(name).grad, expected), name


@pytest.mark.parametrize("order", ORDERS)
def test_a_model_that_is_taken_out_has_its_own_gradients_again(ranks: Ranks, order: str, seed: int) -> None:
    ranks.run(unwrapping, seed, order)


# autograd_params: parameters that the user hands to autograd without a hook that would tell.


def listed(model: nn.Module, by_name: bool) -> list[Any]:
    return ["0.weight"] if by_name else [model[0].weight]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_listed_parameter_is_reached_by_autograd_and_the_others_are_not(device: str, by_name: bool) -> None:
    model = mlp(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (sample(device),), autograd_params=listed(model, by_name))
    x = sample(device)
    results = [torch.autograd.grad(m(x).square().sum(), m[0].weight)[0] for m in (model, twin)]
    assert_bitwise_equal(*results)
    assert_bitwise_equal(gradients(model), dict.fromkeys(dict(model.named_parameters())))
    for m in (model, twin):
        m(x).square().sum().backward(inputs=[m[0].weight])
    assert_bitwise_equal(gradients(model), gradients(twin))
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(model(x).sum(), model[0].bias)
    for _ in range(2):
        x = sample(device)
        for m in (model, twin):
            backward_of(m(x))
        assert_bitwise_equal(gradients(model), gradients(twin))


@pytest.mark.parametrize("by_name", [False, True])
def test_a_listed_parameter_that_eager_code_uses_too_is_summed_before_it_is_added(device: str, by_name: bool) -> None:
    model = nn.Sequential(nn.Linear(24, 24), nn.Tanh()).to(device, torch.bfloat16)
    twin = eager_copy(model)
    x = torch.randn(16, 24, device=device, dtype=torch.bfloat16)
    make_graphed_callables(model, (x,), autograd_params=listed(model, by_name))
    for _ in range(3):
        x = torch.randn_like(x)
        for m in (model, twin):
            backward_of(F.linear(m(x), m[0].weight))
        assert_bitwise_equal(gradients(model), gradients(twin))


def test_a_parameter_listed_for_several_callables_is_reached_in_each(device: str) -> None:
    pair = nn.ModuleList(mlp(device) for _ in range(2))
    twin = eager_copy(pair)
    make_graphed_callables(tuple(pair), ((sample(device),),) * 2, autograd_params=(pair[0][0].weight, pair[1][3].bias))
    x = sample(device)
    results = [
        torch.autograd.grad((m[0](x) + m[1](x)).square().sum(), (m[0][0].weight, m[1][3].bias)) for m in (pair, twin)
    ]
    assert_bitwise_equal(*results)


@pytest.mark.parametrize(
    "wrong, error, words",
    [
        (["0.weigth"], ValueError, r"autograd_params.*0\.weigth"),
        ([nn.Parameter(torch.zeros(13, 7))], ValueError, r"autograd_params.*\[13, 7\]"),
        ([3], TypeError, r"autograd_params.*int"),
    ],
)
def test_autograd_params_that_the_callables_do_not_have_are_refused(
    device: str, wrong: list[Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_graphed_callables(mlp(device), (sample(device),), autograd_params=wrong)
