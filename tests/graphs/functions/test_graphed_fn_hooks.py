"""Hooks on the gradients of parameters that come, go and come again between calls of a graphed function."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from te_graph import graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def on_gradient(weight: Tensor, factor: float) -> Any:  # [4]
    return weight.register_hook(lambda grad: grad * factor)


def behind_gradient(weight: Tensor, factor: float) -> Any:  # [4]
    def scale(leaf: Tensor) -> None:  # [4]
        leaf.grad.mul_(factor)

    return weight.register_post_accumulate_grad_hook(scale)


HOOKS: dict[str, Callable[[Tensor, float], Any]] = {"on": on_gradient, "behind": behind_gradient}


@pytest.mark.parametrize("first", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("then", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("phases", ["-x", "x-x", "-x-x", "xx-"])
@pytest.mark.one_of(4)
def test_hooks_that_come_and_go(device: str, first: Callable, then: Callable, phases: str) -> None:
    """Phases with a hook (x) and without (-), after one was there and was removed."""
    results = []
    for is_graphed in (False, True):
        weight = nn.Parameter(torch.ones(4, device=device))
        weight.grad = torch.zeros(4, device=device)
        x = torch.arange(4.0, device=device)

        def step(weight: Tensor = weight, x: Tensor = x) -> Tensor:
            weight.grad.zero_()
            (weight * x).sum().backward()
            return weight.grad * 1

        called, found = graphed(step) if is_graphed else step, []
        first(weight, 0.0).remove()
        for number, phase in enumerate(phases):
            hook = then(weight, number + 2.0) if phase == "x" else None
            found += [called().clone() for _ in range(4)]
            if hook is not None:
                hook.remove()
        results.append(found)
        assert not is_graphed or called.info()["forward_replays"] >= 2 * len(phases)
    assert_bitwise_equal(*results)


def test_the_seed_that_code_asks_for_is_that_of_the_generator(device: str) -> None:
    @graphed
    def drawn(x: Tensor) -> Tensor:  # [3] -> [3]
        first = np.random.RandomState(torch.initial_seed() % 2**31).rand()
        return x * first + torch.initial_seed() % 1000

    x = torch.ones(3, device=device)
    torch.manual_seed(1234)
    expected = drawn.__wrapped__(x)
    for _ in range(4):
        assert_bitwise_equal(drawn(x).clone(), expected)


def test_a_module_that_is_made_by_hand_finds_attributes_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("module_of_hooks")
    exec("H = 2.0\ndef scaled(x): return x * H\ndef __getattr__(name): raise KeyError(name)", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    scaled, x = graphed(module.scaled), torch.ones(3)
    for _ in range(3):
        assert scaled(x).tolist() == [2.0] * 3
    module.H = 3.0
    assert scaled(x).tolist() == [3.0] * 3
    assert scaled.info()["forward_replays"] == 2
