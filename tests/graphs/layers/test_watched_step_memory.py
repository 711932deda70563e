"""The step that graph_layers runs, where it changes memory without an operator: the model is afterwards as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from blocks import Block, InTurn, batch
from memory_changes import CHANGES, Held
from torch import nn

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")


def scales_the_gradient(held: Held) -> None:
    if held.linear.weight.grad is not None:
        held.linear.weight.grad.data = held.linear.weight.grad.data * 2


def adds_hooks_of_a_weight(held: Held) -> None:
    held.linear.weight.register_hook(lambda grad: grad * 2)
    held.linear.weight.register_post_accumulate_grad_hook(lambda weight: None)


@pytest.mark.parametrize("change", [*CHANGES, scales_the_gradient, adds_hooks_of_a_weight])
def test_what_its_forward_changes_is_put_back(device: str, change: Callable) -> None:
    held = Held(lambda held: None)
    model = InTurn(Block(), Block(), held).to(device)
    model(batch(device)).sum().backward()
    held.change = change
    before, gradient = held.state(), held.linear.weight.grad.clone()
    layers = tg.graph_layers(model, lambda: model(batch(device)).sum().backward(), layers=Block).layers
    assert layers == ("layers.0", "layers.1")
    assert_bitwise_equal(held.state(), before)
    assert_bitwise_equal(held.linear.weight.grad, gradient)


def test_weights_of_another_shape_take_their_gradients_back(device: str) -> None:
    held = Held(lambda held: None)
    model = InTurn(Block(), Block(), held).to(device)
    model(batch(device)).sum().backward()
    before = held.state()

    def changes_shape(held: Held) -> None:
        held.linear.weight.grad = None
        held.linear.weight.data = torch.cat([held.linear.weight.data] * 2)[:6, :6].clone()
        held.scale.data = held.scale.data[:1]

    held.change = changes_shape
    tg.graph_layers(model, lambda: model(batch(device)).sum().backward(), layers=Block)
    assert_bitwise_equal(held.state(), before)


def by_data(weight: nn.Parameter) -> None:
    weight.data = weight.data - 0.1 * weight.grad


def by_set(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.set_(weight - 0.1 * weight.grad)


@pytest.mark.parametrize(("update", "how"), [(by_data, r"tensor\.data = \.\.\."), (by_set, r"aten\.set_")])
def test_a_step_that_exchanges_weights_is_refused(device: str, update: Callable, how: str) -> None:
    model = InTurn(Block(), Block()).to(device)
    values = {name: value.clone() for name, value in model.state_dict().items()}

    def step() -> None:
        model(batch(device)).sum().backward()
        for parameter in model.parameters():
            update(parameter)

    with pytest.raises(RuntimeError, match=rf"the step changes first\.weight \({how}"):
        tg.graph_layers(model, step)
    assert_bitwise_equal(dict(model.state_dict()), values)
