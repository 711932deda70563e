"""Gradients of flat parameters that are set to zero where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.gradient_state import gradient_state

if TYPE_CHECKING:
    from te_graph.flat.flat_parameters import FlatParameters


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
    flat.reducer.forget_reduced(there.values())
