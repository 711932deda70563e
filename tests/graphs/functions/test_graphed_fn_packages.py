"""Functions that get hold of objects of packages whose classes lead to thousands of functions that never run."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")


def a_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="what ran is known by sys.monitoring")
def test_clip_and_step_of_a_hugging_face_model_are_replayed() -> None:
    model = a_model()
    twin = copy.deepcopy(model)
    steps = []
    for one in (model, twin):
        optimizer = torch.optim.AdamW(one.parameters(), lr=torch.tensor(0.1), fused=True)

        def step(one: nn.Module = one, optimizer: torch.optim.Optimizer = optimizer) -> None:
            torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        steps.append(step)
        for parameter in one.parameters():
            parameter.grad = torch.zeros_like(parameter)
    graphed = tg.graphed(steps[0])
    for number in range(6):
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            parameter.grad.copy_(torch.randn(parameter.shape))
            other.grad.copy_(parameter.grad)
        graphed()
        steps[1]()
        assert all(map(torch.equal, model.parameters(), twin.parameters())), number
    assert graphed.info()["forward_replays"] >= 3


class Settings:
    """Has a method that a context manager decorates: an object with a generator that nothing uses up."""

    gain = 2.0

    @contextlib.contextmanager
    @staticmethod
    def _noted() -> Iterator[None]:
        yield

    @_noted()
    def scaled(self, x: Tensor) -> Tensor:  # [n] -> [n]
        return x * self.gain


def test_a_method_that_a_context_manager_decorates_is_replayed() -> None:
    settings, x = Settings(), torch.ones(3)
    function = tg.graphed(lambda x: settings.scaled(x))
    for _ in range(4):
        assert torch.equal(function(x), x * 2)
    assert function.info()["forward_replays"] >= 2
    settings.gain = 3.0
    assert torch.equal(function(x), x * 3)
