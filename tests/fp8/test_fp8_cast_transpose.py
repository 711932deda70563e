"""fp8_cast_transpose, its form with the bias gradient, and their form that writes into given memory.

The bytes against ``reference_cast``, the transposed ones against the same, transposed; sums of columns against fp64.
What casts compute beside that is tested in test_fp8_cast_extras.py.
"""

from collections.abc import Callable

import pytest
import torch
from fp8_references import E4M3, column_sums, reference_cast
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

pytestmark = pytest.mark.usefixtures("repeatable")
INF, NAN = torch.inf, torch.nan


def check(x: Tensor, scale: Tensor, dtype: torch.dtype, offsets: tuple[int, int] = (0, 0)) -> None:
    """All forms on ``x`` [M, N]; those that write into given memory into poisoned one."""
    (m, n), device = x.shape, x.device.type
    expected = reference_cast(x, scale, dtype)
    before, poisoned = x.clone(), Poisoned(device)
    into, into_t = poisoned.empty((m, n), dtype, offsets[0]), poisoned.empty((n, m), dtype, offsets[1])
    with no_sync(device):
        out, out_t, scale_inv = tg.fp8_cast_transpose(x, scale, dtype)
        others = tg.fp8_cast_transpose_dbias(x, scale, dtype)
        assert tg.fp8_cast_transpose_out(into, into_t, x, scale) is None
    for row, column in ((out, out_t), others[:2], (into, into_t)):
        assert row.is_contiguous() and column.is_contiguous()
        assert_same_bits(row, expected.out, (m, n))
        assert_same_bits(column, expected.out.t().contiguous(), (m, n))
    assert_same_bits(scale_inv, expected.scale_inv)
    assert same_bits(others[2], scale_inv)
    poisoned.assert_guards_intact()
    assert same_bits(x, before)


@formats
@pytest.mark.parametrize("shape", [*SMALL_SHAPES, *EMPTY_SHAPES, *LARGE_SHAPES], ids=str)
def test_both_copies_have_the_bytes_of_the_reference(shape, x_dtype, dtype, device, rng):
    check(with_specials(numbers(shape, x_dtype, device), rng), a_scale(rng, device, dtype), dtype)


@pytest.mark.parametrize("i", [1, 2], ids=lambda i: str(HUGE_SHAPES[i]))
def test_both_copies_of_millions_of_elements(i, device, rng):
    x_dtype, dtype = FORMATS[3 + i]
    check(numbers(HUGE_SHAPES[i], x_dtype, device), a_scale(rng, device, dtype), dtype)


@pytest.mark.gpu
@formats
@pytest.mark.parametrize("shape", HUGE_SHAPES, ids=str)
def test_both_copies_of_millions_of_elements_in_all_formats(shape, x_dtype, dtype, rng):
    check(with_specials(numbers(shape, x_dtype, "cuda"), rng), a_scale(rng, "cuda", dtype), dtype)


@formats
def test_both_copies_of_random_shapes_at_any_address(x_dtype, dtype, device, rng):
    for _ in range(30):
        shape = rng.randrange(1, 200), rng.randrange(1, 200)
        if rng.random() < 0.5:  # rows of which each is aligned, in memory that is not, and the other way round
            shape = shape[0] // 16 * 16 + 16, shape[1] // 16 * 16 + 16
        source = Poisoned(device)
        x = source.like(numbers(shape, x_dtype, device), rng.choice([0, 0, 1, 3, 8]))
        check(x, a_scale(rng, device, dtype), dtype, offsets=(rng.choice([0, 1, 8, 13]), rng.choice([0, 1, 4, 15])))
        source.assert_guards_intact()


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[3:38],
    "rows from an odd one, to an odd one": lambda x: x[7:8],
    "columns": lambda x: x[:, 3:40],
    "aligned columns": lambda x: x[:, 16:32],
    "transposed": lambda x: x.t(),
    "every third row": lambda x: x[::3],
    "every second column": lambda x: x[:, ::2],
    "one row, repeated": lambda x: x[3:4].expand(9, -1),
    "no row": lambda x: x[5:5],
}


@formats
@pytest.mark.parametrize("view", VIEWS)
def test_inputs_may_be_slices_and_other_views(view, x_dtype, dtype, device, rng):
    for columns in (53, 64):
        check(VIEWS[view](numbers((61, columns), x_dtype, device)), a_scale(rng, device, dtype), dtype)


def test_outputs_may_be_rows_of_larger_buffers(device, rng):
    """As for the shards of a weight: one buffer, and a cast of its own for each part."""
    x, scale = numbers((50, 33), torch.bfloat16, device), a_scale(rng, device)
    expected = reference_cast(x, scale, E4M3)
    poisoned = Poisoned(device)
    rows, columns = poisoned.empty((50, 33), E4M3), [poisoned.empty((33, n), E4M3) for n in (7, 23, 20)]
    for (start, end), column in zip(((0, 7), (7, 30), (30, 50)), columns, strict=True):
        tg.fp8_cast_transpose_out(rows[start:end], column, x[start:end], scale)
    assert_same_bits(rows, expected.out)
    assert_same_bits(torch.cat([column.view(torch.uint8) for column in columns], 1).view(E4M3), expected.out.t())
    poisoned.assert_guards_intact()


def test_e4m3_is_the_default_format(device):
    x, scale = torch.randn(5, 3, device=device), torch.ones(1, device=device)
    assert tg.fp8_cast_transpose(x, scale)[0].dtype == tg.fp8_cast_transpose_dbias(x, scale)[1].dtype == E4M3


# The bias gradient.


def assert_sums(dbias: Tensor, x: Tensor) -> None:
    """``dbias`` [N] holds the sums of the columns of ``x`` [M, N], within what sums in fp32 and one rounding allow."""
    expected, tolerance = column_sums(x)
    half_ulp = expected.abs() * torch.finfo(dbias.dtype).eps / 2 + torch.finfo(dbias.dtype).smallest_normal
    error = (dbias.cpu().double() - expected).abs()
    assert dbias.shape == expected.shape and bool((error <= tolerance * 1.01 + half_ulp * 1.01).all()), error.max()


@formats
@pytest.mark.parametrize("shape", [*SMALL_SHAPES, *EMPTY_SHAPES, *LARGE_SHAPES], ids=str)
def test_dbias_is_the_sum_of_the_columns_of_the_unscaled_input(shape, x_dtype, dtype, device, rng):
    x, scale = numbers(shape, x_dtype, device), a_scale(rng, device, dtype)
    dbias = tg.fp8_cast_transpose_dbias(x, scale, dtype)[3]
    assert dbias.dtype == x_dtype and dbias.device == x.device
    assert_sums(dbias, x)


@pytest.mark.parametrize("x_dtype", X_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 7), (64, 64), (1481, 677), (2333, 1), (0, 9)], ids=str)
def test_dbias_in_fp32_rounds_to_that_in_the_dtype_of_the_input(shape, x_dtype, device, rng):
    x, scale = numbers(shape, x_dtype, device), a_scale(rng, device)
    poisoned = Poisoned(device)
    wide, narrow = poisoned.empty(shape[1:], torch.float32, 1), poisoned.empty(shape[1:], x_dtype, 3)
    for dbias in (wide, narrow):
        into, into_t = poisoned.empty(shape, E4M3), poisoned.empty(shape[::-1], E4M3)
        tg.fp8_cast_transpose_out(into, into_t, x, scale, dbias=dbias)
        assert_same_bits(into, reference_cast(x, scale, E4M3).out)
    assert_sums(wide, x)
    assert same_bits(wide.to(x_dtype), narrow)
    assert same_bits(narrow, tg.fp8_cast_transpose_dbias(x, scale)[3])
    poisoned.assert_guards_intact()


def test_dbias_of_many_rows_is_as_accurate_as_a_sum_in_blocks(device):
    """A running sum of 2^17 ones and small numbers in one fp32 would lose the small ones."""
    x = torch.full((2**17, 3), 1.0, device=device)
    x[:, 1] += 2.0**-10
    x[::2, 2] = -1.0
    sums = tg.fp8_cast_transpose_dbias(x, torch.ones(1, device=device))[3]
    assert sums.tolist() == [2.0**17, 2.0**17 + 2.0**7, 0.0]


def test_dbias_repeats_bit_for_bit(device, rng):
    x, scale = numbers((5003, 131), torch.bfloat16, device), a_scale(rng, device)
    first = torch.empty(131, device=device)
    outs = torch.empty(5003, 131, device=device, dtype=E4M3), torch.empty(131, 5003, device=device, dtype=E4M3)
    tg.fp8_cast_transpose_out(*outs, x, scale, dbias=first)
    for copy in (x, x.clone(), Poisoned(device).like(x, 1)):
        for _ in range(3):
            again = torch.empty(131, device=device)
            tg.fp8_cast_transpose_out(*outs, copy, scale, dbias=again)
            assert same_bits(again, first)


def test_what_is_not_finite_shows_in_its_column_of_dbias_alone(device):
    x = torch.randn(70, 5, device=device)
    x[69, 1], x[3, 2], x[40, 3], x[41, 3] = INF, NAN, INF, -INF
    dbias = tg.fp8_cast_transpose_dbias(x, torch.ones(1, device=device))[3]
    assert dbias[1].item() == INF and dbias[2:4].isnan().all()
    assert_sums(dbias[[0, 4]], x[:, [0, 4]])
