"""Flat gradients are those of eager execution, whoever computes them and whatever the user does to them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flat_models import Model, assert_in_buffers, assert_same
from seeds import first_seed
from torch import Tensor, nn

import te_graph as tg
from te_graph.testing import same_bits


@pytest.fixture
def pair() -> Iterator[tuple[tg.FlatParameters, nn.Module, nn.Module]]:
    torch.manual_seed(first_seed("flat parameters"))
    eager = Model()
    model = copy.deepcopy(eager)
    flat = tg.FlatParameters(model)
    yield flat, model, eager
    flat.close()


def test_parameters_stay_the_objects_that_they_are(pair):
    flat, model, eager = pair
    names = list(eager.state_dict())
    assert list(model.state_dict()) == names
    assert model.head.weight is model.embedding.weight
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert_same(model, eager)
    assert_in_buffers(flat, model)
    assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in model.parameters())


# What may happen between backwards, to a model.
Action = Callable[[nn.Module, random.Random], Any]


def drop(model: nn.Module, draw: random.Random) -> None:
    model.zero_grad(set_to_none=True)


def zero(model: nn.Module, draw: random.Random) -> None:
    model.zero_grad(set_to_none=False)


def drop_one(model: nn.Module, draw: random.Random) -> None:
    draw.choice(list(model.parameters())).grad = None


def exchange_one(model: nn.Module, draw: random.Random) -> None:
    parameter = draw.choice([one for one in model.parameters() if one.requires_grad])
    parameter.grad = torch.full_like(parameter, draw.random())


def scale_all(model: nn.Module, draw: random.Random) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def clip(model: nn.Module, draw: random.Random) -> None:
    tg.clip_grad_norm_(model.parameters(), 0.1)


def keep(model: nn.Module, draw: random.Random) -> None:
    """Hold a gradient, a view of it, an array over it: all keep their values after it has been dropped."""
    held = model.__dict__.setdefault("held", [])
    for grad in (one.grad for one in model.parameters() if one.grad is not None):
        held.append((grad, grad.clone()))
        held.append((grad.reshape(-1)[:2], grad.reshape(-1)[:2].clone()))
    model.zero_grad()


def hook_one(model: nn.Module, draw: random.Random) -> None:
    parameter = draw.choice([one for one in model.parameters() if one.requires_grad])
    handle = parameter.register_hook(lambda grad: grad * 2)
    handles = model.__dict__.setdefault("handles", [])
    handles.append(handle)
    if len(handles) > 2:
        handles.pop(0).remove()


def double_grad(parameter: Tensor) -> None:
    parameter.grad.mul_(2)


def hook_after(model: nn.Module, draw: random.Random) -> None:
    parameter = draw.choice([one for one in model.parameters() if one.requires_grad])
    handle = parameter.register_post_accumulate_grad_hook(double_grad)
    handles = model.__dict__.setdefault("handles", [])
    handles.append(handle)
    if len(handles) > 2:
        handles.pop(0).remove()


ACTIONS: list[Action] = [drop, zero, drop_one, exchange_one, scale_all, clip, keep, hook_one, hook_after]


WAYS = ["plain", "plain", "plain", "some", "grad", "inputs", "create", "twice", "checkpoint"]


def backward(model: nn.Module, draw: random.Random, inputs: list[Tensor], ways: list[str]) -> None:
    """One of ``ways`` of getting gradients; inputs: [batch, length] each."""
    way = draw.choice(ways)
    if way == "checkpoint":
        loss = (
            torch.utils.checkpoint.checkpoint(model, inputs[0], draw.random() < 0.5, use_reentrant=False).square().sum()
        )
    else:
        loss = model(inputs[0], draw.random() < 0.5).square().sum()
    if way == "twice":
        loss = loss + model(inputs[1]).sum()
    if way == "some":
        model.blocks[0](torch.ones(2, 12)).sum().backward()
    elif way == "grad":
        torch.autograd.grad(loss, [model.head.weight, model.blocks[0].linear.weight])
    elif way == "inputs":
        loss.backward(inputs=[model.blocks[0].linear.weight, model.head.weight])
    else:
        loss.backward(create_graph=way == "create")


def run(model: nn.Module, seed: int, steps: int, ways: list[str]) -> Iterator[str]:
    """A random training of ``model``; says what it has done after each step."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=draw.random() < 0.5)
    for step in range(steps):
        action = draw.choice(ACTIONS)
        action(model, draw)
        backward(model, draw, [torch.randint(7, (2, 3), generator=generator) for _ in range(2)], ways)
        yield f"step {step}, {action.__name__}"
        if draw.random() < 0.5:
            optimizer.step()
            optimizer.zero_grad(set_to_none=draw.random() < 0.7)
            yield f"step {step}, optimizer"


def graph_blocks(model: nn.Module) -> None:
    samples = tuple((torch.randn(2, 3, 12, requires_grad=True),) for _ in model.blocks)
    tg.make_graphed_callables(tuple(model.blocks), samples, on_mismatch="eager", max_in_flight=2, on_exhausted="eager")


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("graphed", [False, True], ids=["eager", "graphed"])
def test_random_trainings(graphed):
    first = first_seed("flat trainings")
    for seed in range(first, first + 6):
        torch.manual_seed(seed)
        eager = Model()
        model = copy.deepcopy(eager)
        flat = tg.FlatParameters(model)
        if graphed:
            graph_blocks(model)
            graph_blocks(eager)
        # Graphs refuse the gradients of gradients.
        ways = [way for way in WAYS if not (graphed and way in ("create", "grad", "inputs"))]
        for what, _ in zip(run(model, seed, 12, ways), run(eager, seed, 12, ways), strict=True):
            assert_same(model, eager, f"seed {seed}, {what}")
        for one, expected in model.__dict__.get("held", []):
            assert same_bits(one, expected), f"seed {seed}: a gradient that is held"
        flat.close()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_norm_that_is_not_finite_leaves_padding_zero(pair, bad):
    """It makes all gradients NaN, or 0, and is gone with these."""
    flat, model, eager = pair
    tokens = torch.randint(7, (2, 3))
    for factor in (1.0, bad, 1.0):
        norms = []
        for one in (model, eager):
            (one(tokens).square().sum() * factor).backward()
            norms.append(tg.clip_grad_norm_(flat if one is model else one.parameters(), 0.1))
        torch.testing.assert_close(*norms, equal_nan=True)
        assert_in_buffers(flat, model)
        model.zero_grad()
        eager.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["grad", "main_grad"])
@pytest.mark.parametrize("place", ["in place", "elsewhere"])
def test_what_is_reduced_is_not_reduced_again(place, dtype):
    """With a factor, by which it shows, whatever happens to gradients in between."""
    model = nn.Linear(5, 3, bias=False, dtype=dtype)
    flat = tg.FlatParameters(model, gradient_scale=0.5)
    x, expected = torch.ones(1, 5, dtype=dtype), 0.0  # each backward adds 1
    if place == "elsewhere":
        model.weight.grad = torch.zeros(3, 5, dtype=dtype)

    def check() -> None:
        grad = getattr(model.weight, "main_grad", None) if model.weight.grad is None else model.weight.grad
        assert grad.eq(expected).all(), (grad, expected)

    def reduce() -> None:
        model(x).sum().backward()

    def add() -> None:
        with flat.no_sync():
            model(x).sum().backward()

    for acts, value in (
        ([reduce, reduce], 1.0),
        ([add, reduce, reduce], 2.5),
        ([add, flat.reduce_gradients], 3.0),
        ([flat.reduce_gradients, flat.reduce_gradients], 3.0),
        ([add, flat.zero_grad, reduce], 0.5),
        ([add, flat.zero_grad, flat.reduce_gradients, add, reduce], 1.0),
        ([add, model.weight.detach, flat.zero_grad, add, reduce, reduce], 1.5),
    ):
        for act in acts:
            act()
        expected = value
        check()
    if dtype == torch.float32:
        model.weight.grad = torch.ones(3, 5)  # not reduced yet
        reduce()
        expected = 1.0
        check()
    flat.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["grad", "main_grad"])
def test_what_is_not_reduced_is_not_stepped(dtype):
    """Nor clipped, captured or not: beside what has been reduced gradients show what has come since."""
    model = nn.Linear(5, 3, bias=False, dtype=dtype)
    flat = tg.FlatParameters(model, gradient_scale=0.5)
    own = flat.optimizer(torch.optim.SGD, lr=0.1)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    graphed = tg.graphed(lambda: tg.clip_grad_norm_(flat, 10.0))
    acts = {
        "clip_grad_norm_": lambda: tg.clip_grad_norm_(flat, 10.0),
        "clip_grad_norm_ ": graphed,
        "FlatOptimizer.step": own.step,
    }
    if dtype == torch.float32:
        acts["SGD.step"] = other.step

    def backward() -> None:
        model(torch.ones(1, 5, dtype=dtype)).sum().backward()

    for _ in range(4):
        backward()
        graphed()
        flat.zero_grad()
    assert graphed.info()["forward_replays"] > 0
    for is_failing in (False, True):
        backward()
        before = model.weight.detach().clone()
        if is_failing:
            x = torch.ones(1, 5, dtype=dtype).requires_grad_()
            x.register_hook(fail)
            with pytest.raises(ZeroDivisionError):
                model(x.clone()).sum().backward()
        else:
            with flat.no_sync():
                backward()
        for op, act in acts.items():
            with pytest.raises(RuntimeError, match=f"{op.strip()}: expected gradients .* that have been reduced, but"):
                act()
        assert same_bits(model.weight.detach(), before)
        flat.reduce_gradients()
        for act in acts.values():
            act()
        flat.zero_grad()
    flat.close()


def fail(grad: Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["grad", "main_grad"])
def test_gradients_that_are_set_to_zero_are_stepped(dtype):
    """By momentum, as in eager execution; those that are not there are not."""
    layers = nn.ModuleList(nn.Linear(3, 3, bias=False) for _ in range(3)).to(dtype)
    eager = copy.deepcopy(layers).float()
    flat = tg.FlatParameters(layers, gradient_scale=0.5)
    mine = flat.optimizer(torch.optim.SGD, lr=0.125, momentum=0.5)
    theirs = torch.optim.SGD(eager.parameters(), lr=0.125, momentum=0.5)
    x = torch.ones(1, 3)

    def run(model: nn.Module, used: int) -> None:
        loss = sum(layer(x.to(layer.weight.dtype)).sum() for layer in model[:used])
        (loss if model is layers else loss * 0.5).backward()

    mine.zero_grad(set_to_none=False)  # there is none
    for used in (2, 1, 0, 1):
        for model, optimizer in ((layers, mine), (eager, theirs)):
            if used:
                run(model, used)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        for one, other in zip(layers, eager, strict=True):
            torch.testing.assert_close(one.weight.float(), other.weight, rtol=1e-2, atol=1e-2)
        if dtype == torch.float32:
            assert_same(layers, eager)
    # What has been reduced is aside here.
    with flat.no_sync():
        run(layers, 1)
    mine.zero_grad(set_to_none=False)
    run(layers, 1)
    grad = layers[0].weight.grad if dtype == torch.float32 else layers[0].weight.main_grad
    assert grad.eq(0.5).all()
    flat.close()


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scalers(pair, fused, unscales):
    """Of torch's for ``.grad``, of te_graph's for both: the bits of eager execution, and its scales."""
    flat, model, eager = pair
    again = copy.deepcopy(eager)
    flat_again = tg.FlatParameters(again)
    runs = [
        (
            one,
            torch.optim.AdamW(one.parameters(), lr=0.1, fused=fused)
            if owner is None
            else owner.optimizer(torch.optim.AdamW, lr=0.1, fused=fused),
            cls("cpu", init_scale=4.0, growth_interval=2),
        )
        for one, owner, cls in (
            (eager, None, torch.amp.GradScaler),
            (copy.deepcopy(eager), None, tg.FlatGradScaler),
            (model, flat, torch.amp.GradScaler),
            (again, flat_again, tg.FlatGradScaler),
        )
    ]
    for step in range(6):
        tokens, factor = torch.randint(7, (2, 3)), float("inf") if step in (1, 4) else 1.0
        for one, optimizer, scaler in runs:
            scaler.scale(one(tokens, step != 3).square().sum() * factor).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        for one, _, scaler in runs[1:]:
            assert_same(one, eager, f"step {step}")
            assert scaler.get_scale() == runs[0][2].get_scale(), step
    flat_again.close()


def test_grad_scalers_with_main_grads():
    model = nn.Linear(3, 2, bias=False, dtype=torch.float16)
    flat = tg.FlatParameters(model)
    optimizer = flat.optimizer(torch.optim.SGD, lr=0.5)
    scaler, plain = tg.FlatGradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=8.0)
    nn.init.zeros_(model.weight)
    for factor, expected in ((1.0, -0.5), (float("inf"), -0.5), (1.0, -1.0)):
        scaler.scale(model(torch.ones(1, 3, dtype=torch.float16)).float().sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert model.weight.eq(expected).all()
    assert scaler.get_scale() == 4.0
    plain.scale(model(torch.ones(1, 3, dtype=torch.float16)).float().sum()).backward()
    with pytest.raises(
        RuntimeError, match=r"got those of a FlatParameters in main_grad: make a te_graph.FlatGradScaler"
    ):
        plain.step(optimizer)
    flat.close()
    model = nn.Linear(3, 2, dtype=torch.float16)
    flat = tg.FlatParameters(model, grad_dtype=torch.float16)
    optimizer = flat.optimizer(torch.optim.SGD, lr=0.5)
    scaler.scale(model(torch.ones(1, 3, dtype=torch.float16)).float().sum()).backward()
    with pytest.raises(ValueError, match=r"FlatGradScaler.unscale_: expected gradients of float32 or bfloat16"):
        scaler.unscale_(optimizer)
    flat.close()


def test_captured_reductions_expect_what_is_not_reduced():
    model = nn.Linear(5, 3, bias=False)
    flat = tg.FlatParameters(model, gradient_scale=0.5)
    reduce = tg.graphed(flat.reduce_gradients)
    message = "FlatParameters.reduce_gradients: expected no gradients from before the last reduction in a function"
    for _ in range(4):
        with flat.no_sync():
            for _ in range(2):
                model(torch.ones(1, 5)).sum().backward()
        reduce()
        assert model.weight.grad.eq(1.0).all()
        flat.zero_grad()
    assert reduce.info()["forward_replays"] >= 2
    with flat.no_sync():
        model(torch.ones(1, 5)).sum().backward()
    reduce()
    with pytest.raises(RuntimeError, match=message):
        reduce()
    flat.reduce_gradients()
    assert model.weight.grad.eq(0.5).all()
    with flat.no_sync():
        model(torch.ones(1, 5)).sum().backward()
    with pytest.raises(RuntimeError, match=message):
        reduce()
    flat.zero_grad()
    flat.close()
