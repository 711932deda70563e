"""Activation checkpointing around graphed callables: refused, or run eagerly; never a replay that saves no memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import replays
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from twins import backward_of, eager_copy, gradients_of, run

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

INSIDE = r"called inside activation checkpointing, .*: checkpoint inside the callable"
SELECTIVE = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])


def batch(device: str) -> Tensor:  # [3, 4]
    return torch.randn(3, 4, device=device, requires_grad=True)


def net(device: str, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 4)).to(device)


def around(call: Callable[[Tensor], Tensor], **options: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(lambda x: torch.sin(call(x)), x, use_reentrant=False, **options)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "activation checkpointing" in record.message]


@pytest.mark.parametrize("options", [{}, {"debug": True}, {"context_fn": SELECTIVE}], ids=["plain", "debug", "some"])
def test_a_checkpoint_around_a_call_is_refused_without_a_trace(device, options):
    model = net(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    with pytest.raises(RuntimeError, match=f"^Sequential: {INSIDE}.*on_mismatch="):
        around(model, **options)(batch(device))
    x = batch(device)
    assert_bitwise_equal(run(model, x), run(twin, x))
    assert replays(model) == 1


@pytest.mark.parametrize("on_mismatch", ["eager", "capture"])
@pytest.mark.parametrize("options", [{}, {"context_fn": SELECTIVE}], ids=["plain", "some"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_checkpoint_around_a_call_computes_it_again(device, on_mismatch, options, dropout, caplog):
    model = net(device, dropout)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),), on_mismatch=on_mismatch)
    for seed in range(2):
        x, results = batch(device), []
        for one in (model, twin):
            torch.manual_seed(seed)
            results.append((run(around(one, **options), x), torch.rand(3, device=device)))
        assert_bitwise_equal(*results)
    info = model.te_graph.info()
    # Two forwards, each of which the backward computes again.
    assert (info["signatures"], info["forward_replays"], sum(info["eager_calls"].values())) == (1, 0, 4)
    assert len(warnings_of(caplog)) == 1
    x = batch(device)
    for one in (model, twin):
        torch.manual_seed(3)
        results.append(run(one, x))
    assert_bitwise_equal(*results[-2:])
    assert replays(model) == 1
    assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))


@pytest.mark.parametrize("on_mismatch", ["raise", "eager"])
def test_a_chain_inside_a_checkpoint(device, on_mismatch):
    model = nn.Sequential(net(device), net(device))
    twin, x = eager_copy(model), batch(device)
    make_graphed_callables(tuple(model), (batch(device),), chain=True, on_mismatch=on_mismatch)
    if on_mismatch == "raise":
        with pytest.raises(RuntimeError, match=rf"callable 0 \(Sequential\): {INSIDE}"):
            around(model)(x)
    else:
        assert_bitwise_equal(run(around(model), x), run(around(twin), x))
    assert_bitwise_equal(run(model, x), run(twin, x))
    assert [replays(one) for one in model] == [1, 1]
    assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))


def test_a_reentrant_checkpoint_runs_forward_eagerly_and_replays_what_it_computes_again(device):
    model = net(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    for _ in range(2):
        x = batch(device)
        results = [run(lambda x, one=one: checkpoint(one, x, use_reentrant=True), x) for one in (model, twin)]
        assert_bitwise_equal(*results)
    info = model.te_graph.info()
    assert info["forward_replays"] == info["backward_replays"] == sum(info["eager_calls"].values()) == 2


def test_what_has_no_gradient_replays_inside_a_checkpoint(device):
    """It saves nothing, and is called again where something else in the checkpoint is."""
    model = net(device).requires_grad_(False)
    head = nn.Linear(4, 4).to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device).detach(),))
    x = batch(device).detach()
    results = []
    for one in (model, twin):
        head.zero_grad()
        result = checkpoint(lambda x, one=one: head(one(x)).tanh(), x, use_reentrant=False)
        backward_of(result)
        results.append((result.detach(), gradients_of(list(head.parameters()))))
    assert_bitwise_equal(*results)
    assert replays(model) == 2


def test_a_forward_from_before_the_capture_is_computed_again_eagerly(device):
    model, x = net(device), batch(device)
    twin = eager_copy(model)
    result = around(model)(x)
    make_graphed_callables(model, (batch(device),))
    backward_of(result)
    y = x.detach().clone().requires_grad_()
    backward_of(around(twin)(y))
    assert_bitwise_equal(x.grad, y.grad)
    assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))


def test_other_hooks_inside_a_checkpoint_see_what_is_saved(device):
    """The innermost hooks alone see it, as in eager execution."""
    model = net(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))

    def offloaded(call: nn.Module) -> Callable[[Tensor], Tensor]:
        def inside(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            with torch.autograd.graph.save_on_cpu():
                return call(x)

        return inside

    x = batch(device)
    assert_bitwise_equal(run(around(offloaded(model)), x), run(around(offloaded(twin)), x))
    assert replays(model) == 0


def test_a_checkpoint_around_a_call_with_main_grads_is_refused(device):
    model = net(device).bfloat16()
    x = batch(device).detach().bfloat16().requires_grad_()
    make_graphed_callables(model, (x,), grad_dtype=torch.float32, on_mismatch="eager")
    with pytest.raises(RuntimeError, match=f"{INSIDE}.*main_grad"):
        around(model)(x)
