"""te_graph.Linear: bit for bit what its single ops give, and close to a linear layer in float64."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
from typing import Any

import pytest
import torch
from fp8_references import E4M3, E5M2
from tensor_lists import same_bits
from torch import Tensor, nn
from torch.nn import functional as F

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
IN, OUT = 32, 48
CURRENT = tg.Float8CurrentScaling()
TOKENS = [0, 1, 2, 7, 8, 9, 15, 17, 100, 511]


def padded_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The cast of x [M, N], the transposed one [N, M rounded up to 16], scale_inv [1], sums of columns [N]."""
    rows = (len(x) + 15) // 16 * 16
    out, out_t = torch.zeros_like(x).to(dtype), torch.zeros(x.shape[1], rows, device=x.device).to(dtype)
    scale_inv, dbias = torch.zeros(1, device=x.device), torch.zeros_like(x[0]) if len(x) else x.new_zeros(x.shape[1])
    tg.fp8_cast_transpose_out(out, out_t, x, scale, scale_inv=scale_inv, dbias=dbias)
    return out, out_t, scale_inv, dbias


def reference(layer: nn.Linear, x: Tensor, grad: Tensor, dtype: torch.dtype) -> list[Tensor | None]:
    """y, and the gradients of x [M, IN], weight and bias, made of single ops under current scaling."""
    _, x_scale = tg.fp8_current_scale(x, E4M3)
    x8, x8_t, x_inv, _ = padded_cast(x, x_scale, E4M3)
    _, w_scale = tg.fp8_current_scale(layer.weight.detach(), E4M3)
    w8, w8_t, w_inv = tg.fp8_cast_transpose(layer.weight.detach(), w_scale, E4M3)
    _, g_scale = tg.fp8_current_scale(grad, E5M2)
    g8, g8_t, g_inv, dbias = padded_cast(grad, g_scale, E5M2)
    y = tg.fp8_gemm(x8, w8, x_inv, w_inv, dtype, bias=layer.bias, fast_accum=True)
    dx = tg.fp8_gemm(g8, w8_t, g_inv, w_inv, x.dtype)
    dw = tg.fp8_gemm(g8_t, x8_t, g_inv, x_inv, layer.weight.dtype)
    return [y, dx, dw, None if layer.bias is None else dbias.to(layer.bias.dtype)]


def run(layer: nn.Module, x: Tensor, grad: Tensor, recipe: object = CURRENT) -> list[Tensor | None]:
    """y, and the gradients of x [..., IN], weight and bias."""
    with tg.fp8_autocast(recipe=recipe):
        y = layer(x)
    leaves = [x, layer.weight, *([] if layer.bias is None else [layer.bias])]
    grads = torch.autograd.grad(y, leaves, grad)
    return [y.detach(), *grads, *([None] if layer.bias is None else [])]


def assert_all_same(actual: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or same_bits(one, other.view(one.shape))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_its_single_ops(device: str, tokens: int, bias: bool) -> None:
    layer = tg.Linear(IN, OUT, bias, device, torch.bfloat16)
    x = torch.randn(tokens, IN, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, OUT, device=device, dtype=torch.bfloat16)
    assert_all_same(run(layer, x, grad), reference(layer, x.detach(), grad, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_layer_is_close_to_one_in_float64(device: str, dtype: torch.dtype) -> None:
    layer = tg.Linear(256, 512, device=device, dtype=dtype)
    x = torch.randn(64, 256, device=device, dtype=dtype, requires_grad=True)
    grad = torch.randn(64, 512, device=device, dtype=dtype)
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    expected = [exact.detach(), *torch.autograd.grad(exact, (x, layer.weight, layer.bias), grad.double())]
    for actual, right in zip(run(layer, x, grad), expected, strict=True):
        assert actual.dtype == dtype
        # Three bits of mantissa in each operand of the forward: a term may be off by (1 + 1/17)**2 - 1 = 12 %; two in
        # gradients: by (1 + 1/17) * (1 + 1/9) - 1 = 18 %. Of random terms the errors go into all directions.
        assert (actual.double() - right.double()).norm() <= 0.09 * right.double().norm()


@pytest.mark.parametrize("shape", [(IN,), (1, IN), (2, 3, IN), (2, 0, IN), (2, 3, 5, IN)])
def test_inputs_have_any_number_of_dimensions(device: str, shape: tuple[int, ...]) -> None:
    layer = tg.Linear(IN, OUT, device=device, dtype=torch.bfloat16)
    x = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(*shape[:-1], OUT, device=device, dtype=torch.bfloat16)
    expected = reference(layer, x.detach().reshape(-1, IN), grad.reshape(-1, OUT), torch.bfloat16)
    actual = run(layer, x, grad)
    assert actual[0].shape == grad.shape
    assert actual[1].shape == x.shape
    assert_all_same(actual, expected)


def test_inputs_and_gradients_may_lie_apart(device: str) -> None:
    layer = tg.Linear(IN, OUT, device=device, dtype=torch.bfloat16)
    wide = torch.randn(IN, 2, 20, device=device, dtype=torch.bfloat16)
    x = wide.permute(2, 1, 0)[::2].requires_grad_()
    grad = torch.randn(OUT, 2, 10, device=device, dtype=torch.bfloat16).permute(2, 1, 0)
    expected = reference(layer, x.detach().reshape(-1, IN), grad.reshape(-1, OUT), torch.bfloat16)
    assert_all_same(run(layer, x, grad), expected)


def test_parameters_of_float32_under_autocast(device: str) -> None:
    """They are cast straight to FP8; the result is of autocast's dtype, gradients of their own tensors'."""
    layer = tg.Linear(IN, OUT, device=device)
    x = torch.randn(7, IN, device=device, requires_grad=True)
    grad = torch.randn(7, OUT, device=device, dtype=torch.bfloat16)
    with torch.autocast(device, torch.bfloat16):
        actual = run(layer, x, grad)
    assert [each.dtype for each in actual] == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
    assert_all_same(actual, reference(layer, x.detach(), grad, torch.bfloat16))


@pytest.mark.parametrize("recipe", [CURRENT, tg.DelayedScaling(amax_history_len=2)])
def test_outside_of_a_region_it_is_a_linear_layer(device: str, recipe: object) -> None:
    torch.manual_seed(3)
    layer = tg.Linear(IN, OUT, device=device, dtype=torch.bfloat16)
    torch.manual_seed(3)
    twin = nn.Linear(IN, OUT, device=device, dtype=torch.bfloat16)
    assert same_bits(layer.weight, twin.weight)
    assert same_bits(layer.bias, twin.bias)
    x = torch.randn(7, IN, device=device, dtype=torch.bfloat16)
    assert same_bits(layer(x), twin(x))
    with tg.fp8_autocast(recipe=recipe):
        assert not same_bits(layer(x), twin(x))
        with tg.fp8_autocast(enabled=False):
            assert same_bits(layer(x), twin(x))
    assert same_bits(layer(x), twin(x))


def saved_by(layer: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The result for x [n, IN], and what autograd saved."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return layer(x), saved


def test_frozen_parameters_and_inputs_cost_nothing(device: str) -> None:
    """Neither a transposed input nor a product is made for a gradient that nobody wants."""
    for needs_x, needs_weight in ((True, False), (False, True), (False, False)):
        layer = tg.Linear(IN, OUT, device=device, dtype=torch.bfloat16)
        layer.weight.requires_grad_(needs_weight)
        x = torch.randn(7, IN, device=device, dtype=torch.bfloat16, requires_grad=needs_x)
        with tg.fp8_autocast(recipe=CURRENT):
            y, saved = saved_by(layer, x)
        assert ((IN, 16) in [tuple(t.shape) for t in saved]) == needs_weight
        assert ((IN, OUT) in [tuple(t.shape) for t in saved]) == needs_x
        y.float().sum().backward()
        assert (x.grad is not None, layer.weight.grad is not None) == (needs_x, needs_weight)
        assert torch.equal(layer.bias.grad, torch.full_like(layer.bias, 7))


def test_misfits_compute_in_high_precision_and_say_so_once(device: str, caplog: Any) -> None:
    for inputs, outputs in ((20, 32), (32, 20), (1, 16), (1000, 8)):
        layer = tg.Linear(inputs, outputs, device=device, dtype=torch.bfloat16)
        x = torch.randn(5, inputs, device=device, dtype=torch.bfloat16)
        caplog.clear()
        with caplog.at_level(logging.WARNING), tg.fp8_autocast():
            for _ in range(3):
                assert same_bits(layer(x), F.linear(x, layer.weight, layer.bias))
        told = [record.getMessage() for record in caplog.records]
        assert [text for text in told if "has computed" not in text] == [
            f"te_graph.Linear({inputs}, {outputs}) computes in high precision: FP8 products want numbers of features "
            "that 16 divides"
        ]


def test_return_bias(device: str) -> None:
    layer = tg.Linear(IN, OUT, device=device, dtype=torch.bfloat16, return_bias=True)
    x = torch.randn(5, IN, device=device, dtype=torch.bfloat16)
    assert layer(x)[1] is layer.bias
    assert same_bits(layer(x)[0], F.linear(x, layer.weight))
    with tg.fp8_autocast(recipe=CURRENT):
        y, bias = layer(x)
    assert bias is layer.bias
    layer.bias, layer.return_bias = None, False
    with tg.fp8_autocast(recipe=CURRENT):
        assert same_bits(layer(x), y)


def test_bad_input_is_refused(device: str) -> None:
    with pytest.raises(TypeError, match="expected dtype or params_dtype, which mean the same, got both"):
        tg.Linear(16, 16, dtype=torch.bfloat16, params_dtype=torch.bfloat16)
    assert tg.Linear(16, 16, params_dtype=torch.bfloat16).weight.dtype == torch.bfloat16
    layer = tg.Linear(IN, OUT, device=device, dtype=torch.bfloat16)
    with tg.fp8_autocast(recipe=CURRENT):
        with pytest.raises(
            TypeError, match=r"expected an input of dtype torch.bfloat16, that of the weight, got torch.f"
        ):
            layer(torch.zeros(2, IN, device=device))
        with (
            torch.autocast(device, torch.float16),
            pytest.raises(ValueError, match=r"expected torch.autocast of torch.bfloat16 inside fp8_autocast"),
        ):
            layer(torch.zeros(2, IN, device=device, dtype=torch.bfloat16))
        with pytest.raises(ValueError, match=r"expected an input on .*, where the weight is, got meta"):
            layer(torch.zeros(2, IN, device="meta", dtype=torch.bfloat16))


@pytest.mark.parametrize("recipe", [CURRENT, tg.DelayedScaling(amax_history_len=2)])
@pytest.mark.parametrize("is_known", [False, True])
def test_an_input_of_other_features_is_refused_and_changes_nothing(device: str, recipe: object, is_known: bool) -> None:
    layer = tg.Linear(IN, OUT, device=device, dtype=torch.bfloat16)
    x = torch.randn(3, IN, device=device, dtype=torch.bfloat16)
    expected = copy.deepcopy(layer)
    for one in (expected, layer):
        with tg.fp8_autocast(recipe=recipe):
            if is_known:
                one(x)
            for wrong, got in ((x[:, :16], "16"), (x[0, 0], "a scalar"), (x[:, :0], "0")) if one is layer else ():
                with pytest.raises(
                    ValueError, match=f"^te_graph.Linear: expected an input of {IN} features, got {got}$"
                ):
                    one(wrong)
            one(x)
    assert same_bits(layer.get_extra_state(), expected.get_extra_state())


@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize("under", [contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_on_meta_tensors_shapes_are_those_of_a_linear_layer(is_converted: bool, under: Any, caplog: Any) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(IN, OUT) if is_converted else tg.Linear(IN, OUT))
        x = torch.randn(2, 3, IN, requires_grad=True)
    tg.convert_to_fp8(model, min_features=16)
    gc.collect()  # layers of other tests
    with under(), caplog.at_level("WARNING", "te_graph"), tg.fp8_autocast(recipe=tg.DelayedScaling(margin=5)):
        y, expected = model(x), F.linear(x, model[0].weight, model[0].bias)
        with torch.no_grad():
            assert model(x).shape == y.shape
    assert (y.shape, y.dtype, y.device) == (expected.shape, expected.dtype, expected.device)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert not caplog.records
    model.to_empty(device="cpu")
    model[0].reset_parameters()
    with tg.fp8_autocast(recipe=CURRENT):
        assert model(torch.randn(2, IN)).shape == (2, OUT)


TRANSFORMS = {
    "vmap": lambda layer, x: torch.func.vmap(layer)(x),
    "grad of x": lambda layer, x: torch.func.grad(lambda x: layer(x).sum())(x),
    "grad of weights": lambda layer, x: torch.func.grad(
        lambda parameters: torch.func.functional_call(layer, parameters, (x,)).sum()
    )(dict(layer.named_parameters())),
    "jacrev": lambda layer, x: torch.func.jacrev(layer)(x),
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("is_known", [False, True])
def test_transforms_around_it_are_refused_by_name(device: str, transform: Any, is_known: bool) -> None:
    layer, x = tg.Linear(IN, OUT, device=device), torch.randn(4, 2, IN, device=device)
    for context in (contextlib.nullcontext(), torch.no_grad()):
        with context, tg.fp8_autocast(recipe=CURRENT):
            if is_known:
                layer(x)
            with pytest.raises(RuntimeError, match=r"^te_graph.Linear: expected a call outside of the transforms of"):
                transform(layer, x)
        transform(layer, x)


def test_a_bias_may_have_gaps(device: str) -> None:
    layer, x = tg.Linear(IN, OUT, device=device), torch.randn(9, IN, device=device)
    found = []
    for bias in (torch.randn(OUT, 3, device=device)[:, 1], None):
        layer.bias = nn.Parameter(bias if bias is not None else layer.bias.detach().clone())
        for _ in range(2):
            with tg.fp8_autocast(recipe=CURRENT):
                y = layer(x)
            y.square().sum().backward()
        found.append([y.detach(), layer.bias.grad.contiguous()])
    assert_all_same(*found)


@pytest.mark.parametrize("recipe", [CURRENT, tg.DelayedScaling(amax_history_len=2)])
def test_a_weight_of_float64_is_refused_by_name(device: str, recipe: object) -> None:
    layer, x = tg.Linear(IN, OUT, device=device), torch.zeros(2, IN, device=device)
    for is_known in (False, True):
        with tg.fp8_autocast(recipe=recipe):
            if is_known:
                layer.float()(x)
            with pytest.raises(TypeError, match=r"expected a weight of float32, .* got torch.float64"):
                layer.double()(x.double())


@pytest.mark.parametrize("loss", [lambda y: y.sum(), lambda y: y.square().sum()], ids=["constant", "own"])
@pytest.mark.parametrize("of", ["input", "weight"])
def test_second_derivatives_are_refused_by_name(device: str, of: str, loss: Any) -> None:
    """With a constant gradient of y, too: what would be missing are the terms through the casts."""
    layer = tg.Linear(IN, OUT, device=device)
    x = torch.randn(9, IN, device=device, requires_grad=True)
    with tg.fp8_autocast(recipe=CURRENT):
        y = layer(x)
    (grad,) = torch.autograd.grad(loss(y), x if of == "input" else layer.weight, create_graph=True)
    with pytest.raises(RuntimeError, match="fp8_linear_backward is not implemented"):
        (y.sum() + grad.square().sum()).backward()


@pytest.mark.parametrize("recipe", [CURRENT, tg.DelayedScaling(amax_history_len=2)])
def test_a_backward_outlives_its_module(device: str, recipe: object) -> None:
    """Whose place is given to no other one before it is through."""
    results = []
    for is_kept in (True, False):
        torch.manual_seed(0)
        x = torch.randn(9, IN, device=device, requires_grad=True)
        with tg.fp8_autocast(recipe=recipe):
            layers = [tg.Linear(IN, OUT, device=device)]
            y = layers[0](x)
            if not is_kept:
                layers.clear()
            others = [tg.Linear(IN, OUT, device=device) for _ in range(3)]
            for other in others:
                with torch.no_grad():
                    other.weight.mul_(100)
                other(x)
        before = [other.get_extra_state() for other in others]
        y.square().sum().backward()
        assert all(same_bits(other.get_extra_state(), state) for other, state in zip(others, before, strict=True))
        results.append(x.grad)
    assert same_bits(*results)


def test_a_backward_may_run_twice(device: str) -> None:
    layer = tg.Linear(IN, OUT, device=device, dtype=torch.bfloat16)
    x = torch.randn(5, IN, device=device, dtype=torch.bfloat16, requires_grad=True)
    with tg.fp8_autocast(recipe=CURRENT):
        loss = layer(x).float().square().sum()
    first = torch.autograd.grad(loss, (x, layer.weight), retain_graph=True)
    assert all(map(same_bits, torch.autograd.grad(loss, (x, layer.weight)), first))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_weight_that_was_cast_again_is_not_used_for_an_older_forward(device: str) -> None:
    layer = tg.Linear(IN, OUT, device=device, dtype=torch.bfloat16)
    x = torch.randn(5, IN, device=device, dtype=torch.bfloat16, requires_grad=True)
    with tg.fp8_autocast(recipe=CURRENT):
        loss = layer(x).float().sum()
        with torch.no_grad():
            layer.weight.mul_(2)
            layer(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "change", ["in place", "assigned", "data", "data at the same place", "optimizer", "fused", "loaded"]
)
def test_changed_weights_are_cast_again(device: str, change: str) -> None:
    layer = tg.Linear(IN, OUT, device=device, dtype=torch.bfloat16)
    x = torch.randn(5, IN, device=device, dtype=torch.bfloat16, requires_grad=True)
    new, grad = torch.randn_like(layer.weight), torch.randn(5, OUT, device=device, dtype=torch.bfloat16)
    run(layer, x, grad)
    with torch.no_grad():
        if change == "in place":
            layer.weight.copy_(new)
        elif change == "assigned":
            layer.weight = nn.Parameter(new)
        elif change == "data":
            layer.weight.data = new
        elif change == "data at the same place":
            # As offloading may do: other memory, which an allocator gives to the same place, without a new version.
            place = layer.weight.data
            layer.weight.data = torch.from_dlpack(place)
            place.copy_(new)
        elif change == "loaded":
            layer.load_state_dict({"weight": new, "bias": layer.bias})
    if "optimizer" in change:
        layer.weight.grad = torch.randn_like(layer.weight)
        torch.optim.SGD([layer.weight], lr=0.5, fused=change != "optimizer").step()
    assert_all_same(run(layer, x, grad), reference(layer, x.detach(), grad, torch.bfloat16))


def test_torch_compile_around_it_breaks_the_graph_and_changes_nothing(device: str) -> None:
    layer = tg.Linear(IN, OUT, device=device, dtype=torch.bfloat16)
    x = torch.randn(5, IN, device=device, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(5, OUT, device=device, dtype=torch.bfloat16)
    expected = run(layer, x, grad)
    compiled = torch.compile(lambda y: layer(y), backend="aot_eager")
    with tg.fp8_autocast(recipe=CURRENT):
        y = compiled(x)
    assert_all_same([y.detach(), *torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)], expected)
