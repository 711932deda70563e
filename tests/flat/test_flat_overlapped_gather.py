"""Parameters that are gathered while the caller goes on are there when they are used.

The gather is made to come late, so that whatever does not wait for it finds old values.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from flat_models import Block, assert_equal, trained
from late_gathers import LatePending, late_gathers
from ranks import Rank, ranks_of
from torch import Tensor, nn

import te_graph as tg
from te_graph.testing import same_bits

WORLDS = [
    pytest.param(("cpu", 2), id="gloo-2"),
    pytest.param(("cuda", 2), id="nccl-2", marks=pytest.mark.multi_gpu),
]
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
WIDTH, STEPS, MICROBATCHES = 64, 4, 2


class Stack(nn.Module):
    """Blocks, what comes before and behind them, and a head that is tied; a buffer for two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(3))
        self.low = nn.Linear(WIDTH, WIDTH).bfloat16()
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> [batch, length, 11]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.low(x.bfloat16()).float())


def listed(model: Stack) -> list[nn.Module]:
    """All but the embedding, whose bucket is gathered before ``step`` returns."""
    return [*model.blocks, model.low]


def make(rank: Rank, overlaps: bool) -> tuple[tg.FlatParameters, Stack, Any]:
    torch.manual_seed(5)
    model = Stack().to(rank.device)
    flat = tg.FlatParameters(
        model, shard="optimizer", bucket_bytes=8192, overlap_param_gather=listed(model) if overlaps else ()
    )
    return flat, model, flat.optimizer(torch.optim.AdamW, lr=0.05, fused=True, capturable=rank.device != "cpu")


def batches(rank: Rank, step: int) -> list[Tensor]:  # [batch, length] each
    generator = torch.Generator().manual_seed(100 * step + rank.rank)
    return [torch.randint(11, (3, 5), generator=generator).to(rank.device) for _ in range(MICROBATCHES)]


def train(rank: Rank, flat: tg.FlatParameters, model: nn.Module, optimizer: Any, steps: range) -> list[Tensor]:
    """Losses [] of all micro-batches."""
    losses = []
    for step in steps:
        drawn = batches(rank, step)
        for number, tokens in enumerate(drawn):
            with contextlib.nullcontext() if number + 1 == len(drawn) else flat.no_sync():
                loss = model(tokens).square().mean()
                loss.backward()
            losses.append(loss.detach())
        tg.clip_grad_norm_(flat, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def late(rank: Rank, scenario: Callable[..., None], *arguments: Any) -> None:
    with late_gathers(rank.device):
        scenario(rank, *arguments)


def values_of(model: nn.Module) -> list[Tensor]:  # [...] each
    return [one.detach().clone() for one in trained(model)]


def assert_alike(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(same_bits(one, other) for one, other in zip(found, expected, strict=True))


def expected_of(rank: Rank, steps: int = STEPS) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """Losses, parameters and the optimizer's state without an overlap."""
    flat, model, optimizer = make(rank, False)
    losses = train(rank, flat, model, optimizer, range(steps))
    found = losses, values_of(model), optimizer.state_dict()
    flat.close()
    return found


def scenario_same_bits(rank: Rank, graphed: bool) -> None:
    losses, values, state = expected_of(rank)
    flat, model, optimizer = make(rank, True)
    assert len(flat.buffers) == 2 and max(len(one.layout.buckets) for one in flat.buffers) == 4
    if graphed:
        sample = torch.randn(3, 5, WIDTH, device=rank.device, requires_grad=True)
        tg.make_graphed_callables(tuple(model.blocks), ((sample,),) * 3, chain=False)
    assert_alike(train(rank, flat, model, optimizer, range(STEPS)), losses)
    flat.wait_for_parameters()
    assert_alike(values_of(model), values)
    if graphed:
        assert all(block.te_graph.info()["forward_replays"] for block in model.blocks)
    assert_equal(optimizer.state_dict(), state)
    flat.close()
    assert not any(one._forward_pre_hooks for one in listed(model))


def test_replays_and_eager_layers_wait_for_their_parameters(ranks: Any) -> None:
    for graphed in (False, True):
        ranks.run(late, 1, scenario_same_bits, graphed)


def scenario_reads_too_early(rank: Rank) -> None:
    """What tests look for can be seen: without the hooks layers compute with old values."""
    losses, values, _ = expected_of(rank)
    flat, model, optimizer = make(rank, True)
    for module in listed(model):
        module._forward_pre_hooks.clear()
    found = train(rank, flat, model, optimizer, range(STEPS))
    assert not all(same_bits(one, other) for one, other in zip(found, losses, strict=True))
    flat.close()
    assert not all(same_bits(one, other) for one, other in zip(values_of(model), values, strict=True))


def test_without_the_hooks_old_values_are_read(ranks: Any) -> None:
    ranks.run(late, 2, scenario_reads_too_early)


def scenario_files(rank: Rank) -> None:
    """States of layers, of the model and of the optimizer are those behind the step, and loads are not overwritten."""
    _, values, state = expected_of(rank)
    flat, model, optimizer = make(rank, True)
    train(rank, flat, model, optimizer, range(STEPS))
    saved = {name: one.clone() for name, one in model.state_dict().items()}
    assert_alike([saved[name] for name, one in model.named_parameters() if one.requires_grad], values)
    train(rank, flat, model, optimizer, range(1))
    model.load_state_dict(saved)
    optimizer.load_state_dict(state)
    assert_alike(values_of(model), values)
    train(rank, flat, model, optimizer, range(1))
    with pytest.raises(AssertionError, match="step"):
        assert_equal(optimizer.state_dict(), state)
    flat.close()


def test_what_is_saved_and_loaded_waits(ranks: Any) -> None:
    ranks.run(late, 3, scenario_files)


def scenario_copies(rank: Rank) -> None:
    """Copies and files of a model whose gather is overlapped are models like any others."""
    flat, model, optimizer = make(rank, True)
    train(rank, flat, model, optimizer, range(1))
    flat.wait_for_parameters()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for one in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert same_bits(one(batches(rank, 0)[0]), model(batches(rank, 0)[0]))
        one.load_state_dict(one.state_dict())
    flat.close()


def test_models_are_copied_and_pickled(ranks: Any) -> None:
    ranks.run(late, 4, scenario_copies)


def scenario_graphed_step(rank: Rank) -> None:
    """Clip, step and gather in one graph: its replays gather on their stream, behind what is still under way."""
    losses, values, _ = expected_of(rank)
    flat, model, optimizer = make(rank, True)

    @tg.graphed
    def finish() -> None:
        tg.clip_grad_norm_(flat, 1.0)
        optimizer.step()

    found = []
    for step in range(STEPS):
        drawn = batches(rank, step)
        for number, tokens in enumerate(drawn):
            with contextlib.nullcontext() if number + 1 == len(drawn) else flat.no_sync():
                loss = model(tokens).square().mean()
                loss.backward()
            found.append(loss.detach())
        finish()
        optimizer.zero_grad()
    assert_alike(found, losses)
    flat.wait_for_parameters()
    assert_alike(values_of(model), values)
    flat.close()


@pytest.mark.gpus_apart  # a norm over ranks in a graph needs NCCL
def test_a_step_in_a_graph_gathers_inside(ranks: Any) -> None:
    ranks.run(late, 5, scenario_graphed_step)


def scenario_fp8(rank: Rank) -> None:
    """Casts of all weights of a region wait for all of them."""

    def losses_of(overlaps: bool) -> list[Tensor]:
        torch.manual_seed(7)
        model = nn.Sequential(*(tg.Linear(64, 64, device=rank.device, dtype=torch.bfloat16) for _ in range(4)))
        flat = tg.FlatParameters(
            model, shard="optimizer", bucket_bytes=4096, overlap_param_gather=list(model) if overlaps else ()
        )
        optimizer = flat.optimizer(torch.optim.SGD, lr=0.5)
        found = []
        for step in range(STEPS):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step), dtype=torch.float32).to(
                rank.device, torch.bfloat16
            )
            with tg.fp8_autocast(enabled=True, recipe=tg.DelayedScaling()):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        flat.close()
        return [*found, *values_of(model)]

    assert_alike(losses_of(True), losses_of(False))


def test_casts_to_fp8_wait_for_all_weights(ranks: Any) -> None:
    ranks.run(late, 6, scenario_fp8)


def pair(rank: Rank, modules: Callable[[nn.Module], list[nn.Module]], make_model: Callable[[], nn.Module]) -> None:
    """Losses of two trainings, of which one gathers beside the forward, are the same."""

    def train_one(overlaps: bool) -> list[Tensor]:
        torch.manual_seed(9)
        model = make_model().to(rank.device)
        listed = modules(model) if overlaps else ()
        flat = tg.FlatParameters(model, shard="optimizer", bucket_bytes=1024, overlap_param_gather=listed)
        optimizer = flat.optimizer(torch.optim.SGD, lr=0.1)
        found = []
        for step in range(3):
            x = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(step)).to(rank.device)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        del flat, optimizer
        gc.collect()
        return [*found, model(x).detach()]

    assert_alike(train_one(True), train_one(False))


def tied() -> nn.Module:
    stack = Stack()
    assert stack.head.weight is stack.embedding.weight
    return nn.Sequential(stack.embedding, stack.head)


def normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of what many models still have
        normed = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(nn.Embedding(11, WIDTH), normed, nn.Linear(WIDTH, 3))


def compiled() -> nn.Module:
    model = Stack()
    model.compile(backend="eager")
    model(torch.zeros(4, 5, dtype=torch.int64)).sum().backward()  # before there are flat parameters
    model.zero_grad()
    return model


class WithPeer(nn.Module):
    """Two of one class, both compiled: what runs first is listed nowhere, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Stack() for _ in range(2))
        for block in self.blocks:
            block.compile(backend="eager")

    def forward(self, x: Tensor) -> Tensor:  # [batch, length]
        peer, own = self.blocks
        target = peer(x).detach()
        return own(x) - target


class WithCompiled(nn.Module):
    """What is listed is what torch.compile returns."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(torch.compile(nn.Linear(WIDTH, WIDTH), backend="eager") for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:  # [batch, length]
        first, second = self.layers
        return second(first(self.embedding(x)))


@pytest.mark.parametrize("make_model", [tied, normed, compiled, WithPeer, WithCompiled])
def test_what_uses_parameters_otherwise_waits_as_well(ranks: Any, make_model: Callable[[], nn.Module]) -> None:
    """A weight that another module has, too; hooks that compute one; code that was compiled before. At the end the
    FlatParameters is gone before the forward."""
    ranks.run(late, 7, pair, last_of, make_model)


def last_of(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, WithPeer):
        return list(model.blocks[1].blocks)
    if isinstance(model, WithCompiled):
        return list(model.layers)
    return list(model.blocks) if isinstance(model, Stack) else list(model)[1:]


def scenario_graphed_forward(rank: Rank) -> None:
    """A graphed function may call modules that wait: each replay waits before it begins."""
    flat, model, optimizer = make(rank, True)
    tokens = batches(rank, 0)[0]

    @tg.graphed
    @torch.no_grad()
    def evaluate(x: Tensor) -> Tensor:  # [batch, length]
        return model(x)

    for step in range(STEPS):
        train(rank, flat, model, optimizer, range(step, step + 1))
        found = evaluate(tokens).clone()
        assert same_bits(found, model(tokens).detach())
    assert evaluate.info()["forward_replays"] > 0
    flat.close()


def test_graphed_functions_wait_for_what_they_call(ranks: Any) -> None:
    ranks.run(late, 8, scenario_graphed_forward)


def scenario_streams(rank: Rank) -> None:
    """A stream waits itself, whatever another one has waited for."""
    if rank.device != "cpu":
        side = torch.cuda.Stream()
    flat, model, optimizer = make(rank, True)
    train(rank, flat, model, optimizer, range(1))
    pending = flat.gather._pending
    assert pending._waited_count < pending._count
    if rank.device == "cpu":
        waits = []
        with mock.patch.object(LatePending, "_wait_for", lambda self, stream, number: waits.append((stream, number))):
            flat.wait_for_parameters()
            LatePending.streams.append("another")
            flat.wait_for_parameters()
            LatePending.streams.pop()
        assert waits == [("main", pending._count - 1), ("another", pending._count - 1)]
        pending._waited_count = 0
    else:
        flat.wait_for_parameters()
        with torch.cuda.stream(side):
            flat.wait_for_parameters()
            values = values_of(model)
        side.synchronize()
        assert_alike(values, values_of(model))
    flat.close()


def test_each_stream_waits(ranks: Any) -> None:
    ranks.run(late, 9, scenario_streams)


def scenario_refusals(rank: Rank) -> None:
    model = Stack().to(rank.device)
    refused = [
        (
            {"overlap_param_gather": model.blocks},
            ValueError,
            "expected shard='optimizer' with overlap_param_gather, got 'none'",
        ),
        (
            {"overlap_param_gather": model.head},
            TypeError,
            "expected overlap_param_gather to be modules in a list, got Linear",
        ),
        ({"overlap_param_gather": [model.head.weight]}, TypeError, "to be modules, got Parameter as number 0"),
        ({"overlap_param_gather": [model.head, nn.ReLU()]}, ValueError, "got ReLU without one as number 1"),
        ({"overlap_param_gather": [model.blocks]}, ValueError, "got a ModuleList as number 0: list its members"),
    ]
    for options, error, message in refused:
        shard = "none" if "got 'none'" in message else "optimizer"
        with pytest.raises(error, match=message.replace("[", r"\[")):
            tg.FlatParameters(model, shard=shard, **options)
    blocks = list(model.blocks) if rank.rank == 0 else list(reversed(model.blocks))
    with pytest.raises(RuntimeError, match="expected the same model on all ranks, got overlap_param_gather 0"):
        tg.FlatParameters(model, shard="optimizer", overlap_param_gather=blocks)
    assert not any(one._forward_pre_hooks for one in model.modules())

    flat = tg.FlatParameters(model, shard="optimizer", overlap_param_gather=[block.linear for block in model.blocks])
    sample = torch.randn(3, 5, WIDTH, device=rank.device, requires_grad=True)
    with pytest.raises(RuntimeError, match="forward pre-hooks"):
        tg.make_graphed_callables(model.blocks[0], (sample,))
    with pytest.raises(RuntimeError, match="list the modules that are graphed, not what is in them"):
        tg.make_graphed_callables(model.blocks[0], (sample,), hooks="captured")
    flat.close()


def test_what_cannot_wait_is_refused(ranks: Any) -> None:
    ranks.run(late, 7, scenario_refusals)
