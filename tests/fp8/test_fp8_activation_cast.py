"""Activations that are cast to FP8 where they are made, and their derivatives.

Against torch's activations, whose results are cast by ``fp8_cast_transpose``. On a GPU the bits are the same. On the
CPU those of relu are; of the others the cast lies between the casts of bounds of what fp64 says.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fp8_references import E4M3, E5M2, FP8_DTYPES, FP8_NAN, reference_cast
from fp8_tensors import (
    X_DTYPES,
    Poisoned,
    a_scale,
    assert_same_bits,
    formats,
    numbers,
    padded,
    with_many_tiles,
    with_specials,
)
from tensor_lists import no_sync, same_bits
from torch import Tensor
from torch.nn import functional as F

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
ops = torch.ops.te_graph
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
activations = pytest.mark.parametrize("activation", ACTIVATIONS)
gates = pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
# Rows and columns of y: tiles that are whole or not, one row, none.
SHAPES = [(1, 8), (8, 16), (17, 24), (127, 136), (128, 128), (129, 264), (300, 8), (0, 16), (5, 0)]


def reference(activation: str, gated: bool, x: Tensor) -> Tensor:
    """y [M, N] for x [M, N], or, gated, [M, 2 N]."""
    if not gated:
        return ACTIVATIONS[activation](x)
    gate, up = x.chunk(2, dim=1)
    return ACTIVATIONS[activation](gate) * up


def reference_backward(activation: str, gated: bool, grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, as x, where that of y is ``grad`` [M, N]: each step is rounded, as autograd's are."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(reference(activation, gated, x), x, grad)[0]


def has_bits_of_torch(activation: str, device: str) -> bool:
    return device != "cpu" or activation == "relu"


def an_input(shape: tuple[int, int], gated: bool, dtype: torch.dtype, device: str) -> Tensor:
    x = numbers((shape[0], shape[1] * (2 if gated else 1)), dtype, device)
    return x + 0.0  # without -0: on the CPU torch's relu gives zeros of either sign of it


def bounds(exact: Tensor, magnitude: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Of what rounds to ``dtype`` at a few steps: [...] fp64 each. ``magnitude`` [...]: of what cancels on the way."""
    error = (
        4 * torch.finfo(dtype).eps * exact.abs() + 16 * 2.0**-23 * magnitude.abs() + torch.finfo(dtype).smallest_normal
    )
    return exact - error, exact + error


def assert_between(out: Tensor, low: Tensor, high: Tensor, scale: Tensor) -> None:
    """``out`` [...] FP8 is NaN where ``low`` [...] is, else between the casts of ``low`` and ``high`` [...]."""
    is_nan = low.isnan().cpu()
    codes = out.cpu().view(torch.uint8)
    assert bool((codes[is_nan] & 0x7F == FP8_NAN).all())
    ends = [reference_cast(end.float(), scale, out.dtype).out.float() for end in (low, high)]
    values = out.cpu().float()
    assert bool(((ends[0] <= values) & (values <= ends[1]) | is_nan).all())


@activations
@gates
@formats
@pytest.mark.parametrize("current", [False, True], ids=["delayed", "current"])
def test_the_cast_is_that_of_the_activation(activation, gated, x_dtype, dtype, current, device, rng):
    for shape in with_many_tiles(SHAPES, device):
        x = an_input(shape, gated, x_dtype, device)
        scale, amax = a_scale(rng, device, dtype), torch.zeros(1, device=device)
        given = {"amax": amax} if current else {"amax": amax, "scale": scale}
        ops.fp8_activation_cast_transpose(x, activation, dtype, gated=gated, **given)
        with no_sync(device):
            out, out_t, scale_inv = ops.fp8_activation_cast_transpose(x, activation, dtype, gated=gated, **given)
        y = reference(activation, gated, x)
        if has_bits_of_torch(activation, device):
            if current:
                _, scale = tg.fp8_current_scale(y, dtype)
            expected_amax = torch.zeros(1, device=device)
            expected, expected_t, expected_inv = tg.fp8_cast_transpose(y, scale, dtype, amax=expected_amax)
            assert_same_bits(out, expected, shape)
            assert_same_bits(out_t, padded(expected_t), shape)
            assert_same_bits(scale_inv, expected_inv, shape)
            assert_same_bits(amax, expected_amax, shape)
            continue
        if current:
            scale = 1 / scale_inv
        gate, up = x.double().chunk(2, dim=1) if gated else (x.double(), torch.ones(()))
        low, high = bounds(reference(activation, gated, x.double()), gate * up, x_dtype)
        assert_between(out, low, high, scale)
        assert_same_bits(out_t, padded(out.t()), shape)
        if y.numel():
            near = 4 * torch.finfo(x_dtype).eps + 1e-6
            torch.testing.assert_close(amax[0], y.abs().max().float(), rtol=near, atol=0.0)


@activations
@gates
@formats
@pytest.mark.parametrize("current", [False, True], ids=["delayed", "current"])
def test_the_cast_of_the_gradient_is_that_of_autograd(activation, gated, x_dtype, dtype, current, device, rng):
    for shape in with_many_tiles(SHAPES, device):
        x, grad = an_input(shape, gated, x_dtype, device), numbers(shape, x_dtype, device)
        scale, amax = a_scale(rng, device, dtype), torch.zeros(1, device=device)
        given = {"gated": gated, "amax": amax} if current else {"gated": gated, "amax": amax, "scale": scale}
        ops.fp8_activation_backward_cast_transpose(grad, x, activation, dtype, **given)
        with no_sync(device):
            results = ops.fp8_activation_backward_cast_transpose(grad, x, activation, dtype, **given)
        out, out_t, scale_inv, sums = results
        made = reference_backward(activation, gated, grad, x)
        if has_bits_of_torch(activation, device):
            if current:
                _, scale = tg.fp8_current_scale(made, dtype)
            expected_amax = torch.zeros(1, device=device)
            expected = tg.fp8_cast_transpose_dbias(made, scale, dtype, amax=expected_amax)
            for got, wanted in zip(
                (out, out_t, scale_inv, sums, amax),
                (expected[0], padded(expected[1]), *expected[2:], expected_amax),
                strict=True,
            ):
                assert_same_bits(got, wanted, shape)
            continue
        if current:
            scale = 1 / scale_inv
        exact = reference_backward(activation, gated, grad.double(), x.double())
        low, high = bounds(exact, grads_magnitude(grad, x, gated), x_dtype)
        assert_between(out, low, high, scale)
        assert_same_bits(out_t, padded(out.t()), shape)
        error = (high - exact).sum(0) + 2.0**-20 * exact.abs().sum(0) + torch.finfo(x_dtype).eps * exact.sum(0).abs()
        assert bool(((sums.double() - exact.sum(0)).abs() <= error).all())


def grads_magnitude(grad: Tensor, x: Tensor, gated: bool) -> Tensor:
    """What may cancel in the gradient of x [M, N] or [M, 2 N] for ``grad`` [M, N], fp64: of f'(x) = cdf + x * pdf."""
    grad, x = grad.double(), x.double()
    if not gated:
        return grad * (1 + x.abs())
    gate, up = x.chunk(2, dim=1)
    return torch.cat([grad * up * (1 + gate.abs()), grad * gate], dim=1)


@activations
@gates
def test_special_numbers_are_those_of_torch(activation, gated, device, rng):
    for x_dtype in X_DTYPES:
        x = with_specials(an_input((64, 64), gated, x_dtype, device), rng)
        grad = with_specials(numbers((64, 64), x_dtype, device), rng)
        scale = a_scale(rng, device)
        out = ops.fp8_activation_cast_transpose(x, activation, E4M3, gated=gated, scale=scale)[0]
        y = reference(activation, gated, x)
        grad_out = ops.fp8_activation_backward_cast_transpose(grad, x, activation, E5M2, gated=gated, scale=scale)[0]
        grad_x = reference_backward(activation, gated, grad, x)
        for got, made in ((out, y), (grad_out, grad_x)):
            is_nan = (got.view(torch.uint8) & 0x7F) == FP8_NAN
            if device != "cpu":
                assert_same_bits(got, tg.fp8_cast(made, scale, got.dtype)[0])
            elif activation == "relu":
                assert torch.equal(is_nan, made.isnan())
            else:  # of infinities, torch's vectorized loops give other numbers than its scalar ones
                gate = x[:, : grad.shape[1]].isnan()
                assert bool(is_nan[:, : grad.shape[1]][gate].all())


@gates
def test_results_that_are_not_asked_for_are_empty(gated, device, rng):
    x, grad = an_input((17, 24), gated, torch.bfloat16, device), numbers((17, 24), torch.bfloat16, device)
    for scale in (None, a_scale(rng, device)):
        whole = ops.fp8_activation_cast_transpose(x, "relu", E4M3, gated=gated, scale=scale)
        part = ops.fp8_activation_cast_transpose(x, "relu", E4M3, gated=gated, scale=scale, with_transposed=False)
        assert same_bits(part[0], whole[0]) and part[1].shape == (0,) and same_bits(part[2], whole[2])
        backward = functools.partial(
            ops.fp8_activation_backward_cast_transpose, grad, x, "relu", E5M2, gated=gated, scale=scale
        )
        whole, part = backward(), backward(with_transposed=False, with_sums=False)
        assert same_bits(part[0], whole[0]) and part[1].shape == (0,) and part[3].shape == (0,)
        with_sums = backward(with_transposed=False)
        assert same_bits(with_sums[3], whole[3])


@pytest.mark.parametrize("x_dtype", X_DTYPES, ids=str)
def test_sums_go_where_they_are_asked_to_go(x_dtype, device, rng):
    x, grad = numbers((130, 40), x_dtype, device), numbers((130, 40), x_dtype, device)
    backward = functools.partial(ops.fp8_activation_backward_cast_transpose, grad, x, "relu", E5M2)
    sums = backward()[3]
    poisoned = Poisoned(device)
    memory = poisoned.empty((40,), x_dtype)
    assert backward(column_sums=memory)[3].shape == (0,)
    assert_same_bits(memory, sums)
    backward(column_sums=memory, accumulate_sums=True)
    assert_same_bits(memory, sums + sums)
    poisoned.assert_guards_intact()


def layouts(matrix: Tensor) -> Iterator[Tensor]:
    """``matrix`` [M, N] at other addresses and strides."""
    yield Poisoned(matrix.device.type).like(matrix, offset=1)
    yield matrix.t().contiguous().t()
    yield torch.cat([matrix, matrix], dim=1)[:, : matrix.shape[1]]


@gates
def test_inputs_may_lie_anywhere(gated, device, rng):
    x, grad = an_input((33, 48), gated, torch.bfloat16, device), numbers((33, 48), torch.bfloat16, device)
    expected = ops.fp8_activation_cast_transpose(x, "silu", E4M3, gated=gated)
    expected_grad = ops.fp8_activation_backward_cast_transpose(grad, x, "silu", E5M2, gated=gated)
    for other, other_grad in zip(layouts(x), layouts(grad), strict=True):
        before = other.clone(), other_grad.clone()
        got = ops.fp8_activation_cast_transpose(other, "silu", E4M3, gated=gated)
        got_grad = ops.fp8_activation_backward_cast_transpose(other_grad, other, "silu", E5M2, gated=gated)
        for result, wanted in zip((*got, *got_grad), (*expected, *expected_grad), strict=True):
            assert_same_bits(result, wanted)
        assert same_bits(other, before[0]) and same_bits(other_grad, before[1])


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_amax_becomes_the_largest_of_what_is_made_if_that_is_larger(dtype, device):
    x = torch.tensor([[-3.0, 2.0, 0, 0, 0, 0, 0, 0]], device=device)
    for before, after in ((0.0, 2.0), (2.5, 2.5)):
        amax = torch.full((), before, device=device)
        ops.fp8_activation_cast_transpose(x, "relu", dtype, amax=amax)
        assert amax.item() == after


def test_bits_do_not_change_from_run_to_run(device):
    x, grad = numbers((513, 520), torch.bfloat16, device), numbers((513, 520), torch.bfloat16, device)
    first = ops.fp8_activation_backward_cast_transpose(grad, x, "gelu", E5M2)
    for _ in range(5):
        again = ops.fp8_activation_backward_cast_transpose(grad, x, "gelu", E5M2)
        for got, expected in zip(again, first, strict=True):
            assert_same_bits(got, expected)


@activations
@gates
def test_random_shapes(activation, gated, device, rng):
    for _ in range(10):
        shape = rng.randrange(1, 300), 8 * rng.randrange(1, 40)
        x = an_input(shape, gated, rng.choice(X_DTYPES), device)
        scale = a_scale(rng, device)
        out, out_t, _ = ops.fp8_activation_cast_transpose(x, activation, E4M3, gated=gated, scale=scale)
        # The rows one by one, whose bits are those of the rows of the whole.
        row = random.Random(rng.random()).randrange(shape[0])
        alone = ops.fp8_activation_cast_transpose(x[row : row + 1], activation, E4M3, gated=gated, scale=scale)[0]
        assert_same_bits(out[row : row + 1], alone)
        assert_same_bits(out_t, padded(out.t()))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"activation": "tanh"}, ValueError, "activation to be one of gelu, gelu_tanh, relu, silu, got tanh"),
        ({"x": (16,)}, ValueError, r"x of two dimensions, got shape \[16\]"),
        ({"x": (4, 12)}, ValueError, r"x with columns that 8 divides, got \[4, 12\]"),
        ({"x": (4, 8), "gated": True}, ValueError, r"x with columns that 16 divides, got \[4, 8\]"),
        ({"x": torch.float64}, TypeError, "x of dtype torch.float32, torch.float16 or torch.bfloat16, got"),
        ({"dtype": torch.float16}, TypeError, "dtype torch.float8_e4m3fn or torch.float8_e5m2, got torch.float16"),
        ({"amax": (2,)}, ValueError, r"amax of one element, got shape \[2\]"),
        ({"scale": (2,)}, ValueError, r"scale of one element, got shape \[2\]"),
        ({"grad": (3, 16)}, ValueError, r"grad of shape \[4, 16\], got \[3, 16\]"),
        ({"grad": torch.float16}, TypeError, "grad of dtype torch.float32, got torch.float16"),
        ({"accumulate_sums": True}, ValueError, "column_sums, to which to accumulate, got none"),
        ({"column_sums": (8,)}, ValueError, r"column_sums of shape \[16\], got \[8\]"),
        ({"column_sums": (16,), "with_sums": False}, ValueError, "no column_sums, which is not asked for, got one"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(changes, error, words, device):
    given: dict[str, Any] = {"x": (4, 16), "activation": "gelu", "dtype": E4M3, "amax": (1,), **changes}
    of_gradient = given.keys() & {"grad", "column_sums", "accumulate_sums"}
    if of_gradient:
        given = {"grad": (4, 16), **given}
    for name in given.keys() & {"x", "grad", "amax", "scale", "column_sums"}:
        shape, dtype = (given[name], torch.float32) if isinstance(given[name], tuple) else ((4, 16), given[name])
        given[name] = torch.zeros(shape, dtype=dtype, device=device)
    for name in given.keys() & {"x", "grad"}:
        given[name] += 1
    op = ops.fp8_activation_backward_cast_transpose if of_gradient else ops.fp8_activation_cast_transpose
    with pytest.raises(error, match=f"{op.__name__}: expected {words}"):
        op(**given)
    assert not given["amax"].any()
    assert "column_sums" not in given or not given["column_sums"].any()


def test_what_is_written_is_apart_from_what_is_read(device):
    x = torch.ones(4, 16, device=device)
    with pytest.raises(ValueError, match="expected x and amax that do not overlap"):
        ops.fp8_activation_cast_transpose(x, "relu", E4M3, amax=x[0, :1])
    with pytest.raises(ValueError, match="expected x and column_sums that do not overlap"):
        ops.fp8_activation_backward_cast_transpose(x.clone(), x, "relu", E4M3, column_sums=x[0])
    assert same_bits(x, torch.ones_like(x))
