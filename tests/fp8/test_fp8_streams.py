"""Two scopes that run at once, on two streams: neither sees the other's workspaces, tables or casts."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("repeatable")]
ROUNDS, TOKENS, FEATURES = 1000, 4096, 64  # long sums of few tiles: cuBLASLt splits them, in a workspace
RECIPES = [tg.DelayedScaling(amax_history_len=3), tg.Float8CurrentScaling()]


class Training:
    """Of one layer by one recipe, the inputs [2, TOKENS, FEATURES] by turns; the layer's weight moves each round."""

    def __init__(self, number: int, is_graphed: bool) -> None:
        torch.manual_seed(number)
        self.recipe = RECIPES[number]
        self.layer: nn.Module = tg.Linear(FEATURES, FEATURES, device="cuda", dtype=torch.bfloat16)
        self.inputs = torch.randn(2, TOKENS, FEATURES, device="cuda", dtype=torch.bfloat16)
        self.results: list[Tensor] = []
        if is_graphed:
            with tg.fp8_autocast(recipe=self.recipe):
                self.layer(self.inputs[0])
                tg.make_graphed_callables(self.layer, (self.inputs[0],))

    def round(self, number: int) -> None:
        weight = self.layer.weight
        with tg.fp8_autocast(recipe=self.recipe):
            y = self.layer(self.inputs[number % 2])
        y.sum().backward()
        self.results += [y[:2].detach().clone(), weight.grad.clone(), self.layer.bias.grad.clone()]
        with torch.no_grad():
            weight.sub_(weight.grad, alpha=1e-6)
        self.layer.zero_grad()


def results(streams: list[Any], is_graphed: bool) -> list[list[Tensor]]:
    """Of both trainings, each on its stream."""
    trainings = [Training(number, is_graphed) for number in range(2)]
    torch.cuda.synchronize()
    for number in range(ROUNDS):
        for training, stream in zip(trainings, streams, strict=True):
            with stream:
                training.round(number)
    torch.cuda.synchronize()
    return [training.results for training in trainings]


@pytest.mark.parametrize("is_graphed", [False, True])
def test_they_have_the_bits_of_one_after_the_other(is_graphed: bool) -> None:
    expected = results([contextlib.nullcontext()] * 2, is_graphed)
    found = results([torch.cuda.stream(torch.cuda.Stream()) for _ in range(2)], is_graphed)
    for own, alone in zip(found, expected, strict=True):
        assert len(own) == 3 * ROUNDS
        assert all(map(same_bits, own, alone))
    assert not same_bits(expected[0][1], expected[0][-2])  # gradients differ from round to round
