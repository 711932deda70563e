"""Gradients of flat parameters that are dropped, or set to zero where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.gradient_state import flat_of, gradient_state
from te_graph.common.opaque import opaque

if TYPE_CHECKING:
    from te_graph.flat.flat_parameters import FlatParameters


@opaque
def zero_flat_grads(parameters: Iterable[Tensor], set_to_none: bool) -> None:
    """Drop, or set to zero, the gradients of those ``parameters`` [...] that are flat, in whichever ``FlatParameters``,
    with what was put aside of them."""
    by_flat: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        by_flat.setdefault(flat_of(parameter), []).append(parameter)
    by_flat.pop(None, None)
    for flat, members in by_flat.items():
        gradients = _C.FlatGradients([gradient_state(parameter).flat_gradient for parameter in members])
        if set_to_none:
            gradients.drop()
        else:
            set_to_zero_(flat, members, gradients)


@torch.no_grad()
def set_to_zero_(flat: FlatParameters, parameters: Sequence[Tensor], gradients: _C.FlatGradients) -> None:
    """Set the gradients of ``parameters`` [...] of ``flat`` to zero; those that are missing stay so.

    Args:
        gradients: those of ``parameters``, in their order.
    """
    gradients.note_read()
    for buffer in flat.buffers:
        buffer.settle_()
    missing, elsewhere = set(gradients.missing()), dict(gradients.elsewhere())
    for grad in elsewhere.values():
        if grad.grad_fn is not None:
            grad.detach_()
    there = {n: parameter for n, parameter in enumerate(parameters) if n not in missing}
    if there:
        torch._foreach_zero_([elsewhere.get(n, gradient_state(one).grad_memory) for n, one in there.items()])
    gradients.note_written()
    flat.reducer.note_zeros(there.values())
