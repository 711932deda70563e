"""chain=True: gradients of parameters are what eager execution leaves, though several backwards are one launch.

The reference is eager execution of copies of the same layers on the same inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from chain_layers import Layer, Nets, Shift, batch, forward_and_backward, layers_on, parameters_of
from chains import assert_same, assert_same_steps, chain, eager_calls
from torch import Tensor
from twins import assert_bitwise_equal, leaf_copy

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
