"""fp8_dequantize and fp8_dequantize_out against a multiplication in fp32 and a rounding (``reference_dequantize``)."""

import pytest
import torch
from fp8_references import E4M3, FP8_DTYPES, FP8_MAX, reference_dequantize
from fp8_tensors import X_DTYPES, Poisoned, a_scale, assert_same_bits, numbers
from tensor_lists import no_sync, same_bits
from torch import Tensor

import te_graph as tg

SHAPES = [(), (1,), (311,), (7, 11), (611, 782), (3, 5, 7), (0,), (4, 0)]


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Any FP8 numbers but NaN and Inf, ``[*shape]``."""
    raw = torch.randint(0, 0x7C, shape, dtype=torch.uint8, device=device)
    return (raw + 128 * torch.randint(0, 2, shape, dtype=torch.uint8, device=device)).view(dtype)


def check(x8: Tensor, scale_inv: Tensor, dtype: torch.dtype, offset: int = 0) -> None:
    poisoned = Poisoned(x8.device.type)
    into = poisoned.empty(x8.shape, dtype, offset)
    with no_sync(x8.device.type):
        out = tg.fp8_dequantize(x8, scale_inv, dtype)
        assert tg.fp8_dequantize_out(into, x8, scale_inv) is None
    expected = reference_dequantize(x8, scale_inv, dtype)
    for got in (out, into):
        assert got.device == x8.device
        assert_same_bits(got, expected)
    poisoned.assert_guards_intact()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", X_DTYPES, ids=str)
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=str)
def test_values_are_those_of_a_multiplication_in_fp32_and_a_rounding(fp8, dtype, shape, device, rng):
    check(random_bytes(shape, fp8, device), 1 / a_scale(rng, device, fp8), dtype, offset=rng.randrange(9))


@pytest.mark.parametrize("scale_inv", [1.0, 1 / 3, 2.0**-30, 1e-38, 3e38])
@pytest.mark.parametrize("dtype", X_DTYPES, ids=str)
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=str)
def test_each_of_the_256_bytes_is_read_as_it_is_meant(fp8, dtype, scale_inv, device):
    x8, factor = torch.arange(256, dtype=torch.uint8).view(fp8), torch.tensor([scale_inv])
    expected = reference_dequantize(x8, factor, dtype)
    got = tg.fp8_dequantize(x8.to(device), factor.to(device), dtype).cpu()
    assert torch.equal(got.isnan(), expected.isnan())  # NaN has many bit patterns
    assert_same_bits(got[~got.isnan()], expected[~got.isnan()])


def test_fp32_is_the_default(device):
    x8 = random_bytes((3, 4), E4M3, device)
    assert tg.fp8_dequantize(x8, torch.ones(1, device=device)).dtype == torch.float32


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=str)
def test_inputs_may_lie_anywhere_and_need_not_be_contiguous(fp8, device, rng):
    whole = random_bytes((67, 45), fp8, device)
    for x8 in (whole.t(), whole[3:], whole[:, 7:], whole[::2, ::3], whole.flatten()[1:], whole.flatten()[3:20]):
        check(x8, torch.tensor(rng.uniform(1e-3, 1), device=device), torch.bfloat16, offset=1)


@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=str)
def test_a_cast_and_back_is_off_by_half_a_step_at_most(fp8, device):
    x = numbers((301, 77), torch.float32, device)
    amax, scale = tg.fp8_current_scale(x, fp8)
    out, scale_inv = tg.fp8_cast(x, scale, fp8)
    back = tg.fp8_dequantize(out, scale_inv)
    # Half a step of normal numbers, and of the subnormal ones; some roundings in fp32.
    relative, smallest = (2.0**-4, 2.0**-10) if fp8 == E4M3 else (2.0**-3, 2.0**-17)
    allowed = torch.maximum(x.abs() * relative, smallest * amax / FP8_MAX[fp8]) * (1 + 1e-6)
    assert bool(((back - x).abs() <= allowed).all())


def test_scales_of_shape_zero_and_one_are_the_same(device):
    x8, scale_inv = random_bytes((5, 9), E4M3, device), torch.tensor([0.3], device=device)
    assert same_bits(tg.fp8_dequantize(x8, scale_inv), tg.fp8_dequantize(x8, scale_inv.view(())))
