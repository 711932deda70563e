"""What the casts do beside casting, the same for all: scale_inv, amax, counts, and nothing at all when noop is set."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from fp8_references import E4M3, FLT_MAX, FP8_DTYPES, reciprocal, reference_cast
from fp8_tensors import (
    EMPTY_SHAPES,
    FLAGS,
    LARGE_SHAPES,
    SET_FLAGS,
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
SHAPES = [(1, 1), (13, 7), (64, 64), (129, 65), *LARGE_SHAPES[:4]]

NEW: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "fp8_cast": tg.fp8_cast,
    "fp8_cast_transpose": tg.fp8_cast_transpose,
    "fp8_cast_transpose_dbias": tg.fp8_cast_transpose_dbias,
}


def into_given(name: str, poisoned: Poisoned, x: Tensor, dtype: torch.dtype) -> Callable[..., None]:
    """The form of op ``name`` that casts ``x`` [M, N] into new poisoned memory: call it with scale and keywords."""
    out = poisoned.empty(x.shape, dtype)
    if name == "fp8_cast":
        return lambda scale, **extras: tg.fp8_cast_out(out, x, scale, **extras)
    out_t = poisoned.empty(x.shape[::-1], dtype)
    dbias = {"dbias": poisoned.empty(x.shape[1:], torch.float32)} if name.endswith("dbias") else {}
    return lambda scale, **extras: tg.fp8_cast_transpose_out(out, out_t, x, scale, **dbias, **extras)


casts = pytest.mark.parametrize("name", NEW)


# scale_inv

SCALES = [1.0, 3.0, 1 / 3, 448.0, FLT_MAX, 2.0**127, 1.2e-38, 2.0**-126, 1e-38, 1e-40, 1e-45, 0.0, INF]


@casts
def test_scale_inv_is_the_correctly_rounded_reciprocal_of_the_scale(name, device, rng):
    x, poisoned = torch.ones(2, 3, device=device), Poisoned(device)
    for value in SCALES + [math.ldexp(rng.uniform(1, 2), rng.randrange(-126, 128)) for _ in range(200)]:
        scale = torch.tensor([value], device=device)
        written = [poisoned.empty((), torch.float32), poisoned.empty((1,), torch.float32, 1)]
        for scale_inv in written:
            into_given(name, poisoned, x, E4M3)(scale, scale_inv=scale_inv)
        for scale_inv in (*written, NEW[name](x, scale)[2 if "transpose" in name else 1]):
            assert_same_bits(scale_inv.reshape(1), reciprocal(scale), value)
    poisoned.assert_guards_intact()


@casts
def test_the_scale_inv_of_nan_is_nan(name, device):
    scale = torch.tensor([NAN], device=device)
    assert NEW[name](torch.ones(2, 3, device=device), scale)[2 if "transpose" in name else 1].isnan().item()


@casts
@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_nothing_to_cast_still_writes_scale_inv_and_leaves_amax_and_counts(name, shape, device):
    poisoned = Poisoned(device)
    scale_inv, amax = poisoned.empty((1,), torch.float32), torch.tensor([2.5], device=device)
    counts = torch.tensor([1, 2, 3], device=device)
    call = into_given(name, poisoned, torch.empty(shape, device=device), E4M3)
    call(torch.tensor([4.0], device=device), scale_inv=scale_inv, amax=amax, counts=counts)
    assert (scale_inv.item(), amax.item(), counts.tolist()) == (0.25, 2.5, [1, 2, 3])


# amax


def check_amax(name: str, x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    expected = reference_cast(x, scale, dtype).amax
    for start in (0.0, expected.item() / 3, expected.item(), max(expected.item() * 2, 1.0)):
        amaxes = [torch.tensor(start, device=x.device), torch.full((4, 3), start, device=x.device)[2, 1:2]]
        for amax in amaxes:
            poisoned = Poisoned(x.device.type)
            with no_sync(x.device.type):
                into_given(name, poisoned, x, dtype)(scale, amax=amax)
            poisoned.assert_guards_intact()
        amaxes.append(torch.tensor([start], device=x.device))
        NEW[name](x, scale, dtype, amax=amaxes[-1])
        for amax in amaxes:
            assert_same_bits(amax.reshape(1), torch.maximum(expected, torch.tensor([start])))


@casts
@formats
def test_amax_becomes_the_largest_magnitude_of_the_unscaled_input_if_that_is_larger(name, x_dtype, dtype, device, rng):
    for shape in SHAPES:
        check_amax(name, numbers(shape, x_dtype, device), a_scale(rng, device, dtype), dtype)


@casts
@pytest.mark.parametrize("where", [0, 1, 63, 64, -1])
@pytest.mark.parametrize("value", [-1e4, 1e-7, INF, -INF, NAN])
def test_amax_finds_one_element_anywhere_counts_infinity_and_drops_nan(name, value, where, device):
    for x_dtype in X_DTYPES:
        x = torch.zeros(37, 131, device=device, dtype=x_dtype)
        x.view(-1)[where] = value
        amax = torch.zeros(1, device=device)
        NEW[name](x, torch.ones(1, device=device), amax=amax)
        assert_same_bits(amax, x.view(-1)[where].abs().float().nan_to_num(0.0, INF).reshape(1).cpu())


@casts
def test_amax_touches_only_its_element_of_a_history(name, device, rng):
    history = torch.rand(5, 7, device=device)
    expected = history.clone()
    x = numbers((33, 20), torch.bfloat16, device) * 1000
    expected[0, 3] = x.abs().max()
    NEW[name](x, a_scale(rng, device), amax=history[0, 3])
    assert same_bits(history, expected)


# counts


@casts
@formats
def test_counts_are_added_up_of_what_saturated_underflowed_and_was_not_finite(name, x_dtype, dtype, device, rng):
    total = torch.tensor([5, 6, 2**40], device=device)
    expected = total.cpu().clone()
    for shape in SHAPES:
        x = with_specials(numbers(shape, x_dtype, device), rng)
        scale = a_scale(rng, device, dtype) * rng.choice([1.0, 1e-6])
        new, reference = torch.zeros(3, dtype=torch.int64, device=device), reference_cast(x, scale, dtype)
        expected += reference.counts
        NEW[name](x, scale, dtype, counts=new)
        assert_same_bits(new, reference.counts, shape)
        poisoned = Poisoned(device)
        with no_sync(device):
            into_given(name, poisoned, x, dtype)(scale, counts=total)
        poisoned.assert_guards_intact()
    assert_same_bits(total, expected)


# Values whose product with the scale is at the border, and what they count as: saturated, underflowed, not finite.
BORDERS = [
    (448.0, 1.0, [0, 0, 0]),
    (math.nextafter(448.0, INF) + 1e-4, 1.0, [1, 0, 0]),  # rounds to 448, but is larger
    (-449.0, 1.0, [1, 0, 0]),
    (3e38, 3e38, [1, 0, 0]),  # the product is Inf
    (2.0**-10, 1.0, [0, 1, 0]),  # the tie between 0 and the smallest number
    (2.0**-10 * 1.0001, 1.0, [0, 0, 0]),
    (-1e-30, 1e-30, [0, 1, 0]),  # the product is 0 in fp32
    (1e-45, 1.0, [0, 1, 0]),
    (0.0, 1.0, [0, 0, 0]),
    (-0.0, 1.0, [0, 0, 0]),
    (5.0, 0.0, [0, 0, 0]),  # it is the scale that is 0
    (INF, 1.0, [0, 0, 1]),
    (-INF, 0.0, [0, 0, 1]),
    (NAN, 1.0, [0, 0, 1]),
    (2.0, INF, [1, 0, 0]),
    (2.0, NAN, [0, 0, 0]),
]


@casts
@pytest.mark.parametrize(("value", "scale", "expected"), BORDERS, ids=lambda v: str(v))
def test_counts_at_the_borders(name, value, scale, expected, device):
    counts = torch.zeros(3, dtype=torch.int64, device=device)
    NEW[name](torch.tensor([[value]], device=device), torch.tensor([scale], device=device), counts=counts)
    assert counts.tolist() == expected


@casts
def test_counts_may_be_a_row_of_a_table(name, device, rng):
    table = torch.zeros(4, 3, dtype=torch.int64, device=device)
    x, scale = numbers((50, 40), torch.float32, device), a_scale(rng, device)
    NEW[name](x, scale, counts=table[2])
    expected = torch.zeros(4, 3, dtype=torch.int64)
    expected[2] = reference_cast(x, scale, E4M3).counts
    assert_same_bits(table, expected)


# noop


@casts
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize(("dtype", "value"), SET_FLAGS, ids=str)
def test_a_set_noop_leaves_every_byte_as_it_was(name, dtype, value, shape, device, rng):
    poisoned, noop = Poisoned(device), torch.full(shape, value, dtype=dtype, device=device)
    for x_shape in ((1, 1), (64, 64), (129, 65), (5, 0)):
        extras = {
            "scale_inv": poisoned.empty((1,), torch.float32),
            "amax": poisoned.empty((1,), torch.float32),
            "counts": poisoned.empty((3,), torch.int64),
        }
        x = with_specials(numbers(x_shape, torch.bfloat16, device), rng)
        with no_sync(device):
            into_given(name, poisoned, x, E4M3)(a_scale(rng, device), noop=noop, **extras)
    poisoned.assert_untouched()


@casts
@pytest.mark.parametrize("dtype", FLAGS, ids=str)
@pytest.mark.parametrize("fp8", FP8_DTYPES, ids=str)
def test_a_noop_of_zero_changes_no_result(name, fp8, dtype, device, rng):
    for value in (0, -0.0):
        x, scale = numbers((130, 70), torch.float16, device), a_scale(rng, device, fp8)
        results = []
        for extra in ({}, {"noop": torch.tensor(value, device=device).to(dtype)}):
            poisoned, amax = Poisoned(device), torch.zeros(1, device=device)
            scale_inv, counts = torch.zeros(1, device=device), torch.zeros(3, dtype=torch.int64, device=device)
            into_given(name, poisoned, x, fp8)(scale, scale_inv=scale_inv, amax=amax, counts=counts, **extra)
            results.append((*poisoned.placed, amax, scale_inv, counts))
        assert all(map(same_bits, *results))
        assert_same_bits(amax, reference_cast(x, scale, fp8).amax)


@casts
def test_noop_is_read_when_the_op_runs(name, device, rng):
    """Device order counts: what is written into the flag before the op is seen by it, without a wait."""
    x, noop, poisoned = numbers((40, 50), torch.float32, device), torch.ones(1, device=device), Poisoned(device)
    call, scale_inv = into_given(name, poisoned, x, E4M3), poisoned.empty((1,), torch.float32)
    scale = a_scale(rng, device)
    call(scale, scale_inv=scale_inv, noop=noop)
    poisoned.assert_untouched()
    noop.zero_()
    call(scale, scale_inv=scale_inv, noop=noop)
    assert_same_bits(scale_inv, reciprocal(scale))
