"""Calls of LayerNormLinear and LayerNormMLP: what stands in the place of their parts, whose memory gradients have,
shapes and strides, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fp8_fused_layers import CURRENT, HIDDEN, KINDS, WIDTH, a_layer, kinds, trained, width_of
from fp8_tensors import normal_numbers
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")


def test_no_tokens(device):
    for kind in KINDS:
        layer = a_layer(kind, device)
        x = normal_numbers(0, HIDDEN, device=device).requires_grad_()
        with tg.fp8_autocast(recipe=CURRENT):
            y = layer(x)
        y.sum().backward()
        assert y.shape == (0, width_of(layer)) and x.grad.shape == x.shape
        assert all(not parameter.grad.any() for parameter in layer.parameters())


def test_leading_dimensions_and_strides_of_the_input_do_not_matter(device):
    layer = a_layer("LayerNormMLP", device)
    x, residual = (normal_numbers(4, 6, HIDDEN, device=device) for _ in range(2))
    grads = [normal_numbers(24, HIDDEN, device=device) for _ in range(2)]
    expected = trained(layer, x.view(24, HIDDEN), residual.view(24, HIDDEN), grads)
    for move in (lambda t: t, lambda t: t.transpose(0, 1).contiguous().transpose(0, 1)):
        layer.zero_grad(set_to_none=True)
        got = trained(layer, move(x), move(residual), [move(grad.view(4, 6, HIDDEN)) for grad in grads])
        for name, one in got.items():
            assert same_bits(one.reshape(expected[name].shape).contiguous(), expected[name]), name


def test_hooks_and_other_layers_in_its_place_are_called(device):
    layer = a_layer("LayerNormMLP", device)
    x, seen = normal_numbers(16, HIDDEN, device=device), []
    with tg.fp8_autocast(recipe=CURRENT):
        fused = layer(x)
        handle = layer.fc2.register_forward_hook(lambda module, args, result: seen.append(result))
        assert (layer(x) - fused).abs().max() <= fused.abs().max() * 0.1 and len(seen) == 1
        handle.remove()
        layer.fc2 = nn.Identity()
        assert layer(x).shape == (16, WIDTH)
        layer.activation = nn.Tanh()
        assert layer(x).abs().max() <= 1
        layer.layer_norm = nn.Identity()
        y, total = layer(x, x)
        assert same_bits(total, x + x) and same_bits(y, torch.tanh(layer.fc1(x + x)))


class Doubled(type(tg.LayerNormLinear(16, 16).layer_norm)):
    """A norm of the user's."""

    def forward(self, x: Tensor, shard: Any = None) -> Tensor:  # [n, features] -> [n, features]
        return 2 * super().forward(x, shard)


def test_a_norm_of_the_users_is_called(device):
    layer = a_layer("LayerNormLinear", device, torch.float32)
    x = normal_numbers(16, HIDDEN, device=device, dtype=torch.float32)
    with tg.fp8_autocast(recipe=CURRENT):
        layer.layer_norm.__class__ = Doubled
        assert same_bits(layer(x), layer.linear(layer.layer_norm(x)))


@kinds
@pytest.mark.parametrize("graphed", [False, True])
def test_leaves_that_get_one_gradient_have_memory_of_their_own(kind, graphed, device):
    """x and the residual, whose ``.grad`` a second backward adds to."""
    layer = a_layer(kind, device)
    samples = [normal_numbers(16, HIDDEN, device=device) for _ in range(2)]
    grads = [normal_numbers(16, width, device=device) for width in (width_of(layer), HIDDEN)]
    once = trained(layer, *samples, grads)
    leaves = [one.clone().requires_grad_() for one in samples]
    with tg.fp8_autocast(recipe=CURRENT):
        if graphed:
            tg.make_graphed_callables(layer, tuple(one.clone().requires_grad_() for one in samples))
        for _ in range(2):
            torch.autograd.backward(layer(*leaves), grads)
    for leaf, name in zip(leaves, ("x", "residual"), strict=True):
        assert same_bits(leaf.grad, once[name] + once[name]), name
    assert leaves[0].grad.data_ptr() != leaves[1].grad.data_ptr()


@kinds
def test_the_sum_requires_a_gradient_where_what_is_added_does(kind, device):
    layer = a_layer(kind, device)
    for with_x, with_residual in itertools.product((False, True), (False, True)):
        leaves = [normal_numbers(16, HIDDEN, device=device).requires_grad_(needs) for needs in (with_x, with_residual)]
        with tg.fp8_autocast(recipe=CURRENT):
            y, total = layer(*leaves)
        assert y.requires_grad and total.requires_grad == (with_x or with_residual)
        y.sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [with_x, with_residual]


def test_the_sum_may_not_be_changed_before_the_backward(device):
    layer = a_layer("LayerNormLinear", device)
    x, residual = (normal_numbers(16, HIDDEN, device=device).requires_grad_() for _ in range(2))
    with tg.fp8_autocast(recipe=CURRENT):
        y, total = layer(x, residual)
    with torch.no_grad():
        total.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_second_backward_and_a_derivative_of_gradients_are_refused(device):
    layer = a_layer("LayerNormMLP", device, torch.float32)
    x = normal_numbers(16, HIDDEN, device=device, dtype=torch.float32).requires_grad_()
    with tg.fp8_autocast(recipe=CURRENT):
        y = layer(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    with tg.fp8_autocast(recipe=CURRENT):
        y = layer(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="is not implemented"):
        grad.sum().backward()


def test_hooks_of_parameters_get_their_gradients(device):
    layer = a_layer("LayerNormMLP", device)
    x = normal_numbers(16, HIDDEN, device=device)
    grads = [normal_numbers(16, HIDDEN, device=device)]
    expected = trained(layer, x, None, grads)
    layer.zero_grad(set_to_none=True)
    for parameter in layer.parameters():
        parameter.register_hook(lambda grad: grad * 2)
    got = trained(layer, x, None, grads)
    for name, _ in layer.named_parameters():
        assert same_bits(got[name], expected[name] * 2), name


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (
            lambda: tg.LayerNormLinear(32, 32, normalization="BatchNorm"),
            ValueError,
            "normalization to be 'LayerNorm' or",
        ),
        (lambda: tg.LayerNormMLP(32, 32, activation="tanh"), ValueError, "activation to be one of .*got 'tanh'"),
        (lambda: tg.LayerNormLinear(32, 32, parallel_mode="row"), ValueError, "parallel_mode 'column' or None"),
    ],
)
def test_arguments_that_do_not_fit_are_named(build, error, words):
    with pytest.raises(error, match=words):
        build()


def test_a_residual_that_does_not_fit_is_named(device):
    layer = a_layer("LayerNormLinear", device)
    x = normal_numbers(4, HIDDEN, device=device)
    with pytest.raises(ValueError, match=r"LayerNormLinear: expected a residual of shape \[4, 32\] .*got \[3, 32\]"):
        layer(x, x[:3])


def test_graph_layers_captures_no_parts(device):
    """Which would be called one by one, and round otherwise."""

    def train(is_graphed: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), tg.LayerNormMLP(HIDDEN, WIDTH))
        model = model.to(device, torch.bfloat16)
        x = normal_numbers(16, HIDDEN, device=device).bfloat16()

        def step() -> Tensor:
            with tg.fp8_autocast(recipe=CURRENT):
                loss = model(x).float().square().mean()
            loss.backward()
            return loss.detach()

        if is_graphed:
            with tg.fp8_autocast(recipe=CURRENT):
                tg.graph_layers(model, step)
            assert [name for name, module in model.named_modules() if hasattr(module, "te_graph")] == ["0", "1"]
            model.zero_grad()
        return [step(), *(parameter.grad for parameter in model.parameters())]

    for one, other in zip(train(False), train(True), strict=True):
        assert same_bits(one, other)


def test_a_part_that_is_chosen_is_refused_with_what_to_choose(device):
    model = nn.Sequential(tg.LayerNormMLP(HIDDEN, WIDTH)).to(device)
    x = normal_numbers(16, HIDDEN, device=device).float()
    with pytest.raises(RuntimeError, match=r"0\.fc1: 0, a LayerNormMLP, computes with it at once: choose that"):
        tg.graph_layers(model, lambda: model(x).sum().backward(), layers=["*.fc1"])
