"""What ``torch.utils.flop_counter`` counts for the products of FP8 matrices.

The module takes some tens of milliseconds to import, as it imports Triton, so it gets the formulas only where others
have imported it: a program that counts has, by the time it makes a region.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

_MODULE = "torch.utils.flop_counter"
_ops = torch.ops.te_graph
_Shape = Sequence[int]
_is_registered = False


def let_flops_be_counted() -> None:
    """Give torch's counter the formulas, once it is there; also counters that are counting already."""
    global _is_registered
    if _is_registered or _MODULE not in sys.modules:
        return
    counter = sys.modules[_MODULE]
    if not hasattr(counter, "FlopCounterMode"):  # another thread is importing it
        return
    _is_registered = True
    for op, formula in _FORMULAS.items():
        if op not in counter.flop_registry:
            counter.register_flop_formula(op)(formula)
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        of_mode = getattr(getattr(mode, "counter", None), "flop_registry", None)  # a copy of its own
        if of_mode is not None:
            of_mode.update((op, counter.flop_registry[op]) for op in _FORMULAS if op not in of_mode)


def _of_forward(x: _Shape, weight: _Shape, *args: Any, **kwargs: Any) -> int:
    """x [..., I], weight [O, I]."""
    return 2 * math.prod(x[:-1]) * math.prod(weight)


def _of_backward(grad: _Shape, weight_t: _Shape | None, *args: Any, **kwargs: Any) -> int:
    """grad [..., O], weight_t [I, O], x_t [I, padded(M)]; the gradients of x and the weight are a product each."""
    x_t, mask = args[1], args[8]
    inputs = [shape[0] for shape, is_asked_for in ((weight_t, mask[0]), (x_t, mask[1])) if is_asked_for]
    return 2 * math.prod(grad) * sum(inputs)


def _of_gemm(a: _Shape, b: _Shape, *args: Any, **kwargs: Any) -> int:
    """a [M, K], b [N, K]."""
    return 2 * math.prod(a) * b[0]


def _of_gemm_out(out: _Shape, a: _Shape, b: _Shape, *args: Any, **kwargs: Any) -> int:
    """As ``_of_gemm``, into out [M, N]."""
    return _of_gemm(a, b)


_FORMULAS: dict[Any, Callable[..., int]] = {
    _ops.fp8_linear_forward: _of_forward,
    _ops.fp8_linear_backward: _of_backward,
    _ops.fp8_gemm: _of_gemm,
    _ops.fp8_gemm_out: _of_gemm_out,
}
