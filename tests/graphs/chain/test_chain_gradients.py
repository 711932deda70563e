"""chain=True: gradients of parameters are what eager execution leaves, though several backwards are one launch.

The reference is eager execution of copies of the same layers on the same inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from chain_layers import Layer, Nets, Shift, batch, forward_and_backward, layers_on, parameters_of
from chains import assert_same, assert_same_steps, chain, eager_calls
from torch import Tensor, nn
from twins import leaf_copy

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def kept_gradients(nets: Nets) -> Iterator[None]:
    """What users do with gradients between backwards, one thing after the other."""
    yield
    kept = [parameter.grad for parameter in parameters_of(nets)]
    for parameter in parameters_of(nets):
        parameter.grad = None
    yield
    for parameter in parameters_of(nets)[::2]:
        parameter.grad = None
    yield
    for parameter in parameters_of(nets):
        parameter.grad = torch.full_like(parameter, 3)
    yield
    for net in nets:
        net.zero_grad(set_to_none=False)
    yield
    sizes = [parameter.numel() for parameter in parameters_of(nets)]
    flat = torch.zeros(sum(sizes), device=parameters_of(nets)[0].device)
    for parameter, part in zip(parameters_of(nets), flat.split(sizes), strict=True):
        parameter.grad = part.view_as(parameter)
    yield
    for parameter in parameters_of(nets):
        parameter.grad = torch.ones_like(parameter).t().contiguous().t() if parameter.dim() == 2 else None
    yield
    for before in kept:
        before.add_(1)
    yield


def test_gradients_that_are_none_kept_or_replaced_between_launches_are_right(device):
    layers = layers_on(device, *[Layer] * 4)
    twins = chain(layers, batch(device))
    between = zip(kept_gradients(layers), kept_gradients(twins), strict=True)
    for _ in between:
        for _ in range(4):
            assert_same(layers, twins, forward_and_backward, batch(device))
    assert eager_calls(layers) == [0] * 4


def test_gradients_in_fp32_beside_bfloat16_parameters_are_right(device):
    layers = [layer.to(torch.bfloat16) for layer in layers_on(device)]
    x = batch(device).detach().to(torch.bfloat16).requires_grad_()
    twins = chain(layers, x, grad_dtype=torch.float32)
    expected: dict[int, Tensor] = {}
    for _ in range(4):
        x = torch.randn_like(x, requires_grad=True)
        leaf = leaf_copy(x)
        forward_and_backward(layers, x)
        forward_and_backward(twins, leaf)
        assert_bitwise_equal(x.grad, leaf.grad)
        for number, parameter in enumerate(parameters_of(twins)):
            expected[number] = expected.get(number, 0) + parameter.grad.float()
            parameter.grad = None
    assert_bitwise_equal([p.main_grad for p in parameters_of(layers)], list(expected.values()))
    assert all(p.grad is None for p in parameters_of(layers))


@pytest.mark.parametrize("which", ["one", "all"])
@pytest.mark.parametrize("kind", ["autograd_params", "tensor hook", "post-accumulate hook", "accumulate_grads"])
def test_parameters_whose_gradients_go_through_autograd_are_right(device, kind, which):
    layers = layers_on(device, *[Layer] * 4)
    chosen = [layers[1].up.weight, layers[1].down.bias] if which == "one" else parameters_of(layers)
    options: dict[str, Any] = {
        "autograd_params": {"autograd_params": chosen},
        "accumulate_grads": {"accumulate_grads": False},
    }.get(kind, {})
    twins = chain(layers, batch(device), **options)
    seen: dict[bool, list[tuple[int, Tensor]]] = {True: [], False: []}
    for nets in (layers, twins):
        for number, (parameter, own) in enumerate(zip(parameters_of(nets), parameters_of(layers), strict=True)):
            if any(own is one for one in chosen) and kind == "tensor hook":
                parameter.register_hook(
                    lambda grad, to=seen[nets is layers], number=number: to.append((number, grad.clone())) or grad * 2
                )
            elif any(own is one for one in chosen) and kind == "post-accumulate hook":
                parameter.register_post_accumulate_grad_hook(
                    lambda p, to=seen[nets is layers], number=number: to.append((number, p.grad.clone()))
                )
    for _ in range(2):
        assert_same_steps(layers, twins, forward_and_backward, device)
    for ours, eager in zip(*(sorted(seen[side], key=lambda entry: entry[0]) for side in (True, False)), strict=True):
        assert_bitwise_equal(ours, eager)
    assert bool(seen[True]) is kind.endswith("hook")
    assert eager_calls(layers) == [0] * 4


def test_hooks_of_parameters_run_from_the_last_layer_to_the_first_as_in_eager_execution(device):
    layers = layers_on(device, *[Shift] * 5)
    twins = chain(layers, batch(device))
    orders = []
    for nets in (twins, layers):
        order: list[int] = []
        for number, net in enumerate(nets):
            net.shift.register_hook(lambda grad, order=order, number=number: order.append(number))
        forward_and_backward(nets, batch(device))
        orders.append(order)
    assert orders[1] == orders[0] == [4, 3, 2, 1, 0]


class ReadsTwice(nn.Module):
    """Its backward reads the gradient again after it has made others of that size."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() + x.cos() * 3


class Bias(nn.Module):
    """Passes the gradient of its result on as that of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


@pytest.mark.parametrize("called", [4, 3, 1])
@pytest.mark.parametrize("passing", [1, 2])
def test_a_layer_that_passes_its_gradient_on_lends_memory_that_no_later_capture_gets(device, passing, called):
    """Its gradient lies in that of the layers behind it, and the layer before it reads it there."""
    layers = [ReadsTwice(), *[Bias().to(device) for _ in range(passing)], ReadsTwice()]
    twins = copy.deepcopy(layers)
    tg.make_graphed_callables(tuple(layers), (torch.randn(8, 16, device=device, requires_grad=True),), chain=True)
    for _ in range(3):
        inputs = [torch.randn(8, 16, device=device).requires_grad_() for _ in range(2)]
        inputs[1].data.copy_(inputs[0])
        for nets, x in zip((layers, twins), inputs, strict=True):
            y = x
            for net in nets[:called]:
                y = net(y)
            (y * y).sum().backward()
        assert_bitwise_equal(inputs[0].grad, inputs[1].grad)
        assert_bitwise_equal(
            *([net.bias.grad for net in nets[1:called] if isinstance(net, Bias)] for nets in (layers, twins))
        )
