"""Activation checkpointing around graphed callables with FP8 layers: what is computed again has the bits of eager
execution, or the call raises an error that names the checkpoint.

The reference is the same training without graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import gradients_of

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH = 32
DELAYED, CURRENT = tg.DelayedScaling(amax_history_len=3), tg.Float8CurrentScaling()
recipes = pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
Graph = Callable[[nn.ModuleList, Tensor], None]


def net(device: str) -> nn.Module:
    """[n, WIDTH] -> [n, WIDTH]"""
    return nn.Sequential(tg.Linear(WIDTH, WIDTH), nn.GELU(), tg.Linear(WIDTH, WIDTH)).to(device)


def batches(device: str) -> list[Tensor]:  # [16, WIDTH] each
    values = torch.Generator().manual_seed(1)
    return [((1 + 3 * (n % 3)) * torch.randn(16, WIDTH, generator=values)).to(device) for n in range(5)]


def train(device: str, recipe: Any, inside: bool, use_reentrant: bool, graph: Graph | None = None) -> list[Any]:
    """Losses and gradients of some steps; the backward runs ``inside`` of the region, or outside."""
    torch.manual_seed(0)
    nets = nn.ModuleList(net(device) for _ in range(2))
    optimizer = torch.optim.SGD(nets.parameters(), lr=0.2)
    seen: list[Any] = []
    for number, x in enumerate(batches(device)):
        if graph is not None and number == 1:
            graph(nets, x)
        y = x.clone().requires_grad_()
        with tg.fp8_autocast(recipe=recipe):
            for one in nets:
                y = checkpoint(one, y, use_reentrant=use_reentrant)
            loss = y.square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        seen += [loss.detach(), gradients_of(list(nets.parameters()))]
        optimizer.step()
        optimizer.zero_grad()
    return seen


@recipes
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("on_mismatch", ["raise", "eager", "capture"])
@pytest.mark.one_of(5)
def test_a_reentrant_checkpoint_takes_the_scales_of_the_first_call(
    device: str, recipe: object, inside: bool, on_mismatch: str
) -> None:
    def graph(nets: nn.ModuleList, x: Tensor) -> None:
        samples = tuple((x.clone().requires_grad_(),) for _ in nets)
        with tg.fp8_autocast(recipe=recipe):
            tg.make_graphed_callables(tuple(nets), samples, on_mismatch=on_mismatch)

    assert_bitwise_equal(train(device, recipe, inside, True, graph), train(device, recipe, inside, True))


@pytest.mark.parametrize("inside", [False, True])
def test_a_call_that_waits_for_its_capture_is_not_captured_where_it_is_computed_again(
    device: str, inside: bool
) -> None:
    graphed: list[nn.Module] = []

    def graph(nets: nn.ModuleList, x: Tensor) -> None:
        graphed.extend(tg.make_graphed_callables(tuple(nets)))

    assert_bitwise_equal(train(device, DELAYED, inside, True, graph), train(device, DELAYED, inside, True))
    info = graphed[0].te_graph.info()
    assert info["graphs"] == 0
    assert "called where a checkpoint computes FP8 layers again, not captured yet" in info["eager_calls"]


@pytest.mark.parametrize("on_mismatch", ["raise", "capture"])
def test_what_was_captured_without_fp8_computes_in_fp8_again(device: str, on_mismatch: str) -> None:
    """The first call runs eagerly in the region, and the backward outside, as the capture did."""

    def graph(nets: nn.ModuleList, x: Tensor) -> None:
        samples = tuple((x.clone().requires_grad_(),) for _ in nets)
        tg.make_graphed_callables(tuple(nets), samples, on_mismatch=on_mismatch)

    assert_bitwise_equal(train(device, DELAYED, False, True, graph), train(device, DELAYED, False, True))


def test_constants_that_were_not_captured_are_not_captured_where_they_are_computed_again(device: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tg.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, scale: float) -> Tensor:  # [n, WIDTH]
            return self.inner(x) * scale

    found = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model = Scaled().to(device)
        if is_graphed:
            with tg.fp8_autocast(recipe=DELAYED):
                tg.make_graphed_callables(model, (batches(device)[0].requires_grad_(), 1.0), on_mismatch="capture")
        for x in batches(device):
            with tg.fp8_autocast(recipe=DELAYED):
                y = checkpoint(model, x.requires_grad_(), 2.0, use_reentrant=True)
            y.square().mean().backward()
            found.append([y.detach(), x.grad, gradients_of(list(model.parameters()))])
    assert model.te_graph.info()["recaptures"] == 0
    assert_bitwise_equal(found[: len(found) // 2], found[len(found) // 2 :])


@recipes
def test_frozen_layers_run_eagerly_in_a_checkpoint_that_computes_them_again(
    device: str, recipe: object, caplog: pytest.LogCaptureFixture
) -> None:
    """Without gradients there is nothing to save, and the call looks like any other."""
    found = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        frozen, head = net(device).requires_grad_(False), nn.Linear(WIDTH, WIDTH).to(device)
        if is_graphed:
            with tg.fp8_autocast(recipe=recipe), caplog.at_level(logging.ERROR):
                tg.make_graphed_callables(frozen, (batches(device)[0],))
        for x in batches(device):
            with tg.fp8_autocast(recipe=recipe):
                y = checkpoint(lambda x, f=frozen, h=head: h(f(x)).tanh(), x, use_reentrant=False)
            with tg.fp8_autocast(recipe=recipe):
                frozen(x * 5)
            y.square().mean().backward()
            found.append([y.detach(), gradients_of(list(head.parameters()))])
    half = len(found) // 2
    assert_bitwise_equal(found[:half], found[half:])
    assert frozen.te_graph.info()["forward_replays"] == half
    said = [record.message for record in caplog.records if "activation checkpointing" in record.message]
    assert said == [
        "Sequential: called inside activation checkpointing, where FP8 layers take the scales of their first call "
        "when they are computed again (runs eagerly)"
    ]


def test_a_checkpoint_of_the_other_kind_around_a_call_is_refused_or_eager(device: str) -> None:
    def graph(nets: nn.ModuleList, x: Tensor) -> None:
        with tg.fp8_autocast(recipe=DELAYED):
            tg.make_graphed_callables(nets[0], (x.clone().requires_grad_(),), on_mismatch=on_mismatch)

    on_mismatch = "raise"
    with pytest.raises(RuntimeError, match=r"^Sequential: called inside activation checkpointing"):
        train(device, DELAYED, False, False, graph)
    on_mismatch = "eager"
    assert_bitwise_equal(train(device, DELAYED, False, False, graph), train(device, DELAYED, False, False))
