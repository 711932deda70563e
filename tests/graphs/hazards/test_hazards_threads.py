"""Hazards of threads that share a graphed callable, or its weights, with others.

The reference is eager execution of a copy of the same module, on the same inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from hazards import batch
from torch import Tensor, nn
from twins import eager_copy

from te_graph import make_graphed_callables
from te_graph.testing import same_bits

pytestmark = pytest.mark.usefixtures("repeatable")


def on_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def input_gradient(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """That of an input which is no leaf, x [n, 4]."""
    hidden = x.detach().requires_grad_() * 2
    return torch.autograd.grad(call(hidden).square().sum(), hidden)[0]


def test_a_gradient_that_another_thread_may_read_stays_where_it_is(device: str) -> None:
    """An operation may just read it, at an address that it has taken."""
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device, requires_grad=True),), max_in_flight=2)
    inputs = [batch(device, requires_grad=False) for _ in range(4)]
    input_gradient(model, inputs[0])
    on_thread(lambda: input_gradient(model, inputs[0]))
    kept = [input_gradient(model, x) for x in inputs]
    assert len({gradient.data_ptr() for gradient in kept}) == len(inputs)
    addresses = [gradient.data_ptr() for gradient in kept]
    on_thread(lambda: input_gradient(model, inputs[0]))
    assert [gradient.data_ptr() for gradient in kept] == addresses
    assert all(same_bits(gradient, input_gradient(twin, x)) for gradient, x in zip(kept, inputs, strict=True))


class Waiting(nn.Linear):
    """Its forward tells that it runs, and waits until it may go on."""

    def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        RUNS.set()
        MAY_GO_ON.wait(20)
        return super().forward(x)


RUNS, MAY_GO_ON = threading.Event(), threading.Event()


def test_a_hook_that_another_thread_puts_on_a_weight_during_a_capture_lives(device: str) -> None:
    captured, other = Waiting(4, 4).to(device), nn.Linear(4, 4).to(device)
    other.weight = captured.weight
    RUNS.clear()
    MAY_GO_ON.clear()

    def put() -> None:
        RUNS.wait(20)
        other.weight.register_hook(lambda gradient: gradient * 2)
        MAY_GO_ON.set()

    thread = threading.Thread(target=put)
    thread.start()
    make_graphed_callables(captured, (batch(device, requires_grad=False),))
    thread.join()
    x = batch(device, requires_grad=False)
    for module in (other, captured):
        module.weight.grad = None
        module(x).sum().backward()
        assert same_bits(module.weight.grad, 2 * x.sum(0).expand(4, 4))
