"""What one call in flight needs: a graph pair and the memory that belongs to it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from te_graph import _C
from te_graph.common.dispatch import storage_key
from te_graph.graphs.tracing.externals import External


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

    def note_writes(self, externals: Mapping[int, External]) -> None:
        """Of the backward, which used ``externals``: gradients of results that it writes are not zero afterwards."""
        for staging in self.grad_outputs:
            external = externals.get(storage_key(staging.tensor))
            if external is not None and external.written:
                staging.note_write()

    def owned(self, grads: Iterable[Tensor], are_linked: Iterable[bool], own_storages: Container[int]) -> list[Tensor]:
        """``grads`` [...] of inputs, one each, to be handed out: clones where they lie in memory that is written by
        others, or before what is handed out is protected. Not so the ``own_storages`` of the backward, nor the
        successor's input gradient, which is protected like ours.

        What is handed to a predecessor in place (``are_linked``) shares its memory with no other one: where a hook, or
        a use outside, gives another gradient for it, that is copied there."""
        found: dict[int, bool] = {}  # whether a linked one lies in a storage
        handed_out = []
        for grad, is_linked in zip(grads, are_linked, strict=True):
            key = storage_key(grad)
            is_ours = key in own_storages or key in self.lent_storages
            if is_ours and not (key in found and (is_linked or found[key])):
                found[key] = is_linked or found.get(key, False)
            else:
                self.clones += 1
                grad = grad.clone()
            handed_out.append(grad)
        return handed_out
