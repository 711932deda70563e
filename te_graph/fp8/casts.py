"""Casts to FP8 and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ops = torch.ops.te_graph
_E4M3 = torch.float8_e4m3fn


def fp8_cast(
    x: Tensor, scale: Tensor, dtype: torch.dtype = _E4M3, *, amax: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Cast a tensor to FP8.

    ``out = clamp(x * scale, -max, max)``, the product in float32, rounded to nearest even. NaN stays NaN, infinity
    becomes the largest number.

    Args:
        x: [...] float32, float16 or bfloat16. One that is not contiguous is copied first.
        scale: [] or [1] float32 on x's device. What multiplies into FP8.
        dtype: ``torch.float8_e4m3fn`` (largest number 448) or ``torch.float8_e5m2`` (57344).
        amax: [] or [1] float32. Mutated: ``max(amax, max |x|)``, of x before scaling; NaNs are left out, infinity
            counts. Such as one column of row 0 of an amax history.
        counts: [3] int64. Mutated: increased by the number of elements that saturated, that became zero and were not,
            and that were not finite. Costs registers, so casts with it are slower.

    Returns:
        The cast, [...] of ``dtype``, and ``1 / scale``, [1] float32, correctly rounded: what multiplies back. Both new.

    Raises:
        TypeError, ValueError: a dtype, shape or device is another one. Nothing has been written then.

    Stream and capture: allocates the results, launches one kernel, does not synchronize. Neither scale nor amax is read
        on the host, so a replay uses the values that they have by then.
        Semantics of the casts of TransformerEngine's delayed scaling; bits are those of the CPU loops on every device.
    """
    return _ops.fp8_cast(x, scale, dtype, amax=amax, counts=counts)


def fp8_cast_out(
    out: Tensor,
    x: Tensor,
    scale: Tensor,
    *,
    scale_inv: Tensor | None = None,
    amax: Tensor | None = None,
    counts: Tensor | None = None,
    noop: Tensor | None = None,
) -> None:
    """``fp8_cast`` into given tensors.

    Args:
        out: [...] of x's shape, contiguous, of an FP8 dtype. Mutated.
        x, scale, amax, counts: as for ``fp8_cast``.
        scale_inv: [] or [1] float32. Mutated.
        noop: [] or [1] int32, bool or float32. Unless it is 0 when the kernel runs, nothing is touched.

    Raises:
        TypeError, ValueError: as ``fp8_cast``; ``out`` overlaps ``x``.

    Stream and capture: as ``fp8_cast``, but allocates nothing where x is contiguous.
    """
    _ops.fp8_cast_out(out, x, scale, scale_inv=scale_inv, amax=amax, counts=counts, noop=noop)


def fp8_cast_transpose(
    x: Tensor, scale: Tensor, dtype: torch.dtype = _E4M3, *, amax: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """``fp8_cast`` of a matrix with a transposed copy, from one read.

    Hopper's FP8 GEMMs take both operands along the summed dimension only, so a weight is needed as it is for the
    forward and transposed for the gradient of the input.

    Args:
        x: [M, N], else as for ``fp8_cast``, like the others. Any M and N; multiples of 16 are fastest.

    Returns:
        The cast [M, N], the same transposed [N, M] and contiguous, and ``1 / scale`` [1]. All new.

    Raises:
        TypeError, ValueError: as ``fp8_cast``; x is no matrix.

    Stream and capture: as ``fp8_cast``.
    """
    return _ops.fp8_cast_transpose(x, scale, dtype, amax=amax, counts=counts)


def fp8_cast_transpose_dbias(
    x: Tensor, scale: Tensor, dtype: torch.dtype = _E4M3, *, amax: Tensor | None = None, counts: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``fp8_cast_transpose`` with the sums of x's columns, from the same read: a bias gradient.

    Sums are taken of x before scaling, in float32 in an order that depends on M alone, and rounded once: they repeat
    bit for bit, on every device.

    Args:
        x, scale, dtype, amax, counts: as for ``fp8_cast_transpose``; x is [M, N].

    Returns:
        Cast [M, N], transposed [N, M], ``1 / scale`` [1], and the sums [N] of x's dtype. All new.

    Raises:
        As ``fp8_cast_transpose``.

    Stream and capture: as ``fp8_cast``, with a second launch over 1/128 of the elements, and scratch memory for these.
    """
    return _ops.fp8_cast_transpose_dbias(x, scale, dtype, amax=amax, counts=counts)


def fp8_cast_transpose_out(
    out: Tensor,
    out_t: Tensor,
    x: Tensor,
    scale: Tensor,
    *,
    scale_inv: Tensor | None = None,
    amax: Tensor | None = None,
    dbias: Tensor | None = None,
    counts: Tensor | None = None,
    noop: Tensor | None = None,
) -> None:
    """``fp8_cast_transpose`` and ``fp8_cast_transpose_dbias`` into given tensors.

    Args:
        out: [M, N] contiguous, of an FP8 dtype. Mutated.
        out_t: [N, M] contiguous, of the same dtype. Mutated. Also [N, M rounded up to 16], whose rows end in zeros, as
            products that sum over M want them.
        x: [M, N]; x, scale, amax, counts as for ``fp8_cast``.
        scale_inv: [] or [1] float32. Mutated.
        dbias: [N] float32 or of x's dtype. Mutated: overwritten with the sums of x's columns.
        noop: as for ``fp8_cast_out``.

    Raises:
        TypeError, ValueError: as ``fp8_cast_transpose``; ``out``, ``out_t`` and ``x`` overlap.

    Stream and capture: as ``fp8_cast``, but allocates scratch memory for ``dbias`` alone.
    """
    _ops.fp8_cast_transpose_out(
        out, out_t, x, scale, scale_inv=scale_inv, amax=amax, dbias=dbias, counts=counts, noop=noop
    )


def fp8_cast_weights_(
    out: Sequence[Tensor],
    out_t: Sequence[Tensor],
    weights: Sequence[Tensor],
    scale: Tensor,
    scale_inv: Tensor,
    amax: Tensor,
    *,
    counts: Tensor | None = None,
    noop: Tensor | None = None,
) -> None:
    """``fp8_cast_transpose_out`` of many weights in one launch. ``Fp8Weights`` does it with less work on the host.

    Args:
        out: [M_i, N_i] each, contiguous, of FP8 dtypes. Mutated.
        out_t: [N_i, M_i] each, of the same dtypes, contiguous; or an empty list. Mutated.
        weights: [M_i, N_i] each, of any shapes, float32, float16 and bfloat16 mixed, contiguous.
        scale: [n] float32, of any stride, such as ``scales[1::3]``.
        scale_inv: [n] float32, of any stride. Mutated.
        amax: [n] float32, of any stride, such as ``amax_history[0, 1::3]``. Mutated: maxed into.
        counts: [n, 3] int64. Mutated, as ``fp8_cast`` says.
        noop: [] or [1] int32, bool or float32. Unless it is 0 when the kernel runs, nothing is touched.

    Raises:
        TypeError, ValueError: an empty list, lists of different lengths, tensors that do not fit, buffers that overlap.

    Stream and capture: allocates nothing. One launch for up to 384 weights; a replay casts the same weights from the
        same places.
    """
    _ops.fp8_cast_weights_(list(out), list(out_t), list(weights), scale, scale_inv, amax, counts=counts, noop=noop)


def fp8_dequantize(x: Tensor, scale_inv: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """What an FP8 tensor stands for: ``x * scale_inv``, the product in float32, rounded once.

    Args:
        x: [...] of an FP8 dtype. One that is not contiguous is copied first.
        scale_inv: [] or [1] float32 on x's device.
        dtype: float32, float16 or bfloat16.

    Returns:
        [...] of ``dtype``, new.

    Raises:
        TypeError, ValueError: a dtype, shape or device is another one.

    Stream and capture: allocates the result, launches one kernel, does not synchronize.
    """
    return _ops.fp8_dequantize(x, scale_inv, dtype)


def fp8_dequantize_out(out: Tensor, x: Tensor, scale_inv: Tensor) -> None:
    """``fp8_dequantize`` into a given tensor.

    Args:
        out: [...] of x's shape, contiguous, float32, float16 or bfloat16. Mutated.
        x: [...] of an FP8 dtype. Not mutated.
        scale_inv: [] or [1] float32 on x's device.

    Raises:
        TypeError, ValueError: a dtype, shape or device is another one.

    Stream and capture: launches one kernel, allocates nothing for an x that is contiguous, does not synchronize.
    """
    _ops.fp8_dequantize_out(out, x, scale_inv)
