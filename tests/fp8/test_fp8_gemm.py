"""Products of FP8 matrices, against products in float64 of what the operands stand for, and exactly for integers."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from calls import run_alone
from fp8_references import E4M3, E5M2
from fp8_tensors import Poisoned, assert_same_bits
from tensor_lists import same_bits
from torch import Tensor

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]
WIDE = (torch.float32, torch.float16, torch.bfloat16)
# Of the result; and of the sum, of which Hopper's tensor cores keep about 14 bits: from one instruction to the next
# when they add up fast, else within one.
ROUNDING = {torch.float32: 2**-22, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def operands(m: int, n: int, k: int, formats: tuple, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """[m, k] and [n, k] of two formats, and a scale_inv of each, [1]."""
    a, b = (torch.randn(rows, k, device=device).to(dtype) for rows, dtype in zip((m, n), formats, strict=True))
    return a, b, torch.tensor([0.37], device=device), torch.tensor([1.6], device=device)


def reference(a: Tensor, b: Tensor, a_inv: Tensor, b_inv: Tensor) -> Tensor:
    """The product [m, n] in float64."""
    return a.double() @ b.double().t() * a_inv.double() * b_inv.double()


def assert_close(actual: Tensor, expected: Tensor, a: Tensor, b: Tensor, inv: float) -> None:
    """Each element of the product of a [m, k] and b [n, k] is right up to its rounding and to that of the sum."""
    magnitude = (a.double().abs() @ b.double().abs().t()) * inv
    error = (actual.double() - expected).abs()
    allowed = ROUNDING[actual.dtype] * expected.abs() + (2**-11 if a.is_cuda else 2**-20) * magnitude
    assert actual.shape == expected.shape
    assert (error <= allowed).all(), f"off by {(error - allowed).max()} more than allowed"


@pytest.mark.parametrize("formats", PAIRS, ids=["e4m3 e4m3", "e4m3 e5m2", "e5m2 e4m3"])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("m", [0, 1, 2, 7, 129])
def test_products_are_right(device: str, formats: tuple, dtype: torch.dtype, m: int) -> None:
    for n, k in ((16, 16), (48, 160), (64, 400)):
        a, b, a_inv, b_inv = operands(m, n, k, formats, device)
        expected, inv = reference(a, b, a_inv, b_inv), 0.37 * 1.6
        assert_close(tg.fp8_gemm(a, b, a_inv, b_inv, dtype), expected, a, b, inv)
        assert_close(tg.fp8_gemm(a, b, a_inv, b_inv, dtype, fast_accum=True), expected, a, b, inv)
        for bias_dtype in (dtype, torch.float32):
            bias = torch.randn(n, device=device).to(bias_dtype)
            added = expected + bias.to(dtype).double()
            assert_close(tg.fp8_gemm(a, b, a_inv, b_inv, dtype, bias=bias), added, a, b, inv * 4)
        poisoned = Poisoned(device)
        out = poisoned.empty((m, n), dtype)
        tg.fp8_gemm_out(out, a, b, a_inv, b_inv)
        assert_same_bits(out, tg.fp8_gemm(a, b, a_inv, b_inv, dtype))
        poisoned.assert_guards_intact()
        start = torch.randn(m, n, device=device).to(dtype)
        out = start.clone()
        tg.fp8_gemm_out(out, a, b, a_inv, b_inv, accumulate=True)
        assert_same_bits(out, start.add_(tg.fp8_gemm(a, b, a_inv, b_inv, dtype)))
        out.fill_(-0.0)
        tg.fp8_gemm_out(out, a, b, a_inv, b_inv, accumulate=True)
        assert_same_bits(out, tg.fp8_gemm(a, b, a_inv, b_inv, dtype))


@pytest.mark.parametrize("k", [16, 32, 96, 528, 1040, 8192, 8208, 16384])
def test_products_of_small_integers_are_exact(device: str, k: int) -> None:
    """Whatever parts the sum is split into: all partial sums are integers below 2^24."""
    a, b = (torch.randint(-8, 9, (rows, k), device=device) for rows in (33, 64))
    one = torch.ones(1, device=device)
    expected = (a.double() @ b.double().t()).float()
    for fast in (False, True) if k <= 96 else (False,):
        product = tg.fp8_gemm(a.float().to(E4M3), b.float().to(E4M3), one, one, torch.float32, fast_accum=fast)
        assert torch.equal(product, expected)


def test_rows_may_lie_apart(device: str) -> None:
    a, b, a_inv, b_inv = operands(9, 32, 96, (E4M3, E4M3), device)
    wide_a, wide_b = torch.zeros(9, 160, device=device).to(E4M3), torch.zeros(32, 128, device=device).to(E4M3)
    wide_a[:, :96], wide_b[:, 32:] = a, b
    expected = tg.fp8_gemm(a, b, a_inv, b_inv, torch.float32)
    assert same_bits(tg.fp8_gemm(wide_a[:, :96], wide_b[:, 32:], a_inv, b_inv, torch.float32), expected)


def test_a_single_row_may_have_any_stride(device: str) -> None:
    a, b, a_inv, b_inv = operands(1, 16, 32, (E4M3, E4M3), device)
    column = a.flatten()[:, None].contiguous().t()
    assert column.stride() == (1, 1)
    assert same_bits(tg.fp8_gemm(column, b, a_inv, b_inv), tg.fp8_gemm(a, b, a_inv, b_inv))


def test_regions_of_autocast_change_nothing(device: str) -> None:
    a, b, a_inv, b_inv = operands(9, 32, 96, (E4M3, E4M3), device)
    expected = tg.fp8_gemm(a, b, a_inv, b_inv, torch.float32)
    with torch.autocast(device, torch.bfloat16):
        assert same_bits(tg.fp8_gemm(a, b, a_inv, b_inv, torch.float32), expected)


def bad_calls(device: str) -> dict[str, tuple[Any, dict[str, Any], type[Exception], str]]:
    """Arguments, keyword arguments, and what is raised."""
    a, b, a_inv, b_inv = operands(4, 16, 32, (E4M3, E4M3), device)
    good, bf16 = (a, b, a_inv, b_inv), torch.bfloat16
    return {
        "dtype of a": ((a.float(), b, a_inv, b_inv, bf16), {}, TypeError, "expected a of dtype torch.float8_e4m3fn or"),
        "two e5m2": ((a.to(E5M2), b.to(E5M2), a_inv, b_inv, bf16), {}, TypeError, "got two of torch.float8_e5m2"),
        "dimensions": ((a[0], b, a_inv, b_inv, bf16), {}, ValueError, "expected a of two dimensions, got shape [32]"),
        "rows": ((a, b[:, :16], a_inv, b_inv, bf16), {}, ValueError, "rows of one length, got [4, 32] and [16, 16]"),
        "strides": ((a.t(), a.t(), a_inv, b_inv, bf16), {}, ValueError, "expected a with contiguous rows"),
        "dtype": ((*good, torch.int8), {}, TypeError, "expected dtype torch.float32, torch.float16 or torch.bfloat16"),
        "scale": ((a, b, a_inv.double(), b_inv, bf16), {}, TypeError, "expected a_scale_inv of dtype torch.float32"),
        "scales": ((a, b, torch.ones(4, device=device), b_inv, bf16), {}, ValueError, "a_scale_inv of one element"),
        "bias": ((*good, bf16), {"bias": torch.zeros(4, device=device)}, ValueError, "expected bias of shape [16]"),
        "bias of int": ((*good, bf16), {"bias": torch.zeros(16, dtype=torch.int32, device=device)}, TypeError, "bias"),
    }


@pytest.mark.parametrize("name", bad_calls("cpu"))
def test_bad_input_is_refused(device: str, name: str) -> None:
    arguments, options, error, message = bad_calls(device)[name]
    with pytest.raises(error, match=f"^fp8_gemm: .*{re.escape(message)}"):
        tg.fp8_gemm(*arguments, **options)


def test_bad_results_are_refused(device: str) -> None:
    a, b, a_inv, b_inv = operands(16, 16, 16, (E4M3, E4M3), device)
    with pytest.raises(ValueError, match=r"^fp8_gemm_out: expected out of shape \[16, 16\], got \[8, 16\]"):
        tg.fp8_gemm_out(torch.zeros(8, 16, device=device), a, b, a_inv, b_inv)
    with pytest.raises(ValueError, match=r"^fp8_gemm_out: expected out to be contiguous"):
        tg.fp8_gemm_out(torch.zeros(16, 16, device=device).t()[:, ::1].t()[::1].t(), a, b, a_inv, b_inv)
    memory = torch.zeros(16 * 16 * 4, dtype=torch.uint8, device=device)
    overlapping = memory[:256].view(E4M3).view(16, 16)
    with pytest.raises(ValueError, match=r"^fp8_gemm_out: expected out and a that do not overlap"):
        tg.fp8_gemm_out(memory.view(torch.float32).view(16, 16), overlapping, b, a_inv, b_inv)


@pytest.mark.gpu
def test_sizes_and_addresses_that_kernels_cannot_take_are_refused() -> None:
    a, b, a_inv, b_inv = operands(4, 16, 32, (E4M3, E4M3), "cuda")
    memory, scales = torch.zeros(1024, dtype=torch.uint8, device="cuda"), torch.ones(8, device="cuda")
    aside = memory[8 : 8 + 4 * 32].view(E4M3).view(4, 32)
    with pytest.raises(ValueError, match="expected a at a multiple of 16 bytes, got one at an offset of 8"):
        tg.fp8_gemm(aside, b, a_inv, b_inv)
    with pytest.raises(ValueError, match="expected a_scale_inv at a multiple of 16 bytes"):
        tg.fp8_gemm(a, b, scales[1:2], b_inv)
    with pytest.raises(ValueError, match="expected a with rows and strides of multiples of 16"):
        tg.fp8_gemm(a[:, :24], b[:, :24], a_inv, b_inv)
    with pytest.raises(ValueError, match="expected a result with rows of a multiple of 16 bytes, got 12 columns"):
        tg.fp8_gemm(a, b[:12], a_inv, b_inv)


@pytest.mark.gpu
def test_bits_do_not_depend_on_addresses_and_repeat(rng: random.Random) -> None:
    m, n, k = 130, 256, 1024
    a, b, a_inv, b_inv = operands(m, n, k, (E4M3, E5M2), "cuda")
    expected = tg.fp8_gemm(a, b, a_inv, b_inv)
    plans = len(tg.fp8_plans())
    scales = torch.zeros(64, device="cuda")
    for _ in range(50):
        places = [Poisoned("cuda").like(each, offset=16 * rng.choice((0, 1, 2, 3, 16))) for each in (a, b)]
        number = 4 * rng.randrange(8)
        scales[number], scales[32 + number] = a_inv[0], b_inv[0]
        inverses = scales[number : number + 1], scales[32 + number : 33 + number]
        assert same_bits(tg.fp8_gemm(*places, *inverses), expected)
    assert len(tg.fp8_plans()) == plans
    assert tg.fp8_plans()[0]["rows"] == m


@pytest.mark.gpu
def test_a_product_whose_first_one_is_captured_has_the_bits_of_eager_ones(rng: random.Random) -> None:
    m, n, k = (16 * rng.randrange(1, 99) for _ in range(3))
    a, b, a_inv, b_inv = operands(m, n, k, (E4M3, E4M3), "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tg.fp8_gemm(a, b, a_inv, b_inv)
    out.zero_()
    graph.replay()
    assert same_bits(out, tg.fp8_gemm(a, b, a_inv, b_inv))


@pytest.mark.gpu
def test_the_first_product_of_a_process_may_be_captured() -> None:
    run_alone(
        """
        import torch, te_graph as tg

        a = torch.ones(32, 64, device="cuda").to(torch.float8_e4m3fn)
        one, graph = torch.ones(1, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tg.fp8_gemm(a, a, one, one, torch.bfloat16)
        graph.replay()
        assert bool((out == 64).all()), out
        """
    )


@pytest.mark.gpu
def test_streams_share_no_workspace() -> None:
    """Products of few tiles and long sums are split into parts, which meet in a workspace."""
    a, b, a_inv, b_inv = operands(64, 64, 16384, (E4M3, E4M3), "cuda")
    expected = tg.fp8_gemm(a, b, a_inv, b_inv)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(500):
        found = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(tg.fp8_gemm(a, b, a_inv, b_inv))
        torch.cuda.synchronize()
        assert all(same_bits(each, expected) for each in found)


def test_plans_are_listed(device: str) -> None:
    a, b, a_inv, b_inv = operands(5, 32, 64, (E4M3, E4M3), device)
    tg.fp8_gemm(a, b, a_inv, b_inv)
    plans = tg.fp8_plans()
    if device == "cpu":
        assert all(plan["device"] >= 0 for plan in plans)  # of other tests
        return
    newest = plans[0]
    assert (newest["rows"], newest["columns"], newest["inner"], newest["split_k"] >= 0) == (5, 32, 64, True)
