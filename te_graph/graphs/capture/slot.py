"""What one call in flight needs: a graph pair and the memory that belongs to it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from te_graph import _C
from te_graph.common.dispatch import storage_key


@dataclass
class Slot:
    """A graph pair and the memory that belongs to it. Tensors are [...] of the callable's shapes."""

    inputs: list[Tensor]
    states: Any  # of the random generator, which the forward notes and the backward restores
    forward: Any = None
    backward: Any = None
    outputs: list[Tensor] = field(default_factory=list)
    live_outputs: list[Tensor] = field(default_factory=list)  # with their autograd graph, until all is captured
    grad_outputs: list[_C.Staging] = field(default_factory=list)
    grad_inputs: list[Tensor | None] = field(default_factory=list)
    use_grads: list[list[Tensor]] = field(default_factory=list)  # of inputs that are used several times
    parameter_grads: list[Tensor] = field(default_factory=list)
    summed_inputs: list[int] = field(default_factory=list)  # of each entry of the table after the parameters'
    table: Any = None
    # What owns the memory of input gradients that were passed through, as long as captures must not get it.
    passed_on: list[Tensor | None] = field(default_factory=list)
    clones: int = 0  # of gradients that lie in memory which is not the backward's own

    @property
    def lent_storages(self) -> set:
        """Of the successor's input gradients, where the backward reads its own."""
        return {storage_key(staging.tensor) for staging in self.grad_outputs if staging.is_lent}

    def owned(self, grad: Tensor, own_storages: Container[int]) -> Tensor:
        """``grad`` [...] of an input, to be handed out: a clone where it lies in memory that is written by others, or
        before what is handed out is protected. Not so the ``own_storages`` of the backward, nor the successor's input
        gradient, which is protected like ours."""
        if storage_key(grad) in own_storages or storage_key(grad) in self.lent_storages:
            return grad
        self.clones += 1
        return grad.clone()
