"""Layer norm and RMS norm that are cast to FP8 where they are made, and their derivatives.

Bit for bit against the same steps in plain PyTorch, fp32 with sums in the same order; these against fp64.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fp8_references import E4M3, E5M2, reference_amax, reference_cast, reference_scale
from fp8_tensors import (
    FORMATS,
    X_DTYPES,
    Poisoned,
    a_scale,
    assert_same_bits,
    formats,
    padded,
    with_many_tiles,
    with_specials,
)
from tensor_lists import no_sync, same_bits
from torch import Tensor
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("repeatable")
ops = torch.ops.te_graph
EPS = 1e-5
SHAPES = [(1, 8), (8, 16), (17, 264), (129, 136), (3, 2056), (128, 128), (0, 16)]
kinds = pytest.mark.parametrize("rms_norm", [False, True], ids=["LayerNorm", "RMSNorm"])


@dataclass
class Case:
    """Arguments of a forward, and of its backward.

    Attributes:
        x, grad: [M, N] of ``dtype``.
        residual, grad_sum: the same, or None.
        weight, bias: [N]; RMS norm has no bias.
    """

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    bias: Tensor | None
    grad: Tensor
    grad_sum: Tensor | None
    rms_norm: bool
    zero_centered: bool
    eps: float = EPS

    def forward(self, dtype: torch.dtype = E4M3, **given: Any) -> tuple[Tensor, ...]:
        return ops.fp8_layer_norm_cast_transpose(
            self.x,
            self.residual,
            self.weight,
            self.bias,
            self.eps,
            dtype,
            rms_norm=self.rms_norm,
            zero_centered=self.zero_centered,
            **given,
        )

    def backward(self, statistics: tuple[Tensor, Tensor], **given: Any) -> tuple[Tensor, ...]:
        """``statistics``: mean and rstd, [M] each, or [0]."""
        mean, rstd = statistics
        return ops.fp8_layer_norm_backward(
            self.grad,
            self.grad_sum,
            plus(self.x, self.residual),
            self.weight,
            None if self.rms_norm else mean,
            rstd,
            zero_centered=self.zero_centered,
            **given,
        )


def a_case(shape: tuple[int, int], dtype: torch.dtype, device: str, rng: random.Random, **fixed: Any) -> Case:
    rms_norm = fixed.pop("rms_norm", rng.random() < 0.5)
    of_weight = rng.choice([dtype, torch.float32])

    def matrix() -> Tensor:
        return (torch.randn(shape, device=device) * rng.choice([0.1, 1.0, 30.0]) + rng.choice([0.0, 3.0])).to(dtype)

    def vector() -> Tensor:
        return torch.randn(shape[1], device=device).to(of_weight)

    given = {
        "x": matrix(),
        "residual": rng.choice([None, matrix()]),
        "weight": vector(),
        "bias": None if rms_norm or rng.random() < 0.3 else vector(),
        "grad": matrix(),
        "grad_sum": rng.choice([None, matrix()]),
        "zero_centered": rng.random() < 0.5,
    }
    return Case(**{**given, "rms_norm": rms_norm, **fixed})


def plus(x: Tensor, residual: Tensor | None) -> Tensor:
    """x + residual [M, N]."""
    return x if residual is None else x + residual


def row_sum(terms: Tensor) -> Tensor:
    """Of ``terms`` [M, N] fp32: [M, 1], in the order of csrc/fp8/layer_norm.h."""
    rows, columns = terms.shape
    lanes = terms.new_zeros(rows, 32)
    for eight in range(columns // 8):
        for column in range(8 * eight, 8 * eight + 8):
            lanes[:, eight % 32] += terms[:, column]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes


def column_sum(terms: Tensor) -> Tensor:
    """Of ``terms`` [M, N] fp32: [N], in the order of csrc/fp8/cast.h: 8 rows, 16 of these, and these."""
    total = terms.new_zeros(terms.shape[1])
    for tile in terms.split(128):
        of_tile = terms.new_zeros(terms.shape[1])
        for group in tile.split(8):
            of_group = terms.new_zeros(terms.shape[1])
            for row in group:
                of_group += row
            of_tile += of_group
        total += of_tile
    return total


@dataclass
class Reference:
    """What a case is to give, on the CPU: s, y and the gradient of s [M, N], of its dtype; statistics [M, 1] fp32; the
    gradients of weight and bias [N], of their dtype."""

    sum: Tensor
    mean: Tensor
    rstd: Tensor
    y: Tensor
    grad_x: Tensor
    grad_weight: Tensor
    grad_bias: Tensor


def reference(case: Case) -> Reference:
    s = plus(case.x, case.residual).cpu()
    wide, columns = s.float(), torch.tensor(float(s.shape[1]))
    mean = torch.zeros(s.shape[0], 1) if case.rms_norm else row_sum(wide) / columns
    apart = wide - mean
    variance = row_sum(apart * apart) / columns + torch.tensor(case.eps)
    rstd = 1 / variance.double().sqrt().float()  # torch's square root of fp32 is not always correctly rounded
    gain = case.weight.cpu().float() + 1 if case.zero_centered else case.weight.cpu().float()
    n = apart * rstd
    y = n * gain
    if case.bias is not None:
        y = y + case.bias.cpu().float()
    dy = case.grad.cpu().float()
    dn = dy * gain
    shift = n * row_sum(dn * n)
    if not case.rms_norm:
        shift = shift + row_sum(dn)
    grad_x = ((dn - shift * (1 / columns)) * rstd).to(s.dtype)
    if case.grad_sum is not None:
        grad_x = grad_x + case.grad_sum.cpu()
    of_weight = case.weight.dtype
    grad_weight, grad_bias = column_sum(dy * n).to(of_weight), column_sum(dy).to(of_weight)
    return Reference(s, mean, rstd, y.to(s.dtype), grad_x, grad_weight, grad_bias)


def assert_cast(got: tuple[Tensor, ...], amax: Tensor, made: Tensor, scale: Tensor | None, dtype: torch.dtype) -> None:
    """``got``: casts of ``made`` [M, N] by ``scale`` [1] or current scaling, and scale_inv [1]; ``amax`` [1]."""
    expected = reference_cast(made, reference_scale(reference_amax(made), dtype) if scale is None else scale, dtype)
    assert_same_bits(got[0], expected.out)
    assert_same_bits(got[1], padded(expected.out.t()))
    assert_same_bits(got[2], expected.scale_inv)
    assert_same_bits(amax, expected.amax)


@kinds
@formats
@pytest.mark.parametrize("current", [False, True], ids=["delayed", "current"])
@pytest.mark.one_of(5)
def test_the_forward_has_the_bits_of_its_steps(rms_norm, x_dtype, dtype, current, device, rng):
    for shape in with_many_tiles(SHAPES, device):
        case = a_case(shape, x_dtype, device, rng, rms_norm=rms_norm)
        scale, amax = None if current else a_scale(rng, device, dtype), torch.zeros(1, device=device)
        case.forward(dtype, scale=scale, amax=amax)
        with no_sync(device):
            *casts, s, mean, rstd = case.forward(dtype, scale=scale, amax=amax)
        expected = reference(case)
        assert_same_bits(rstd, expected.rstd[:, 0], shape)
        assert_same_bits(mean, mean.new_empty(0) if rms_norm else expected.mean[:, 0], shape)
        assert_same_bits(s, s.new_empty(0) if case.residual is None else expected.sum, shape)
        assert_cast(casts, amax, expected.y, scale, dtype)


@kinds
@pytest.mark.parametrize(("x_dtype", "dtype"), FORMATS)
@pytest.mark.parametrize("scaling", ["not cast", "delayed", "current"])
@pytest.mark.one_of(5)
def test_the_backward_has_the_bits_of_its_steps(rms_norm, x_dtype, dtype, scaling, device, rng):
    for shape in with_many_tiles(SHAPES, device):
        case = a_case(shape, x_dtype, device, rng, rms_norm=rms_norm)
        expected = reference(case)
        statistics = expected.mean[:, 0].to(device), expected.rstd[:, 0].to(device)
        scale = a_scale(rng, device, dtype) if scaling == "delayed" else None
        amax = torch.zeros(1, device=device)
        is_cast = scaling != "not cast"
        given = {"dtype": dtype, "scale": scale, "amax": amax} if is_cast else {}
        given["output_mask"] = [True, not rms_norm, is_cast]
        case.backward(statistics, **given)
        with no_sync(device):
            grad_x, *casts, grad_weight, grad_bias, sums = case.backward(statistics, **given)
        assert_same_bits(grad_x, expected.grad_x, shape)
        assert_same_bits(grad_weight, expected.grad_weight, shape)
        assert_same_bits(grad_bias, grad_bias.new_empty(0) if rms_norm else expected.grad_bias, shape)
        if is_cast:
            assert_cast(casts, amax, expected.grad_x, scale, dtype)
            assert_same_bits(sums, column_sum(expected.grad_x.float()).to(x_dtype), shape)
        else:
            assert [part.numel() for part in (*casts, sums)] == [0, 0, 0, 0]


@kinds
@pytest.mark.parametrize("shape", [(1, 8), (17, 264), (5, 4096)], ids=str)
def test_the_steps_are_those_of_torch(rms_norm, shape, device, rng):
    """Of the references above, in fp32 against autograd in fp64."""
    case = a_case(shape, torch.float32, "cpu", rng, rms_norm=rms_norm)
    expected = reference(case)
    leaves = [plus(case.x, case.residual), case.weight, torch.zeros(shape[1]) if case.bias is None else case.bias]
    s, weight, bias = (leaf.double().requires_grad_() for leaf in leaves)
    gain = weight + 1 if case.zero_centered else weight
    if rms_norm:
        y = F.rms_norm(s, shape[1:], gain, case.eps) + bias
    else:
        y = F.layer_norm(s, shape[1:], gain, bias, case.eps)
    grad_x, grad_weight, grad_bias = torch.autograd.grad(y, (s, weight, bias), case.grad.double())
    if case.grad_sum is not None:
        grad_x = grad_x + case.grad_sum
    close = functools.partial(torch.testing.assert_close, check_dtype=False, rtol=1e-4)
    close(expected.y, y, atol=1e-4)
    scale = (expected.rstd.max() * case.grad.abs().max() * gain.abs().max()).item()
    close(expected.grad_x, grad_x, atol=1e-5 * scale + 1e-5)
    close(expected.grad_weight, grad_weight, atol=1e-4 * float(case.grad.abs().sum()))
    close(expected.grad_bias, grad_bias, atol=1e-4 * float(case.grad.abs().sum()))


@kinds
def test_numbers_that_are_not_finite_spread_as_in_the_steps(rms_norm, device, rng):
    for dtype in X_DTYPES:
        case = a_case((33, 64), dtype, device, rng, rms_norm=rms_norm)
        case.x[:8] = with_specials(case.x[:8], rng)
        case.grad[16:24] = with_specials(case.grad[16:24], rng)
        scale = a_scale(rng, device)
        out, _, _, _, mean, rstd = case.forward(scale=scale)
        expected = reference(case)
        assert_same_bits(out, reference_cast(expected.y, scale, E4M3).out)
        grad_x = case.backward((mean, rstd))[0]
        assert torch.equal(grad_x.isnan().cpu(), expected.grad_x.isnan())
        assert torch.equal(grad_x.nan_to_num(1.0).cpu(), expected.grad_x.nan_to_num(1.0))


def test_results_that_are_not_asked_for_are_empty(device, rng):
    case = a_case((17, 24), torch.bfloat16, device, rng)
    for scale in (None, a_scale(rng, device)):
        whole, part = case.forward(scale=scale), case.forward(scale=scale, with_transposed=False)
        assert part[1].shape == (0,)
        assert all(same_bits(part[i], whole[i]) for i in (0, 2, 3, 4, 5))
        statistics = whole[4:]
        everything = case.backward(statistics, dtype=E5M2, scale=scale, output_mask=[True, True, True])
        little = case.backward(
            statistics, dtype=E5M2, scale=scale, with_transposed=False, output_mask=[False, False, False]
        )
        assert [little[i].shape for i in (2, 4, 5, 6)] == [(0,)] * 4
        assert all(same_bits(little[i], everything[i]) for i in (0, 1, 3))


def test_sums_go_where_they_are_asked_to_go(device, rng):
    for dtype in X_DTYPES:
        case = a_case((130, 40), dtype, device, rng, rms_norm=False)
        statistics = case.forward()[4:]
        expected = case.backward(statistics, dtype=E5M2, output_mask=[True, True, True])[4:]
        poisoned = Poisoned(device)
        memory = [poisoned.empty((40,), one.dtype) for one in expected]
        given = dict(zip(("grad_weight", "grad_bias", "column_sums"), memory, strict=True))
        backward = functools.partial(case.backward, statistics, dtype=E5M2, output_mask=[True, True, True], **given)
        assert [one.numel() for one in backward()[4:]] == [0, 0, 0]
        for got, wanted in zip(memory, expected, strict=True):
            assert_same_bits(got, wanted)
        backward(accumulate_weight=True, accumulate_bias=True, accumulate_sums=True)
        for got, wanted in zip(memory, expected, strict=True):
            assert_same_bits(got, wanted + wanted)
        poisoned.assert_guards_intact()


def test_inputs_may_lie_anywhere(device, rng):
    case = a_case((33, 48), torch.bfloat16, device, rng, rms_norm=False)
    expected = case.forward()
    gradients = case.backward(expected[4:])
    for move in (
        lambda t: Poisoned(device).like(t, offset=1),
        lambda t: t.t().contiguous().t() if t.dim() == 2 else t,
        lambda t: torch.cat([t, t], dim=1)[:, : t.shape[1]] if t.dim() == 2 else t,
    ):
        moved = Case(**{name: move(one) if isinstance(one, Tensor) else one for name, one in vars(case).items()})
        for got, wanted in zip(moved.forward(), expected, strict=True):
            assert_same_bits(got, wanted)
        for got, wanted in zip(moved.backward(expected[4:]), gradients, strict=True):
            assert_same_bits(got, wanted)


def test_random_shapes(device, rng):
    for _ in range(10):
        shape = rng.randrange(1, 300), 8 * rng.randrange(1, 80)
        case = a_case(shape, rng.choice(X_DTYPES), device, rng)
        scale = a_scale(rng, device)
        out, out_t, _, _, mean, rstd = case.forward(scale=scale)
        expected = reference(case)
        assert_same_bits(out, reference_cast(expected.y, scale, E4M3).out)
        assert_same_bits(out_t.cpu(), padded(out.t().cpu()))
        assert_same_bits(case.backward((mean, rstd))[0], expected.grad_x)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"x": (4, 12)}, ValueError, "expected x of two dimensions, with columns that 8 divides, got"),
        ({"x": (2, 2, 8)}, ValueError, "expected x of two dimensions"),
        ({"weight": (8,)}, ValueError, "expected weight of shape"),
        ({"weight": torch.float16}, TypeError, "expected weight of dtype torch.bfloat16 or torch.float32, got"),
        ({"bias": torch.float16}, TypeError, "expected bias"),
        ({"residual": (4, 8)}, ValueError, "expected residual of shape"),
        ({"residual": torch.float32}, TypeError, "expected residual"),
        ({"eps": -1.0}, ValueError, "expected eps of at least 0, got -1"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(changes, error, words, device, rng):
    case = a_case((4, 16), torch.bfloat16, device, rng, rms_norm=False)
    case.residual, case.bias = case.x.clone(), case.weight.clone()
    (name, change), old = *changes.items(), getattr(case, next(iter(changes)))
    if isinstance(change, tuple):
        change = torch.zeros(change, dtype=old.dtype, device=device)
    elif isinstance(change, torch.dtype):
        change = old.to(change)
    setattr(case, name, change)
    amax = torch.zeros(1, device=device)
    with pytest.raises(error, match=f"fp8_layer_norm_cast_transpose: {words}"):
        case.forward(amax=amax)
    assert amax.item() == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"amax": torch.zeros(1)}, "expected a dtype, as scale, amax and column sums are of a cast, got none"),
        ({"output_mask": [True, True, True]}, "expected a dtype"),
        ({"accumulate_weight": True}, "expected grad_weight, to which to accumulate, got none"),
        ({"grad_weight": torch.zeros(16), "output_mask": [False, True, False]}, "expected no grad_weight"),
        ({"grad_bias": torch.zeros(8)}, "expected grad_bias of shape"),
    ],
    ids=str,
)
def test_what_does_not_fit_a_backward_is_named(given, words, device, rng):
    case = a_case((4, 16), torch.float32, device, rng, rms_norm=False)
    statistics = case.forward()[4:]
    given = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in given.items()}
    with pytest.raises(ValueError, match=f"fp8_layer_norm_backward: {words}"):
        case.backward(statistics, **given)
