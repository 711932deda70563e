"""Products of FP8 matrices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from te_graph import _C
from te_graph.fp8.flops import let_flops_be_counted

_ops = torch.ops.te_graph


def fp8_gemm(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    *,
    bias: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor:
    """``a_scale_inv * b_scale_inv * (a @ b.T) + bias``, added up in float32 and rounded once.

    On the CPU, and on GPUs without FP8, the product is made in float32. Bits are the same in all runs, on one kind of
    GPU with one version of cuBLASLt, wherever the operands lie.

    Args:
        a: [M, K] of an FP8 dtype, rows contiguous, any M.
        b: [N, K] of an FP8 dtype, not torch.float8_e5m2 where ``a`` is. On CUDA 16 divides K and strides, and rows of
            the result are of a multiple of 16 bytes; all operands lie at such multiples.
        a_scale_inv, b_scale_inv: [] or [1] float32.
        dtype: of the result: float32, float16 or bfloat16.
        bias: [N] float32, float16 or bfloat16.
        fast_accum: add up with fewer bits (Hopper): faster, and good enough for a forward.

    Returns:
        [M, N] of ``dtype``, new.

    Raises:
        TypeError, ValueError: a dtype, shape, stride, device or address is another one.
        RuntimeError: cuBLASLt has no kernel for it; a capture is under way, and no product of these sizes came before.

    Stream and capture: allocates the result and what the kernel needs, launches one product (two kernels where it is
        split), and the addition of a bias to a float32 result, does not synchronize. The first product of given sizes
        on a GPU asks cuBLASLt for a kernel, so it comes before a capture.
    """
    let_flops_be_counted()
    return _ops.fp8_gemm(a, b, a_scale_inv, b_scale_inv, dtype, bias=bias, fast_accum=fast_accum)


def fp8_gemm_out(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    *,
    bias: Tensor | None = None,
    fast_accum: bool = False,
    accumulate: bool = False,
) -> None:
    """``fp8_gemm`` into a given tensor.

    Args:
        out: [M, N] float32, float16 or bfloat16, contiguous. Mutated.
        a, b, a_scale_inv, b_scale_inv, bias, fast_accum: as for ``fp8_gemm``: [M, K], [N, K], [1], [1], [N].
        accumulate: add the rounded product to ``out``, with the bits of ``out.add_(product)``.

    Raises:
        TypeError, ValueError, RuntimeError: as ``fp8_gemm``; ``out`` overlaps another.

    Stream and capture: as ``fp8_gemm``, without the result.
    """
    let_flops_be_counted()
    _ops.fp8_gemm_out(out, a, b, a_scale_inv, b_scale_inv, bias=bias, fast_accum=fast_accum, accumulate=accumulate)


def fp8_plans() -> list[dict[str, Any]]:
    """How cuBLASLt computes the products that were made so far, those used last first.

    Returns:
        Of each its sizes (rows, columns, inner), dtypes, whether it adds a bias or to its result, and the numbers of
        cuBLASLt's algorithm, tile and stages, into how many parts the inner dimension is split, bytes of workspace.
        Empty in a build without CUDA.
    """
    return _C.fp8_gemm_plans()
