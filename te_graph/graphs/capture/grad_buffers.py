"""Gradients that the ops which compute them add up by themselves, as FP8 products of te_graph.Linear do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.gradient_state import gradient_state, main_grad_of
from te_graph.graphs.capture.gradients import Destination


class GradBuffers:
    """The memory in which ops of a callable's backward add up gradients of parameters, and which ``.grad`` has.

    One for a parameter, the same in all slots. Where the first gradient is to be stored, a replay begins with negative
    zeros there, to which any number is added without a change.
    """

    def __init__(self) -> None:
        self._requests: list[tuple[Tensor, bool]] = []
        self._buffers: dict[int, Tensor] = {}
        self._with_others: set[int] = set()  # to which ops add that did not ask for them

    def __contains__(self, parameter: Tensor) -> bool:
        """Whether there is one for ``parameter`` [...]."""
        return id(parameter) in self._buffers

    def has_whole(self, parameter: Tensor) -> bool:
        """Whether all of the gradient of ``parameter`` [...] is what ops add up by themselves."""
        return parameter in self and id(parameter) not in self._with_others

    def note(self, steps: _C.HostSteps) -> None:
        """Take from the ``steps`` of a warm-up whose gradients ops would add up, and whether in ``main_grad``."""
        self._requests = steps.requested_grad_buffers

    def provide(self, parameters: list[Tensor], destinations: list[Destination], steps: _C.HostSteps) -> None:
        """Give ops that are about to be captured, with ``steps``, the buffers that they have requested.

        Those are made here, outside of the capture, once for all slots: for gradients that would go to ``.grad`` or
        ``main_grad`` by the table, as ``destinations`` say. A ``main_grad`` is the buffer itself.

        Args:
            parameters: [...] each.
            destinations: where their gradients go.
            steps: of the slot.
        """
        requested = {id(parameter): to_main_grad for parameter, to_main_grad in self._requests}
        for parameter, destination in zip(parameters, destinations, strict=True):
            main_grad, key = main_grad_of(parameter), id(parameter)
            if key not in requested or not destination.is_in_table or requested[key] == (main_grad is None):
                continue
            if main_grad is not None:
                self._buffers[key] = main_grad.detach()
            elif key not in self._buffers and destination.source_dtype == parameter.dtype:
                memory = gradient_state(parameter).grad_memory
                self._buffers[key] = torch.empty_like(parameter, requires_grad=False) if memory is None else memory
            if key in self._buffers:
                steps.offer_grad_buffer(parameter, self._buffers[key])

    @contextlib.contextmanager
    def unchanged(self, parameters: list[Tensor]) -> Iterator[None]:
        """Around a capture that runs what it records: ``main_grad`` of ``parameters`` [...] is afterwards as before."""
        buffers = [self._buffers[id(parameter)] for parameter in parameters if parameter in self]
        before = [buffer.clone() if buffer.device.type == "cpu" else None for buffer in buffers]
        try:
            yield
        finally:
            for buffer, values in zip(buffers, before, strict=True):
                if values is not None:
                    with torch.no_grad():
                        buffer.data.copy_(values)

    def gather_(self, parameters: list[Tensor], grads: list[Tensor | None], steps: _C.HostSteps) -> list[Tensor | None]:
        """``grads`` of ``parameters`` [...] and of others, with the buffers in the place of what they have in them.

        What comes of a parameter from other ops as well is added to its buffer.

        Raises:
            RuntimeError: an op of the capture, with ``steps``, did not use a buffer that it requested in the warm-up.
        """
        used = {id(parameter) for parameter, _ in steps.requested_grad_buffers}
        gathered = list(grads)
        for number, parameter in enumerate(parameters):
            if parameter not in self:
                continue
            if id(parameter) not in used:
                raise RuntimeError(
                    "te_graph: expected a backward that is the same in warm-up and capture, got another one"
                )
            gathered[number] = buffer = self._buffers[id(parameter)]
            if grads[number] is not None:
                self._with_others.add(id(parameter))
                with torch.no_grad():
                    buffer.add_(grads[number])
        return gathered

    def without_buffers(self, parameters: list[Tensor], grads: list[Tensor]) -> list[Tensor | None]:
        """``grads`` of ``parameters`` [...], without the buffers."""
        return [None if parameter in self else grad for parameter, grad in zip(parameters, grads, strict=True)]

    def with_buffers(self, parameters: list[Tensor], grads: list[Tensor | None]) -> list[Tensor]:
        """``grads`` of ``parameters`` [...], which ``without_buffers`` has returned, with the buffers."""
        return [self._buffers.get(id(parameter), grad) for parameter, grad in zip(parameters, grads, strict=True)]


def new_table(
    parameters: list[Tensor],
    destinations: list[Destination],
    buffers: GradBuffers,
    added: list[Tensor],
    device: torch.device,
) -> _C.GradientTable:
    """The table of a backward, all of whose entries are skipped until it is told otherwise.

    Args:
        parameters: [...] each.
        destinations: where their gradients go.
        buffers: of those whose gradients the table does not write.
        added: inputs [...] whose gradients of two uses the table adds up.
        device: of all.
    """
    sizes = [
        parameter.numel() if one.is_in_table and parameter not in buffers else 0
        for parameter, one in zip(parameters, destinations, strict=True)
    ]
    dtypes = [tensor.dtype for tensor in added]
    return _C.GradientTable(
        sizes=[*sizes, *(tensor.numel() for tensor in added)],
        source_dtypes=[*(one.source_dtype for one in destinations), *dtypes],
        destination_dtypes=[*(one.dtype for one in destinations), *dtypes],
        device=device,
    )
