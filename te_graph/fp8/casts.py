"""Casts to FP8 and the scales that they take."""

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
        out_t: [N, M] contiguous, of the same dtype. Mutated.
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


def fp8_current_scale(
    x: Tensor, dtype: torch.dtype = _E4M3, *, eps: float = 0.0, power_of_2: bool = False
) -> tuple[Tensor, Tensor]:
    """The scale that brings the largest magnitude of x to the largest number of an FP8 format (current scaling).

    ``amax = max |x|``, NaN where x has one; ``scale`` is ``fp8_scale`` of it.

    Args:
        x: [...] float32, float16 or bfloat16. One that is not contiguous is copied first.
        dtype, eps, power_of_2: as for ``fp8_scale``.

    Returns:
        amax and scale, [1] float32 both, new. Reduce amax over ranks and give it to ``fp8_scale`` where they share it.

    Raises:
        TypeError, ValueError: a dtype or ``eps`` is wrong.

    Stream and capture: allocates the results and 8 bytes, launches a memset and one kernel, does not synchronize.
    """
    return _ops.fp8_current_scale(x, dtype, eps=eps, power_of_2=power_of_2)


def fp8_scale(
    amax: Tensor, dtype: torch.dtype = _E4M3, *, margin: float = 0.0, eps: float = 0.0, power_of_2: bool = False
) -> Tensor:
    """The scale for an amax: ``max(dtype) * 2**-margin / max(amax, eps)``, correctly rounded.

    1 where amax is 0, infinite or NaN; the largest float32 where the quotient overflows.

    Args:
        amax: [...] float32.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        margin: powers of two to stay below the largest number.
        eps: smallest amax to go by.
        power_of_2: round down to a power of two, of subnormal numbers too.

    Returns:
        [...] float32, new.

    Raises:
        TypeError, ValueError: a dtype, ``margin`` or ``eps`` is wrong.

    Stream and capture: allocates the result, launches one kernel. Semantics of TransformerEngine's current scaling.
    """
    return _ops.fp8_scale(amax, dtype, margin=margin, eps=eps, power_of_2=power_of_2)


def amax_and_scale_update_inplace(
    amax_history: Tensor,
    scale: Tensor,
    scale_inv: Tensor,
    non_weight_mask: Tensor,
    update_weight_scale_inv: Tensor | bool,
    fp8_max: float,
    margin: float = 0.0,
    amax_compute_algo: str = "max",
    *,
    skip_nonfinite: bool = False,
) -> None:
    """The update of delayed scaling, for all tensors of all modules in one launch, inside a graph too.

    For each column j of the history, whose row 0 holds what the casts left there since the last update::

        m = amax_history[0, j]  or the maximum of the column, NaNs left out
        scale[j] = fp8_max * 2**-margin / m         where m is positive and finite (at most the largest float32)
        amax_history[:, j] moves up by one row; the newest goes to the last row, the oldest but the newest is dropped
        amax_history[0, j] = 0
        scale_inv[j] = 1 / scale[j]                 where non_weight_mask[j], or update_weight_scale_inv

    A column whose row 0 is 0 did not run: its history and scale stay. Its scale_inv is written by the same rule as all
    others', so that a weight whose cast was skipped gets the one that goes with its scale once the flag says so.

    Args:
        amax_history: [H, n] float32, of any strides: ``history[:, 1::3]`` is some of the columns. Mutated.
        scale: [n] float32, of any stride. Mutated.
        scale_inv: [n] float32, of any stride. Mutated.
        non_weight_mask: [n] bool, False for weights; [0] where there are none.
        update_weight_scale_inv: [] or [1] int32, bool or float32 on the device, read when the kernel runs; such as
            ``StepState.update_weight_scale_inv``. A bool is frozen by a capture; ``KernelNode`` can set it afterwards.
        fp8_max: largest number of the format.
        margin: powers of two to stay below it.
        amax_compute_algo: "max" of the history, or "most_recent".
        skip_nonfinite: leave an infinite or NaN row 0 out of the history, as if the module had not run. Without it an
            infinity freezes the scale for as long as it is in the history.

    Raises:
        TypeError, ValueError: a dtype, shape, device or value is wrong. Nothing has been written then.

    Stream and capture: allocates nothing, one launch, does not synchronize.
        Semantics of TransformerEngine's ``amax_and_scale_update_after_reduction``, with the mask and the flag of its
        Paddle operator ``amax_and_scale_update_inplace``; where they differ (row 0 is 0, overflow) it is the former.
    """
    _ops.amax_and_scale_update_inplace(
        amax_history,
        scale,
        scale_inv,
        non_weight_mask,
        update_weight_scale_inv,
        fp8_max,
        margin,
        amax_compute_algo,
        skip_nonfinite=skip_nonfinite,
    )
