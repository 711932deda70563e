"""The step that graph_layers runs, where it changes memory without an operator: the model is afterwards as it was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from blocks import Block, InTurn, batch
from memory_changes import CHANGES, Held
from torch import Tensor, nn

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")


def scales_the_gradient(held: Held) -> None:
    if held.linear.weight.grad is not None:
        held.linear.weight.grad.data = held.linear.weight.grad.data * 2


@pytest.mark.parametrize("change", [*CHANGES, scales_the_gradient])
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


def test_what_a_plan_writes_is_put_back_and_weights_are_left_to_the_training(device: str) -> None:
    held = Held(lambda held: None)
    model = InTurn(Block(), Block(), held).to(device)
    before, half = held.state(), torch.full((), 0.5, device=device)
    plan = tg.MultiTensorPlan([held.scale])
    held.change = lambda held: plan.scale_(half)
    tg.graph_layers(model, lambda: model(batch(device)).sum().backward(), layers=Block)
    assert_bitwise_equal(held.state(), before)

    weights = tg.MultiTensorPlan([*model.parameters()])

    def step() -> None:
        model(batch(device)).sum().backward()
        with torch.no_grad():
            weights.scale_(half)

    with pytest.raises(RuntimeError, match=r"the step changes first\.weight \(MultiTensorPlan"):
        tg.graph_layers(model, step)
    assert_bitwise_equal(held.state()[1:], before[1:])


class Clipped:
    """A training beside the model, which puts hooks on parameters in its first step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.is_ready = model, False

    def loss(self, x: Tensor) -> Tensor:  # [n, WIDTH] -> []
        if not self.is_ready:
            for parameter in self.model.parameters():
                parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
            self.is_ready = True
        return self.model(x).sum()


def test_hooks_that_a_training_puts_on_parameters_in_its_first_step_stay(device: str) -> None:
    gradients = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model = InTurn(Block(), Block()).to(device)
        training, x = Clipped(model), batch(device)
        if is_graphed:
            tg.graph_layers(model, lambda training=training, x=x: training.loss(x).backward(), layers=Block)
        training.loss(x).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert_bitwise_equal(*gradients)


def test_a_step_that_moves_a_model_to_where_it_is_changes_nothing(device: str) -> None:
    model = InTurn(Block(), Block()).to(device)

    def step() -> None:
        model.to(device).float()
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        model(batch(device)).sum().backward()

    assert tg.graph_layers(model, step, layers=Block).layers == ("layers.0", "layers.1")


def test_nested_tensors_in_a_model_are_left_alone(device: str) -> None:
    model = InTurn(Block(), Block()).to(device)
    model.register_buffer("ragged", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).to(device))
    layers = tg.graph_layers(model, lambda: model(batch(device)).sum().backward(), layers=Block).layers
    assert layers == ("layers.0", "layers.1")
