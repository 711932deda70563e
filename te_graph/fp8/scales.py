"""Scales of casts to FP8."""

from __future__ import annotations

import torch
from torch import Tensor

_ops = torch.ops.te_graph
_E4M3 = torch.float8_e4m3fn


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
