"""fp8_current_scale and fp8_scale: amax, and the scale that maps it to the largest FP8 number."""

import math

import pytest
import torch
from fp8_references import E4M3, FLT_MAX, FP8_DTYPES, FP8_MAX, reference_amax, reference_cast, reference_scale
from fp8_tensors import FORMATS, X_DTYPES, assert_same_bits, formats, numbers
from tensor_lists import no_sync, same_bits
from torch import Tensor

import te_graph as tg

INF, NAN = torch.inf, torch.nan
SHAPES = [(), (1,), (311,), (7, 11), (611, 782), (2333, 1), (3, 5, 7), (0,), (4, 0)]
EPSILONS = (0.0, 1e-6, 0.3, 1e30)


def check(x: Tensor, dtype: torch.dtype, eps: float, power_of_2: bool) -> None:
    before = x.clone()
    with no_sync(x.device.type):
        amax, scale = tg.fp8_current_scale(x, dtype, eps=eps, power_of_2=power_of_2)
    expected = reference_amax(x)
    assert amax.device == scale.device == x.device
    assert amax.isnan().item() if expected.isnan() else same_bits(amax.cpu(), expected)
    assert_same_bits(scale, reference_scale(expected, dtype, eps=eps, power_of_2=power_of_2), (x.shape, eps))
    assert same_bits(x, before)


@formats
@pytest.mark.parametrize("power_of_2", [False, True], ids=["any scale", "powers of 2"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_amax_and_scale_of_a_tensor(shape, power_of_2, x_dtype, dtype, device):
    for eps in EPSILONS:
        check(numbers(shape, x_dtype, device), dtype, eps, power_of_2)


@pytest.mark.parametrize("value", [INF, -INF, NAN, 0.0, -0.0, 1e-45, 1e-38, FLT_MAX])
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_edges(dtype, power_of_2, value, device):
    for x_dtype in X_DTYPES:
        for eps in EPSILONS:
            x = torch.zeros(7, 301, device=device, dtype=x_dtype)
            x[3, 5] = value
            check(x, dtype, eps, power_of_2)


@pytest.mark.parametrize("where", [0, 1, 31, 4096, -1])
def test_nan_passes_from_anywhere_beside_infinity_and_the_scale_is_one(where, device):
    for x_dtype in X_DTYPES:
        x = numbers((97, 83), x_dtype, device)
        x[50] = INF
        x.view(-1)[where] = NAN
        amax, scale = tg.fp8_current_scale(x)
        assert amax.isnan().item() and scale.item() == 1


def test_tiny_amax_gives_the_largest_scale_that_is_finite(device):
    amax = torch.tensor([1e-45, 1e-40, 448 / FLT_MAX / 2], device=device)
    assert tg.fp8_scale(amax).tolist() == [FLT_MAX] * 3
    assert tg.fp8_scale(amax, power_of_2=True).tolist() == [2.0**127] * 3


def test_inputs_may_lie_anywhere_and_need_not_be_contiguous(device):
    for x_dtype in X_DTYPES:
        whole = numbers((67, 45), x_dtype, device)
        for x in (whole.t(), whole[3:], whole[:, 7:], whole[::2, ::3], whole.flatten()[1:], whole[5:6].expand(8, -1)):
            check(x, E4M3, 0.0, False)


def test_the_cast_with_the_current_scale_saturates_nothing_and_uses_the_range(device):
    for x_dtype, dtype in FORMATS:
        x = numbers((301, 77), x_dtype, device)
        counts = torch.zeros(3, dtype=torch.int64, device=device)
        with no_sync(device):
            amax, scale = tg.fp8_current_scale(x, dtype)
            out, scale_inv = tg.fp8_cast(x, scale, dtype, counts=counts)
        expected = reference_cast(x, scale, dtype)
        assert_same_bits(out, expected.out)
        assert_same_bits(scale_inv, expected.scale_inv)
        assert_same_bits(amax, expected.amax)
        assert out.float().abs().max().item() == FP8_MAX[dtype]


# fp8_scale: the same rules for amaxes that are known.


@pytest.mark.parametrize("shape", [(), (1,), (300,), (7, 3), (0,)], ids=str)
@pytest.mark.parametrize("margin", [0.0, 2.0, -1.0, 7.0])
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_scales_of_amaxes_of_any_shape(dtype, power_of_2, margin, shape, device):
    amax = torch.rand(shape, device=device) * torch.exp2(torch.randint(-100, 100, shape, device=device))
    flat = amax.view(-1)
    for i, value in enumerate((INF, NAN, 0.0, 1e-45, FLT_MAX)[: flat.numel() // 2]):
        flat[i] = value
    before = amax.clone()
    for eps in EPSILONS:
        with no_sync(device):
            scale = tg.fp8_scale(amax, dtype, margin=margin, eps=eps, power_of_2=power_of_2)
        assert_same_bits(scale, reference_scale(amax, dtype, margin, eps, power_of_2))
    assert same_bits(amax, before)


def test_a_margin_that_is_no_integer_is_within_one_ulp(device):
    amax = torch.rand(500, device=device) + 0.1
    scale = tg.fp8_scale(amax, margin=0.5).cpu().double()
    expected = 448 * 2.0**-0.5 / amax.cpu().double()
    assert float(((scale - expected) / expected).abs().max()) < 2.0**-22


def test_one_step_of_the_current_scale_is_one_step_of_the_scale_of_its_amax(device):
    x = numbers((50, 60), torch.bfloat16, device)
    amax, scale = tg.fp8_current_scale(x, eps=0.1, power_of_2=True)
    assert same_bits(tg.fp8_scale(amax, eps=0.1, power_of_2=True), scale)
    assert math.log2(scale.item()).is_integer()


def test_amaxes_need_not_be_contiguous(device):
    history = torch.rand(6, 9, device=device) + 0.01
    for amax in (history[0, 1::3], history.t(), history[2:, 1:]):
        assert_same_bits(tg.fp8_scale(amax), reference_scale(amax, E4M3))


def test_each_tensor_at_any_address_has_its_own_amax(device):
    """Reads stay inside: what lies beside the tensor is larger than all of it."""
    for x_dtype in X_DTYPES:
        for offset in range(1, 9):
            whole = torch.full((1200,), INF, device=device, dtype=x_dtype)
            inner = whole[offset : 1000 + offset]
            inner.copy_(numbers((1000,), x_dtype, device))
            check(inner, E4M3, 0.0, False)
            check(inner[: offset * 7], E4M3, 0.0, False)


def test_a_power_of_2_is_never_0(device):
    """Where the quotient has no exponent of its own: amaxes near the largest number, a margin near the format's."""
    amax = torch.tensor([torch.finfo(torch.float32).max, 1e38, 3e38], device=device)
    exact = tg.fp8_scale(amax, E4M3, margin=12.0)
    scale = tg.fp8_scale(amax, E4M3, margin=12.0, power_of_2=True)
    assert (scale > 0).all() and (scale <= exact).all() and (scale.double() * 2 > exact.double()).all()
    mantissas, _ = torch.frexp(scale.double())
    assert (mantissas == 0.5).all()
