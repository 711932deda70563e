"""Flat gradients are the mean of the ranks', reduced once, and sharded optimizers step as one process does.

All ranks draw the same numbers, so each knows what the others computed: plain torch on all of that is the reference.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flat_models import Model, assert_in_buffers, count_as_reduced, gradients_of, trained
from ranks import Rank, ranks_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import te_graph as tg
from te_graph.flat import flat_parameters
from te_graph.testing import same_bits

WORLDS = [
    pytest.param(("cpu", 2), id="gloo-2"),
    pytest.param(("cpu", 3), id="gloo-3"),
    pytest.param(("cuda", 2), id="nccl-2", marks=pytest.mark.multi_gpu),
]
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
STEPS, MICROBATCHES = 3, 3
SHARDS = ["none", "optimizer"]


class Operations(TorchDispatchMode):
    """Notes the names of all."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))

    def collectives(self) -> list[str]:
        """Those of te_graph."""
        prefixes = ("te_graph::all_", "te_graph::reduce_")
        return [name.partition("::")[2] for name in self.names if name.startswith(prefixes)]


def batches(rank: Rank) -> list[list[Tensor]]:  # [microbatches][world] of [batch, length]
    return [[torch.randint(7, (2, 3), device=rank.device) for _ in range(rank.world)] for _ in range(MICROBATCHES)]


def make(rank: Rank, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[tg.FlatParameters, Model, Model]:
    """A flat model, and what it was made of."""
    reference = Model().to(rank.device, dtype)
    model = copy.deepcopy(reference)
    if rank.rank > 0:
        for parameter in trained(model):
            parameter.data.add_(1)  # ranks begin with what the first one has
    return tg.FlatParameters(model, **options), model, reference


def loss_of(model: nn.Module, tokens: Tensor, uses_all: bool = True) -> Tensor:
    return model(tokens, uses_all).float().square().mean()


def mean_gradients(reference: nn.Module, drawn: list[list[Tensor]], uses_all: Callable[[int], bool]) -> list[Tensor]:
    """Of each rank the sum of its micro-batches in float32, then the mean in the order of the ranks, [...] each."""
    of_ranks = []
    for rank in range(len(drawn[0])):
        sums = [torch.zeros(one.shape, device=one.device) for one in trained(reference)]
        for microbatch in drawn:
            grads = torch.autograd.grad(
                loss_of(reference, microbatch[rank], uses_all(rank)), trained(reference), allow_unused=True
            )
            for total, grad in zip(sums, grads, strict=True):
                if grad is not None:
                    total.add_(grad)
        of_ranks.append(sums)
    world = len(of_ranks)
    means = []
    for grads in zip(*of_ranks, strict=True):
        total = grads[0]
        for grad in grads[1:]:
            total = total + grad
        means.append(total * (1 / world))
    return means


def train_step(
    flat: tg.FlatParameters, model: nn.Module, rank: Rank, drawn: list[list[Tensor]], uses_all: bool
) -> list[str]:
    """Names of the collectives of its last backward; there are no others."""
    for number, microbatch in enumerate(drawn):
        is_last = number + 1 == len(drawn)
        loss = loss_of(model, microbatch[rank.rank], uses_all)
        with contextlib.nullcontext() if is_last else flat.no_sync(), Operations() as operations:
            loss.backward()
        assert is_last or not operations.collectives()
    return operations.collectives()


def scenario_mean(rank: Rank, dtype: torch.dtype, graphed: bool) -> None:
    """Also of a parameter that some ranks have not used, and of ranks that began with other values."""
    flat, model, reference = make(rank, dtype, bucket_bytes=2048)
    assert all(same_bits(one, other) for one, other in zip(model.parameters(), reference.parameters(), strict=True))
    assert len(flat.buffers[0].layout.buckets) > 1
    if graphed:
        samples = tuple((torch.randn(2, 3, 12, device=rank.device, dtype=dtype, requires_grad=True),) for _ in range(3))
        tg.make_graphed_callables(tuple(model.blocks), samples, max_in_flight=1)
    for step in range(STEPS):
        drawn = batches(rank)
        names = train_step(flat, model, rank, drawn, uses_all=step != 1 or rank.rank == 0)
        assert names == ["all_reduce_out"] * len(flat.buffers[0].layout.buckets)
        expected = mean_gradients(reference, drawn, lambda other, step=step: step != 1 or other == 0)
        for (name, _), one, other in zip(
            ((n, p) for n, p in reference.named_parameters() if p.requires_grad),
            gradients_of(model),
            expected,
            strict=True,
        ):
            assert one.dtype == torch.float32
            torch.testing.assert_close(
                one,
                other,
                rtol=1e-5 if dtype == torch.float32 else 0.05,
                atol=1e-6 if dtype == torch.float32 else 2e-2,
                msg=lambda text, name=name: f"{name}: {text}",
            )
        assert_in_buffers(flat, model)
        mine = torch.cat([one.reshape(-1) for one in gradients_of(model)])
        everyone = [torch.empty_like(mine) for _ in range(rank.world)]
        dist.all_gather(everyone, mine)
        assert all(same_bits(one, mine) for one in everyone)
        flat.zero_grad()
    flat.close()


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["grad", "main_grad"])
@pytest.mark.one_of(3)
def test_gradients_are_the_mean_of_all_ranks(ranks, dtype, graphed):
    ranks.run(scenario_mean, 1, dtype, graphed)


def scenario_one_pass(rank: Rank, shard: str, reduce_dtype: torch.dtype | None) -> None:
    """A reduction runs nothing but collectives; the reference are the gradients of all ranks, rounded where sent."""
    flat, model, _ = make(rank, shard=shard, reduce_dtype=reduce_dtype, gradient_scale=0.5, bucket_bytes=2048)
    buffer = flat.buffers[0]
    with flat.no_sync():
        loss_of(model, batches(rank)[0][rank.rank]).backward()
    everyone = [torch.empty_like(buffer.grads) for _ in range(rank.world)]
    dist.all_gather(everyone, buffer.grads)
    sent = [one if reduce_dtype is None else one.to(reduce_dtype).float() for one in everyone]
    total = sent[0]
    for other in sent[1:]:
        total = total + other
    expected = total * torch.tensor(0.5 / rank.world, device=rank.device)
    if shard == "none" and reduce_dtype is not None:
        expected = expected.to(reduce_dtype).float()
    with Operations() as operations:
        flat.reduce_gradients()
    views = {"aten::slice", "aten::split", "aten::detach"}
    collective = "all_reduce_out" if shard == "none" else "reduce_scatter_out"
    ran = [name for name in operations.names if name not in views]
    assert ran == [f"te_graph::{collective}"] * len(buffer.layout.buckets)
    for begin, end in flat.own_parts(buffer):
        assert same_bits(buffer.grads[begin:end], expected[begin:end])
    flat.close()


@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shard", SHARDS)
def test_a_reduction_is_one_collective_for_each_bucket(ranks, shard, reduce_dtype):
    ranks.run(scenario_one_pass, 9, shard, reduce_dtype)


def scenario_repeated(rank: Rank, shard: str, gradient_scale: float) -> None:
    """Each backward outside of no_sync reduces; several in one step give the mean of the sum."""
    flat, model, reference = make(rank, shard=shard, gradient_scale=gradient_scale)
    for _ in range(STEPS):
        drawn = batches(rank)
        for microbatch in drawn:
            loss_of(model, microbatch[rank.rank]).backward()
        expected = mean_gradients(reference, drawn, lambda _: True)
        with flat.gradient_parts() as gradients:
            own = torch.zeros(flat.buffers[0].layout.numel, device=rank.device)
            for parameter, value in zip(trained(model), expected, strict=True):
                offset = (parameter.data_ptr() - flat.buffers[0].data.data_ptr()) // 4
                own[offset : offset + value.numel()].as_strided(parameter.shape, parameter.stride()).copy_(value)
            bounds = flat.own_parts(flat.buffers[0])
            for part, (begin, end) in zip(gradients.counted, bounds, strict=True):
                torch.testing.assert_close(part, own[begin:end] * gradient_scale, rtol=1e-5, atol=1e-6)
        flat.zero_grad()
    flat.close()


@pytest.mark.parametrize("gradient_scale", [1.0, 0.25])
@pytest.mark.parametrize("shard", SHARDS)
def test_several_reductions_in_one_step(ranks, shard, gradient_scale):
    ranks.run(scenario_repeated, 2, shard, gradient_scale)


def scenario_optimizer(rank: Rank, dtype: torch.dtype, tmp: str) -> None:
    """Sharded or not, the same bits: norms, parameters; a state saved by all loads into either."""
    models, flats, optimizers = [], [], []
    torch.manual_seed(3)
    state = Model(96).state_dict()
    for shard in SHARDS:
        model = Model(96).to(rank.device, dtype)
        model.load_state_dict(state)
        flat = tg.FlatParameters(model, shard=shard, bucket_bytes=2048)
        decays = [one for one in trained(model) if one.dim() > 1]
        others = [one for one in trained(model) if one.dim() <= 1]
        optimizer = flat.optimizer(
            torch.optim.AdamW,
            [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=1e-2,
        )
        models.append(model), flats.append(flat), optimizers.append(optimizer)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in optimizers]
    for step in range(2 * STEPS):
        if step == STEPS:  # each goes on with the other's state
            states = [copy.deepcopy(one.state_dict()) for one in optimizers]
            for optimizer, other in zip(optimizers, reversed(states), strict=True):
                optimizer.load_state_dict(other)
        drawn = batches(rank)
        norms = []
        for flat, model, optimizer, scheduler in zip(flats, models, optimizers, schedulers, strict=True):
            train_step(flat, model, rank, drawn, uses_all=True)
            norms.append(tg.clip_grad_norm_(flat, 0.5))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        assert same_bits(norms[0], norms[1])
        for one, other in zip(*(model.parameters() for model in models), strict=True):
            assert same_bits(one.detach(), other.detach()), f"step {step}"
    shares = sum(master.numel() for group in optimizers[1].inner.param_groups for master in group["params"])
    everyone = [None] * rank.world
    dist.all_gather_object(everyone, shares)
    assert sum(everyone) == sum(one.numel() for one in trained(models[1])) and max(everyone) < sum(everyone)
    for flat in flats:
        flat.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_sharded_optimizers_step_as_whole_ones(ranks, dtype):
    ranks.run(scenario_optimizer, 3, dtype, "")


def scenario_norm(rank: Rank) -> None:
    """The norm of one rank that has all gradients has the bits of that of ranks that share them."""
    flat, model, _ = make(rank, shard="optimizer", bucket_bytes=40000)
    alone = [dist.new_group([one]) for one in range(rank.world)][rank.rank]
    twin = copy.deepcopy(model)
    flat_twin = tg.FlatParameters(twin, process_group=alone, bucket_bytes=40000)
    for norm_type in (2.0, 1.0, float("inf")):
        torch.manual_seed(11)
        for one, other in zip(trained(model), trained(twin), strict=True):
            other.grad = torch.randn_like(other)
            one.grad = other.grad.clone()  # another tensor than the buffer's
        count_as_reduced(flat)
        assert same_bits(*(tg.clip_grad_norm_(one, 0.01, norm_type) for one in (flat, flat_twin))), norm_type
    flat.close()
    flat_twin.close()


def test_norms_have_the_same_bits_however_gradients_are_shared(ranks):
    ranks.run(scenario_norm, 5)


def scenario_unused(rank: Rank) -> None:
    """What no rank has used has zeros afterwards, not the values of an earlier step."""
    flat, model, _ = make(rank)
    for uses_all in (True, False):
        train_step(flat, model, rank, batches(rank), uses_all)
        assert bool(model.sometimes.weight.grad.any()) == uses_all
        model.zero_grad()
    flat.close()


def test_what_no_rank_has_used(ranks):
    ranks.run(scenario_unused, 8)


def scenario_differs(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(3, 4 + rank.rank % 2), nn.Linear(4, 2))
    with pytest.raises(
        RuntimeError,
        match=r"the same model on all ranks, got 0.weight \[4, 3\] torch.float32 on rank 0 and 0.weight \[5, 3\]",
    ):
        tg.FlatParameters(model.to(rank.device))
    doubles = nn.Linear(3, 4, device=rank.device, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"grad_dtype to be .* on several ranks, got torch.float64"):
        tg.FlatParameters(doubles, grad_dtype=torch.float64)
    alike = nn.Linear(3, 4, device=rank.device)
    with pytest.raises(RuntimeError, match=r"got .*gradient_scale 1.0 on rank 0 and .*gradient_scale 2.0 on rank 1"):
        tg.FlatParameters(alike, gradient_scale=1.0 + rank.rank % 2)

    more = nn.Sequential(*(nn.Linear(2, 2, bias=False, device=rank.device) for _ in range(1 + rank.rank % 2)))
    with pytest.raises(RuntimeError, match=r"got nothing on rank 0 and 1.weight \[2, 2\] torch.float32 on rank 1"):
        tg.FlatParameters(more)


def scenario_refused(rank: Rank) -> None:
    """What one rank refuses, or has no memory for, all are told, and may try again."""
    model = nn.Linear(3, 4, device=rank.device)
    before = model.weight.data_ptr()
    is_last = rank.rank == rank.world - 1
    told = f"FlatParameters: rank {rank.world - 1} failed while "
    with pytest.raises(
        ValueError if is_last else RuntimeError,
        match="expected shard to be one of" if is_last else told + "checking arguments: ValueError: .* got 'all'",
    ):
        tg.FlatParameters(model, shard="all" if is_last else "none")
    with contextlib.ExitStack() as stack:
        if is_last:
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(flat_parameters, "buffers_of", no_memory)
        with pytest.raises(RuntimeError, match="no memory" if is_last else told + "allocating buffers: .*no memory"):
            tg.FlatParameters(model)
    assert model.weight.data_ptr() == before
    tg.FlatParameters(model).close()


def no_memory(*_: Any) -> None:
    raise RuntimeError("no memory")


def test_what_one_rank_refuses_raises_on_all(ranks):
    ranks.run(scenario_differs, 4)
    ranks.run(scenario_refused, 9)


def scenario_overlap(rank: Rank, graphed: bool) -> None:
    """From the second backward that reduces on buckets are reduced while it goes on, in their order; what is reduced
    by then is right, also where a rank does not use a parameter, and with hooks that come late."""
    flat, model, _ = make(rank, bucket_bytes=2048)
    if graphed:
        samples = tuple((torch.randn(2, 3, 12, device=rank.device, requires_grad=True),) for _ in range(3))
        tg.make_graphed_callables(tuple(model.blocks), samples, chain=True)
    flat_late, late, _ = make(rank, bucket_bytes=2048, overlap_grad_reduce=False)
    late.load_state_dict(model.state_dict())
    early: list[int] = []
    reduce_ready = flat.reducer._reduce_ready
    flat.reducer._reduce_ready = lambda number: (early.append(number), reduce_ready(number))
    count = len(flat.buffers[0].layout.buckets)
    for step in range(4):
        early.clear()
        drawn = batches(rank)
        uses_all = step != 2 or rank.rank == 0
        for one, owner in ((model, flat), (late, flat_late)):
            train_step(owner, one, rank, drawn, uses_all)
        # Bucket 1 has the parameter that is not always used, and those behind wait for it.
        expected = [] if step == 0 else list(range(count)) if uses_all else [0]
        assert early == expected, (early, step)
        for one, other in zip(gradients_of(model), gradients_of(late), strict=True):
            assert same_bits(one, other), step
        flat.zero_grad()
        flat_late.zero_grad()
    flat.close()
    flat_late.close()


@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
def test_buckets_are_reduced_while_the_backward_goes_on(ranks, graphed):
    ranks.run(scenario_overlap, 6, graphed)


def scenario_more_often(rank: Rank) -> None:
    """A gradient that comes once more than ever before is refused where its bucket is under way."""
    flat, model, _ = make(rank, bucket_bytes=2048)
    samples = tuple((torch.randn(2, 3, 12, device=rank.device, requires_grad=True),) for _ in range(3))
    tg.make_graphed_callables(tuple(model.blocks), samples, max_in_flight=2)

    def run(count: int) -> None:
        x = model.embedding(torch.zeros(2, 3, dtype=torch.long, device=rank.device))
        for block in [*model.blocks] + [model.blocks[2]] * (count - 1):
            x = block(x)
        x = model.conv(model.sometimes(x).transpose(1, 2).unsqueeze(-1))[..., 0].transpose(1, 2)
        model.head(x).sum().backward()

    for _ in range(2):
        run(1)
    # The last block's gradients are accumulated twice: by the second use first, which completes the bucket.
    with pytest.raises(
        RuntimeError, match=r"the gradient of blocks.2.* is accumulated more often .* overlap_grad_reduce=False"
    ):
        run(2)
    flat.zero_grad()
    flat.close()


def test_a_gradient_that_comes_once_more_is_refused(ranks):
    ranks.run(scenario_more_often, 7)


def scenario_flattened(rank: Rank, shard: str, gradient_scale: float) -> None:
    """The flat parameters of several FlattenParamsWrapper, with and without their concats."""
    layers = [nn.Linear(6, 6, device=rank.device) for _ in range(2)]
    models, flats, optimizers = [], [], []
    for optimized in (False, True):
        wrappers = [tg.FlattenParamsWrapper(copy.deepcopy(one), optimize_backward_concat=optimized) for one in layers]
        models.append(nn.Sequential(*wrappers))
        flats.append(tg.FlatParameters(models[-1], shard=shard, gradient_scale=gradient_scale))
        optimizers.append(flats[-1].optimizer(torch.optim.AdamW, lr=1e-2))
    for _ in range(STEPS):
        drawn = torch.randn(MICROBATCHES, rank.world, 4, 6, device=rank.device)
        norms = []
        for model, flat, optimizer in zip(models, flats, optimizers, strict=True):
            with flat.no_sync(), model[0].no_sync(), model[1].no_sync():
                for microbatch in drawn[:-1]:
                    model(microbatch[rank.rank]).square().sum().backward()
            model(drawn[-1, rank.rank]).square().sum().backward()
            norms.append(tg.clip_grad_norm_(flat, 1.0))
            optimizer.step()
            optimizer.zero_grad()
        assert same_bits(*norms)
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert same_bits(one.detach(), other.detach())
    for flat in flats:
        flat.close()


@pytest.mark.parametrize("gradient_scale", [1.0, 0.3])
@pytest.mark.parametrize("shard", SHARDS)
def test_flattened_parameters(ranks, shard, gradient_scale):
    ranks.run(scenario_flattened, 8, shard, gradient_scale)
