"""Backwards that fail, run inside others or beside them, and reach other parameters than those before.

The reference on several ranks is a twin whose buckets are all reduced at the end of the backward.
"""

from __future__ import annotations

import contextlib
import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flat_models import gradients_of
from ranks import Rank, ranks_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_graph as tg
from te_graph.testing import same_bits

WORLDS = [
    pytest.param(("cpu", 2), id="gloo-2"),
    pytest.param(("cuda", 2), id="nccl-2", marks=pytest.mark.multi_gpu),
]
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
BF16 = torch.bfloat16


class Failing(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:  # [...]
        ctx.fails = fails
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # [...]
        if ctx.fails:
            raise FloatingPointError("not finite")
        return grad, None


class Model(nn.Module):
    """The head is tied to the embedding, so that this gradient comes last; ``sometimes`` comes early."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8)
        self.head = nn.Linear(8, 7)
        self.head.weight = self.embedding.weight

    def forward(  # [batch] -> [batch, 7]
        self, tokens: Tensor, uses_all: bool = True, fails: bool = False, is_checkpointed: bool = False
    ) -> Tensor:
        x = self.first(self.embedding(tokens))
        x = checkpoint(self.second, x, use_reentrant=True) if is_checkpointed else self.second(x)
        x = Failing.apply(x, fails)
        return self.head(self.sometimes(x) if uses_all else x)


class Twins:
    """A flat model, and one that is reduced at the end."""

    def __init__(self, rank: Rank, **options: Any) -> None:
        self.rank = rank
        self.models = [Model().to(rank.device)]
        self.models.append(copy.deepcopy(self.models[0]))
        self.flats = [
            tg.FlatParameters(model, bucket_bytes=64, overlap_grad_reduce=overlap, **options)
            for model, overlap in zip(self.models, (True, False), strict=True)
        ]

    def step(self, fails: bool = False, **ways: bool) -> None:
        tokens = torch.randint(7, (3, self.rank.world), device=self.rank.device)[:, self.rank.rank]
        for model in self.models[: 1 if fails else 2]:
            loss = model(tokens, fails=fails, **ways).square().sum()
            with pytest.raises(FloatingPointError) if fails else contextlib.nullcontext():
                loss.backward()
        if not fails:
            for one, other in zip(*map(gradients_of, self.models), strict=True):
                assert same_bits(one, other)
        self.drop()

    def drop(self) -> None:
        for flat in self.flats:
            flat.zero_grad()

    def close(self) -> None:
        for flat in self.flats:
            flat.close()


def scenario_failed(rank: Rank) -> None:
    """On all ranks, of which one has come to more buckets."""
    twins = Twins(rank)
    for fails in (False, True, False, True, True, False):
        twins.step(fails, uses_all=not fails or rank.rank == 0)
        dist.barrier()  # as any collective of the user's
    twins.close()


def scenario_failed_alone(rank: Rank) -> None:
    """What the others have reduced without this rank is so before its next backward."""
    twins = Twins(rank)
    twins.step()
    if rank.rank == 0:
        twins.step(fails=True)
    else:
        twins.models[0](torch.zeros(3, dtype=torch.long, device=rank.device)).sum().backward()
        twins.drop()
    twins.step()
    twins.close()


def scenario_failed_behind_its_caller(rank: Rank) -> None:
    """A device's thread may hold a backward that has failed while the caller's goes on: zero_grad awaits its end."""
    twins = Twins(rank)
    twins.step()
    model, begun, goes_on = twins.models[0], threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        begun.set()
        goes_on.wait()

    def fail() -> None:
        loss = model(torch.zeros(3, dtype=torch.long, device=rank.device), fails=True).sum()
        with pytest.raises(FloatingPointError):
            loss.backward()

    handle = model.sometimes.register_full_backward_hook(hold)
    thread = threading.Thread(target=fail)
    thread.start()
    begun.wait()
    threading.Timer(0.2, goes_on.set).start()
    twins.drop()
    assert goes_on.is_set()
    thread.join()
    handle.remove()
    twins.step()
    twins.close()


def scenario_first_used_later(rank: Rank) -> None:
    """By one rank."""
    twins = Twins(rank)
    for step in range(5):
        twins.step(uses_all=step >= 2 and rank.rank == step % 2)
    twins.close()


def scenario_nested(rank: Rank) -> None:
    """A checkpoint's backward writes first, inside of the one that goes on."""
    for options in ({"gradient_scale": 0.5}, {"shard": "optimizer"}):
        for pattern in ([True] * 3, [False, False, True, False]):
            twins = Twins(rank, **options)
            for is_checkpointed in pattern:
                twins.step(is_checkpointed=is_checkpointed)
            twins.close()


@pytest.mark.parametrize(
    "scenario",
    [
        scenario_failed,
        scenario_failed_alone,
        scenario_failed_behind_its_caller,
        scenario_first_used_later,
        scenario_nested,
    ],
)
def test_buckets_that_are_reduced_meanwhile(ranks, scenario):
    ranks.run(scenario, 1)


def at_once(*calls: Callable[[], Any]) -> None:
    """Each on a thread of its own."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> None:
        barrier.wait()
        call()

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def both_gradients(dtype: torch.dtype) -> tuple[nn.Module, list[Callable[[], None]], Tensor]:
    """A model, two backwards, and the sum [n, n] of their gradients, whose bits do not depend on its order."""
    model = nn.Linear(400, 400, bias=False, dtype=dtype)
    samples = torch.randn(2, 1, 400, dtype=dtype)
    grads = [torch.autograd.grad(model(x).square().sum(), model.weight)[0].float() for x in samples]
    return model, [lambda x=x: model(x).square().sum().backward() for x in samples], grads[0] + grads[1]


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["grad", "main_grad"])
def test_first_gradients_come_at_once(dtype):
    model, backwards, expected = both_gradients(dtype)
    flat = tg.FlatParameters(model)
    for _ in range(40):
        at_once(*backwards)
        assert same_bits(*gradients_of(model), expected)
        flat.zero_grad()
    flat.close()


def test_what_comes_at_once_is_reduced_once():
    """By the backward that ends last."""
    model = nn.Linear(3, 2, bias=False)
    flat = tg.FlatParameters(model, gradient_scale=0.5)
    barrier = threading.Barrier(2)

    def wait(_: Tensor) -> None:
        barrier.wait()

    def run() -> None:
        x = torch.ones(1, 3, requires_grad=True) * 1
        x.register_hook(wait)  # until both have written
        model(x).sum().backward()

    for _ in range(3):
        at_once(run, run)
        assert model.weight.grad.eq(1).all()
        flat.zero_grad()
    flat.close()


def test_one_node_runs_two_backwards():
    """As reversible networks do: neither is the whole."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    flat = tg.FlatParameters(model, gradient_scale=0.5)

    class TwoBackwards(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # [...]
            ctx.save_for_backward(x)
            return model[2](model[1](x))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # [...]
            (x,) = ctx.saved_tensors
            for layer, value in ((model[2], model[1](x)), (model[1], x)):
                value = value.detach().requires_grad_()
                with torch.enable_grad():
                    torch.autograd.backward(layer(value), grad)
                grad = value.grad
            return grad

    x = torch.randn(2, 3)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for _ in range(2):
        TwoBackwards.apply(model[0](x)).sum().backward()
        for one, other in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(one.grad, other / 2)
        flat.zero_grad()
    flat.close()


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["grad", "main_grad"])
def test_hooks_of_the_accumulating_node(dtype):
    """Those before it see the gradient, those behind it find it in .grad."""
    model = nn.Linear(3, 2, bias=False, dtype=dtype)
    flat = tg.FlatParameters(model)
    node = model.weight.view_as(model.weight).grad_fn.next_functions[0][0]
    seen: list[Tensor] = []
    node.register_prehook(lambda grads: seen.append(grads[0].clone()))
    node.register_hook(lambda *_: seen.append(model.weight.grad.clone()))
    for count in (1, 2):
        model(torch.ones(1, 3, dtype=dtype)).sum().backward()
        assert len(seen) == 2 * count and all(one.eq(1).all() for one in seen[:2])
        assert gradients_of(model)[0].eq(count).all()
    flat.close()


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["grad", "main_grad"])
def test_made_anew_where_one_is_gone(dtype):
    model = nn.Linear(3, 2, dtype=dtype)
    x = torch.ones(1, 3, dtype=dtype)
    flat = tg.FlatParameters(model)
    model(x).sum().backward()
    del flat
    with pytest.raises(RuntimeError, match="lies in the buffer of a FlatParameters that is gone: keep it"):
        model(x).sum().backward()
    flat = tg.FlatParameters(model)
    model(x).sum().backward()
    assert all(grad.eq(2).all() for grad in gradients_of(model))
    flat.close()


@pytest.mark.parametrize("way", ["closed", "gone", "saved", "saved when closed"])
def test_a_main_grad_that_was_dropped_stays_so(way):
    model = nn.Linear(3, 2, dtype=BF16)
    x = torch.ones(1, 3, dtype=BF16)
    flat = tg.FlatParameters(model)
    model(x).sum().backward()
    flat.zero_grad()
    if "closed" in way:
        flat.close()
    if way.startswith("saved"):
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        model = torch.load(file, weights_only=False)
    del flat
    flat = tg.FlatParameters(model)
    model(x).sum().backward()
    assert all(grad.eq(1).all() for grad in gradients_of(model))
    flat.close()


def test_compiled_autograd_is_refused():
    from torch._dynamo import compiled_autograd

    model = nn.Linear(3, 2)
    flat = tg.FlatParameters(model)
    loss = model(torch.ones(1, 3)).sum()
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(NotImplementedError, match="FlatParameters: expected a backward that autograd runs itself"),
    ):
        loss.backward()
    flat.close()
