"""LayerNormLinear and LayerNormMLP: bit for bit what their single ops give, graphed what they give eagerly."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from fp8_fused_layers import (
    CURRENT,
    HIDDEN,
    KINDS,
    WIDTH,
    a_layer,
    assert_same,
    kinds,
    trained,
    width_of,
)
from fp8_references import E4M3, E5M2
from fp8_tensors import normal_numbers
from tensor_lists import all_same_bits, same_bits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
ops = torch.ops.te_graph
DELAYED = tg.DelayedScaling(amax_history_len=4)
recipes = pytest.mark.parametrize("recipe", [CURRENT, DELAYED], ids=["current", "delayed"])


def full(value: Any) -> Any:
    """A parameter that is left to the long run."""
    return pytest.param(value, marks=pytest.mark.full)


class Operand:
    """The cast of x [M, N] by current scaling, as a linear layer makes it."""

    def __init__(self, x: Tensor, dtype: torch.dtype) -> None:
        _, scale = tg.fp8_current_scale(x, dtype)
        self.data = torch.zeros_like(x).to(dtype)
        self.transposed = torch.zeros(x.shape[1], -(-len(x) // 16) * 16, device=x.device).to(dtype)
        self.scale_inv, self.sums = torch.zeros(1, device=x.device), torch.zeros_like(x[0])
        tg.fp8_cast_transpose_out(self.data, self.transposed, x, scale, scale_inv=self.scale_inv, dbias=self.sums)


class Weight:
    def __init__(self, weight: Tensor) -> None:
        _, scale = tg.fp8_current_scale(weight.detach(), E4M3)
        self.data, self.transposed, self.scale_inv = tg.fp8_cast_transpose(weight.detach(), scale, E4M3)


def by_single_ops(layer: nn.Module, x: Tensor, residual: Tensor | None, grads: list[Tensor]) -> dict[str, Tensor]:
    """y, the sum, and all gradients under current scaling; ``grads``: of y [M, out] and of the sum [M, HIDDEN]."""
    norm = layer.layer_norm
    linears = [layer.linear] if isinstance(layer, tg.LayerNormLinear) else [layer.fc1, layer.fc2]
    weights = [Weight(linear.weight) for linear in linears]
    rms, zero_centered = norm.normalization == "RMSNorm", norm.zero_centered_gamma
    dtype = x.dtype
    with torch.no_grad():
        x8, x8_t, x_inv, s, mean, rstd = ops.fp8_layer_norm_cast_transpose(
            x, residual, norm.weight, norm.bias, norm.eps, E4M3, rms_norm=rms, zero_centered=zero_centered
        )
        inputs = [(x8_t, x_inv)]
        y = tg.fp8_gemm(x8, weights[0].data, x_inv, weights[0].scale_inv, dtype, bias=linears[0].bias, fast_accum=True)
        results = {}
        if len(linears) == 2:
            h, name, gated = y, layer.activation._op, layer.activation.is_gated
            a8, a8_t, a_inv = ops.fp8_activation_cast_transpose(h, name, E4M3, gated=gated)
            inputs.append((a8_t, a_inv))
            y = tg.fp8_gemm(
                a8, weights[1].data, a_inv, weights[1].scale_inv, dtype, bias=linears[1].bias, fast_accum=True
            )
        cast = Operand(grads[0], E5M2)
        g8, g8_t, g_inv, sums = cast.data, cast.transposed, cast.scale_inv, cast.sums
        for i in reversed(range(len(linears))):
            name_of = "linear" if len(linears) == 1 else f"fc{i + 1}"
            results[f"{name_of}.weight"] = tg.fp8_gemm(g8_t, inputs[i][0], g_inv, inputs[i][1], dtype)
            if linears[i].bias is not None:
                results[f"{name_of}.bias"] = sums
            below = tg.fp8_gemm(g8, weights[i].transposed, g_inv, weights[i].scale_inv, dtype)
            if i == 1:
                g8, g8_t, g_inv, sums = ops.fp8_activation_backward_cast_transpose(below, h, name, E5M2, gated=gated)
        grad_x, _, _, _, grad_weight, grad_bias, _ = ops.fp8_layer_norm_backward(
            below,
            None if residual is None else grads[1],
            x if residual is None else s,
            norm.weight,
            None if rms else mean,
            rstd,
            zero_centered=zero_centered,
        )
        results["layer_norm.weight"] = grad_weight
        if norm.bias is not None:
            results["layer_norm.bias"] = grad_bias
    results |= {"y": y, "x": grad_x}
    return results | ({} if residual is None else {"sum": s, "residual": grad_x})


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 7, 16, 130])
@pytest.mark.parametrize("with_residual", [False, True], ids=["", "residual"])
def test_all_bits_are_those_of_the_single_ops(kind, dtype, tokens, with_residual, device):
    layer = a_layer(kind, device, dtype)
    x = normal_numbers(tokens, HIDDEN, device=device, dtype=dtype)
    residual = normal_numbers(tokens, HIDDEN, device=device, dtype=dtype) if with_residual else None
    grads = [normal_numbers(tokens, width, device=device, dtype=dtype) for width in (width_of(layer), HIDDEN)]
    expected = by_single_ops(layer, x, residual, grads)
    assert_same(trained(layer, x, residual, grads), expected)
    again = trained(layer, x, residual, grads)  # is added to the gradients of the parameters
    for name, parameter in layer.named_parameters():
        assert same_bits(again[name], expected[name] + expected[name]), name
        assert again[name] is parameter.grad


@kinds
@recipes
def test_results_are_close_to_those_without_fp8(kind, recipe, device):
    layer = a_layer(kind, device, torch.float32)
    x, residual = (normal_numbers(64, HIDDEN, device=device, dtype=torch.float32) for _ in range(2))
    grads = [normal_numbers(64, width, device=device, dtype=torch.float32) for width in (width_of(layer), HIDDEN)]
    plain = copy.deepcopy(layer)
    for _ in range(2):  # under delayed scaling the first step has scales of 1
        plain.zero_grad()
        layer.zero_grad()
        with tg.fp8_autocast(enabled=False):
            expected = trained_without(plain, x, residual, grads)
        got = trained(layer, x, residual, grads, recipe)
    for name, exact in expected.items():
        error = (got[name] - exact).norm() / exact.norm()
        assert error < (1e-6 if name == "sum" else 0.3), (name, error)  # casts also move what relu cuts off


def trained_without(layer: nn.Module, x: Tensor, residual: Tensor, grads: list[Tensor]) -> dict[str, Tensor]:
    """As ``trained`` gives it, in plain PyTorch."""
    x, residual = (one.detach().requires_grad_() for one in (x, residual))
    total, norm = x + residual, layer.layer_norm
    gain = norm.weight + 1 if norm.zero_centered_gamma else norm.weight
    if norm.normalization == "RMSNorm":
        h = F.rms_norm(total, (HIDDEN,), gain, norm.eps)
    else:
        h = F.layer_norm(total, (HIDDEN,), gain, norm.bias, norm.eps)
    if isinstance(layer, tg.LayerNormLinear):
        y = F.linear(h, layer.linear.weight, layer.linear.bias)
    else:
        h = F.linear(h, layer.fc1.weight, layer.fc1.bias)
        if layer.activation.name == "swiglu":
            gate, up = h.chunk(2, dim=1)
            h = F.silu(gate) * up
        else:
            h = F.relu(h) if layer.activation.name == "relu" else F.gelu(h, approximate="tanh")
        y = F.linear(h, layer.fc2.weight, layer.fc2.bias)
    torch.autograd.backward((y, total), grads)
    found = {"y": y.detach(), "sum": total.detach(), "x": x.grad, "residual": residual.grad}
    return found | {name: p.grad for name, p in layer.named_parameters()}


def test_activations_are_those_of_torch_outside_of_regions(device):
    x = normal_numbers(5, HIDDEN, device=device, dtype=torch.float32)
    functions = {
        "gelu": lambda t: F.gelu(t, approximate="tanh"),
        "gelu_erf": F.gelu,
        "relu": F.relu,
        "silu": F.silu,
        "geglu": lambda t: F.gelu(t[:, :WIDTH], approximate="tanh") * t[:, WIDTH:],
        "geglu_erf": lambda t: F.gelu(t[:, :WIDTH]) * t[:, WIDTH:],
        "reglu": lambda t: F.relu(t[:, :WIDTH]) * t[:, WIDTH:],
        "swiglu": lambda t: F.silu(t[:, :WIDTH]) * t[:, WIDTH:],
    }
    for name, function in functions.items():
        layer = tg.LayerNormMLP(HIDDEN, WIDTH, activation=name, device=device)
        h = F.layer_norm(x, (HIDDEN,), layer.layer_norm.weight, layer.layer_norm.bias, 1e-5)
        expected = layer.fc2(function(layer.fc1(h)))
        assert same_bits(layer(x), expected), name


@kinds
@recipes
@pytest.mark.parametrize("microbatches", [full(1), 2, full(4), full(8)])
def test_graphed_trainings_have_the_bits_of_eager_ones(kind, recipe, microbatches, device):
    eager = a_layer(kind, device)
    graphed = copy.deepcopy(eager)
    x, residual = (normal_numbers(16, HIDDEN, device=device).requires_grad_() for _ in range(2))
    with tg.fp8_autocast(recipe=recipe):
        for layer in (eager, graphed):
            layer(x, residual)[0].sum().backward()
            layer.zero_grad(set_to_none=True)
        tg.make_graphed_callables(graphed, (x.detach().requires_grad_(), residual.detach().requires_grad_()))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (eager, graphed)]
    for _ in range(3):
        batches = [[normal_numbers(16, HIDDEN, device=device) for _ in range(2)] for _ in range(microbatches)]
        results = []
        for layer, optimizer in zip((eager, graphed), optimizers, strict=True):
            found = []
            for batch in batches:
                leaves = [one.clone().requires_grad_() for one in batch]
                with tg.fp8_autocast(recipe=recipe):
                    y, total = layer(*leaves)
                (y.square().sum() + total.sum()).backward()
                found += [y.detach().clone(), total.detach().clone(), *(leaf.grad for leaf in leaves)]
            found += [parameter.grad.clone() for parameter in layer.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            results.append(found + [parameter.detach().clone() for parameter in layer.parameters()])
        assert all_same_bits(*results)
    assert graphed.te_graph.info()["forward_replays"] == 3 * microbatches


@kinds
@recipes
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_change_no_bit(kind, recipe, use_reentrant, device):
    plain = a_layer(kind, device)
    checkpointed = copy.deepcopy(plain)
    for _ in range(3):
        batch = [normal_numbers(16, HIDDEN, device=device) for _ in range(2)]
        results = []
        for layer in (plain, checkpointed):
            leaves = [one.clone().requires_grad_() for one in batch]
            with tg.fp8_autocast(recipe=recipe):
                if layer is plain:
                    y, total = layer(*leaves)
                else:
                    y, total = checkpoint(layer, *leaves, use_reentrant=use_reentrant)
            (y.square().sum() + total.sum()).backward()
            results.append([y.detach(), total.detach(), *(leaf.grad for leaf in leaves)])
            results[-1] += [parameter.grad.clone() for parameter in layer.parameters()]
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter -= 0.1 * parameter.grad
        assert all_same_bits(*results)


@kinds
def test_any_part_may_be_frozen(kind, device):
    layer = a_layer(kind, device)
    names = [name for name, _ in layer.named_parameters()]
    x, residual = (normal_numbers(16, HIDDEN, device=device) for _ in range(2))
    grads = [normal_numbers(16, width, device=device) for width in (width_of(layer), HIDDEN)]
    expected = trained(layer, x, residual, grads)
    choices = [[], names, *([name] for name in names), *itertools.combinations(names, 2)]
    for trains, with_x, with_residual in itertools.product(choices, (False, True), (False, True)):
        layer.zero_grad(set_to_none=True)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name in trains)
        leaves = [x.clone().requires_grad_(with_x), residual.clone().requires_grad_(with_residual)]
        with tg.fp8_autocast(recipe=CURRENT):
            y, total = layer(*leaves)
        assert same_bits(y.detach(), expected["y"]) and same_bits(total.detach(), expected["sum"])
        wanted = {name for name in trains} | ({"x"} if with_x else set()) | ({"residual"} if with_residual else set())
        assert y.requires_grad == bool(wanted)
        if not wanted:
            continue
        torch.autograd.backward(
            [one for one in (y, total) if one.requires_grad],
            [grad for one, grad in zip((y, total), grads, strict=True) if one.requires_grad],
        )
        got = {name: p.grad for name, p in layer.named_parameters()} | {"x": leaves[0].grad, "residual": leaves[1].grad}
        assert {name for name, grad in got.items() if grad is not None} == wanted
        for name in wanted:
            assert same_bits(got[name], expected[name]), (name, wanted)


@kinds
def test_only_one_of_the_results_may_get_a_gradient(kind, device):
    layer = a_layer(kind, device)
    x, residual = (normal_numbers(16, HIDDEN, device=device) for _ in range(2))
    grads = [normal_numbers(16, width, device=device) for width in (width_of(layer), HIDDEN)]
    zeros = [torch.zeros_like(grad) for grad in grads]
    for which in (0, 1):
        layer.zero_grad(set_to_none=True)
        expected = trained(layer, x, residual, [grads[i] if i == which else zeros[i] for i in (0, 1)])
        layer.zero_grad(set_to_none=True)
        leaves = [one.clone().requires_grad_() for one in (x, residual)]
        with tg.fp8_autocast(recipe=CURRENT):
            results = layer(*leaves)
        results[which].backward(grads[which])
        got = {name: p.grad for name, p in layer.named_parameters()} | {"x": leaves[0].grad, "residual": leaves[1].grad}
        for name, grad in got.items():
            assert torch.equal(grad, expected[name]), name  # but for the sign of zeros


def test_evaluations_have_the_same_numbers_and_leave_no_trace(device):
    for kind, recipe in itertools.product(KINDS, (CURRENT, DELAYED)):
        layer = a_layer(kind, device)
        x = normal_numbers(16, HIDDEN, device=device)
        with tg.fp8_autocast(recipe=recipe):
            y = layer(x)
            y.sum().backward()
        state = tg.fp8_state_dict(layer)
        with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
            first, second = layer(x), layer(x)
        assert same_bits(first, second) and not first.requires_grad
        if recipe is CURRENT:
            assert same_bits(first, y.detach())
        assert all(same_bits(one, state[name]) for name, one in tg.fp8_state_dict(layer).items())
