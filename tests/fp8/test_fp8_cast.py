"""fp8_cast and fp8_cast_out: the bytes, against ``reference_cast`` and, for every 16-bit value, against a table.

What casts compute beside the bytes is tested in test_fp8_cast_extras.py.
"""

from collections.abc import Callable

import pytest
import torch
from fp8_references import E4M3, FP8_DTYPES, FP8_MAX, FP8_NAN, fp8_values, nearest_fp8, reference_cast
from fp8_tensors import (
    EMPTY_SHAPES,
    FORMATS,
    HUGE_SHAPES,
    LARGE_SHAPES,
    SMALL_SHAPES,
    X_DTYPES,
    Poisoned,
    a_scale,
    assert_same_bits,
    formats,
    numbers,
    with_specials,
)
from tensor_lists import no_sync, same_bits
from torch import Tensor

import te_graph as tg

INF, NAN = torch.inf, torch.nan
OTHER_SHAPES = [(), (1,), (311,), (3, 5, 7), (2, 0, 3)]


def check(x: Tensor, scale: Tensor, dtype: torch.dtype, offset: int = 0) -> None:
    """Both forms of the op on ``x`` [...], the second into poisoned memory."""
    expected = reference_cast(x, scale, dtype)
    before, poisoned = x.clone(), Poisoned(x.device.type)
    into = poisoned.empty(x.shape, dtype, offset)
    with no_sync(x.device.type):
        out, scale_inv = tg.fp8_cast(x, scale, dtype)
        assert tg.fp8_cast_out(into, x, scale) is None
    for got in (out, into):
        assert got.device == x.device
        assert_same_bits(got, expected.out, tuple(x.shape))
    assert_same_bits(scale_inv, expected.scale_inv)
    poisoned.assert_guards_intact()
    assert same_bits(x, before)


@formats
@pytest.mark.parametrize("shape", [*SMALL_SHAPES, *EMPTY_SHAPES, *LARGE_SHAPES, *OTHER_SHAPES], ids=str)
def test_bytes_are_those_of_a_multiplication_in_fp32_a_clamp_and_a_rounding(shape, x_dtype, dtype, device, rng):
    check(with_specials(numbers(shape, x_dtype, device), rng), a_scale(rng, device, dtype), dtype)


@pytest.mark.parametrize("i", range(2), ids=lambda i: str(HUGE_SHAPES[i]))
def test_bytes_of_tensors_of_millions_of_elements(i, device, rng):
    x_dtype, dtype = FORMATS[4 + i]
    check(numbers(HUGE_SHAPES[i], x_dtype, device), a_scale(rng, device, dtype), dtype)


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("shape", HUGE_SHAPES, ids=str)
def test_bytes_of_tensors_of_millions_of_elements_in_all_formats(shape, x_dtype, dtype, rng):
    check(with_specials(numbers(shape, x_dtype, "cuda"), rng), a_scale(rng, "cuda", dtype), dtype)


@pytest.mark.parametrize("scale", [1.0, 0.7, 448 / 3, 2.0**-24, 3e38, 1e-40, 0.0, INF, NAN])
@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("x_dtype", X_DTYPES[1:], ids=str)
def test_every_16_bit_value_becomes_the_nearest_fp8_value(x_dtype, dtype, scale, device):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(x_dtype)
    out, _ = tg.fp8_cast(x.to(device), torch.tensor(scale, device=device), dtype)
    assert_same_bits(out.view(torch.uint8), nearest_fp8(x.float() * scale, dtype))


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_ties_go_to_even_and_what_is_beside_a_tie_to_its_neighbour(dtype, device):
    values = fp8_values(dtype)
    ties = ((values[1:] + values[:-1]) / 2).float()
    below, above = (torch.nextafter(ties, torch.full_like(ties, end)) for end in (-INF, INF))
    codes = torch.arange(len(ties), dtype=torch.uint8)
    even = codes + codes % 2
    for sign, bit in ((1, 0), (-1, 0x80)):
        for x, expected in ((ties, even), (below, codes), (above, codes + 1), (values.float(), None)):
            want = torch.arange(len(values), dtype=torch.uint8) if expected is None else expected
            out, _ = tg.fp8_cast((sign * x).to(device), torch.ones(1, device=device), dtype)
            assert_same_bits(out.view(torch.uint8), want | bit)


@pytest.mark.parametrize("dtype", FP8_DTYPES, ids=str)
def test_infinities_and_large_numbers_saturate_and_nan_stays(dtype, device):
    largest = FP8_MAX[dtype]
    x = torch.tensor([INF, -INF, 1e38, -1e38, largest * 1.01, NAN, -NAN, largest, 0.0, -0.0], device=device)
    out, _ = tg.fp8_cast(x, torch.ones(1, device=device), dtype)
    assert out.float()[:5].tolist() == [largest, -largest, largest, -largest, largest]
    assert out.view(torch.uint8)[5:7].tolist() == [FP8_NAN, FP8_NAN]
    assert out.view(torch.uint8)[7:].tolist() == [0x7E if dtype == E4M3 else 0x7B, 0, 0x80]


def test_a_product_that_overflows_fp32_saturates(device):
    x = torch.tensor([3e38, -3e38], device=device)
    assert tg.fp8_cast(x, torch.tensor(2.0, device=device))[0].float().tolist() == [448, -448]


def test_e4m3_is_the_default_format(device):
    x = torch.randn(5, 3, device=device)
    assert tg.fp8_cast(x, torch.ones(1, device=device))[0].dtype == E4M3


@formats
@pytest.mark.parametrize("offset", [1, 2, 3, 5, 8, 13])
def test_tensors_may_start_anywhere(offset, x_dtype, dtype, device, rng):
    for shape in ((37, 67), (64, 64), (1, 1), (1000,)):
        source = Poisoned(device)
        x = source.like(numbers(shape, x_dtype, device), offset)
        check(x, a_scale(rng, device, dtype), dtype, offset=rng.randrange(16))
        source.assert_guards_intact()


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "columns": lambda x: x[:, 3:40],
    "every third row": lambda x: x[::3],
    "every second column": lambda x: x[:, ::2],
    "a row": lambda x: x[5],
    "a column": lambda x: x[:, 7],
    "one row, repeated": lambda x: x[3:4].expand(9, -1),
    "three dimensions, permuted": lambda x: x[:60].view(4, 15, 53).permute(2, 0, 1),
    "rows behind the start": lambda x: x[11:],
}


@formats
@pytest.mark.parametrize("view", VIEWS)
def test_inputs_need_not_be_contiguous(view, x_dtype, dtype, device, rng):
    check(VIEWS[view](numbers((61, 53), x_dtype, device)), a_scale(rng, device, dtype), dtype)


def test_scales_of_shape_zero_and_one_are_the_same(device, rng):
    x, scale = numbers((17, 9), torch.bfloat16, device), a_scale(rng, device)
    many = torch.stack([scale * 2, scale, scale * 3]).view(3)
    expected = tg.fp8_cast(x, scale)
    for other in (scale.view(()), many[1], many[1:2]):
        assert all(map(same_bits, tg.fp8_cast(x, other), expected))


def test_inputs_that_require_gradients_are_cast_without_them(device):
    weight = torch.nn.Parameter(torch.randn(4, 8, device=device))
    with torch.no_grad():
        out, scale_inv = tg.fp8_cast(weight, torch.ones(1, device=device))
    assert not out.requires_grad and not scale_inv.requires_grad


def test_repeated_casts_have_the_same_bits(device, rng):
    x = numbers((301, 257), torch.float32, device)
    scale = a_scale(rng, device)
    first = tg.fp8_cast(x, scale)
    assert all(all(map(same_bits, tg.fp8_cast(x, scale), first)) for _ in range(3))
