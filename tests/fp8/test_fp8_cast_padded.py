"""Transposed casts whose rows end in zeros up to a multiple of 16, which matrix products sum over.

The bytes are those of the cast without; the reference is in test_fp8_cast_transpose.py.
"""

from __future__ import annotations

import random

import pytest
import torch
from fp8_references import FP8_DTYPES
from fp8_tensors import Poisoned, a_scale, assert_same_bits, numbers
from tensor_lists import same_bits

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")


@pytest.mark.parametrize("dtype", FP8_DTYPES)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 127, 129, 300])
def test_rows_end_in_zeros(device: str, rng: random.Random, dtype, x_dtype, rows: int) -> None:
    for columns in (1, 16, 43, 256):
        x, scale = numbers((rows, columns), x_dtype, device), a_scale(rng, device, dtype)
        amax = torch.zeros(1, device=device)
        expected, expected_t, _ = tg.fp8_cast_transpose(x, scale, dtype, amax=amax)
        padded = (rows + 15) // 16 * 16
        poisoned = Poisoned(device)
        out, out_t = poisoned.empty((rows, columns), dtype), poisoned.empty((columns, padded), dtype)
        own_amax, dbias = torch.zeros(1, device=device), torch.zeros(columns, device=device)
        tg.fp8_cast_transpose_out(out, out_t, x, scale, amax=own_amax, dbias=dbias)
        assert_same_bits(out, expected)
        assert_same_bits(out_t[:, :rows].contiguous(), expected_t)
        assert not out_t[:, rows:].view(torch.uint8).any()
        assert same_bits(own_amax, amax)
        poisoned.assert_guards_intact()


def test_other_sizes_are_refused(device: str) -> None:
    x, scale = torch.zeros(5, 8, device=device), torch.ones(1, device=device)
    out = torch.zeros(5, 8, device=device).to(FP8_DTYPES[0])
    for rows in (4, 6, 15, 32):
        out_t = torch.zeros(8, rows, device=device).to(FP8_DTYPES[0])
        with pytest.raises(ValueError, match=r"expected out_t of shape \[8, 16\], got"):
            tg.fp8_cast_transpose_out(out, out_t, x, scale)
