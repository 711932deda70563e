"""The parts of parameters that this rank steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from te_graph import _C
from te_graph.common.own_objects import OwnObject
from te_graph.flat.flat_buffer import FlatBuffer

if TYPE_CHECKING:
    from te_graph.flat.flat_parameters import FlatParameters


@dataclass(frozen=True)
class Segment:
    """What this rank steps of one parameter.

    Attributes:
        name, parameter: the parameter, [...].
        gradient: of the parameter.
        begin, end: elements of it, in the order of its memory.
        master: [end - begin], what the optimizer steps, [] of a parameter of shape []: float32, the parameter's own
            memory if that is of float32.
        data: like ``master``, the parameter's own memory.
        grad: like ``master``, the gradient's.
    """

    name: str
    parameter: Tensor
    gradient: _C.FlatGradient
    begin: int
    end: int
    master: nn.Parameter
    data: Tensor
    grad: Tensor

    @property
    def is_copied(self) -> bool:
        """Whether ``master`` is a copy."""
        return self.master.dtype != self.data.dtype

    def part_of(self, values: Tensor) -> Tensor:
        """What belongs to this of ``values`` [...] like the parameter, as ``master`` is shaped."""
        in_order = torch.empty_like(self.parameter, dtype=values.dtype, requires_grad=False).copy_(values)
        part = in_order.as_strided((in_order.numel(),), (1,))[self.begin : self.end]
        return part.view(self.master.shape)

    def set_grad(self) -> None:
        """Give ``master`` the gradient of this step, or none."""
        if self.gradient.is_missing():
            self.master.grad = None
            return
        elsewhere = self.gradient.elsewhere()
        grad = self.grad if elsewhere is None else self.part_of(elsewhere)
        self.master.grad = grad.to(self.master.dtype)

    @torch.no_grad()
    def master_now(self) -> Tensor:
        """Like ``master``, what it is to be: of a copy the values of the parameter where these are not its own,
        rounded, in new memory."""
        if not self.is_copied:
            return self.master.detach()
        rounded = self.master.to(self.data.dtype)
        return torch.where(rounded == self.data, self.master, self.data.to(self.master.dtype))

    def read_parameter(self) -> None:
        """Let ``master``, a copy, be ``master_now``."""
        self.master.data.copy_(self.master_now())


class ParameterVersions(OwnObject):
    """Tells by version counters, which each write moves on, whether others may have written parameters."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._parameters = [segment.parameter for segment in segments]
        self.note()

    def note(self) -> None:
        """From now on writes are others'."""
        self._noted = self._current()

    def have_changed(self) -> bool:
        """Whether something was written since ``note``."""
        return self._noted != self._current()

    def _current(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]


def segments_of(flat: FlatParameters, parameters: Iterable[Tensor]) -> list[Segment]:
    """Those of ``parameters`` [...] of ``flat`` that lie on this rank in part, in their order."""
    places = {
        id(parameter): (buffer, number) for buffer in flat.buffers for number, parameter in enumerate(buffer.parameters)
    }
    segments = []
    for parameter in parameters:
        buffer, number = places[id(parameter)]
        segments.extend(_segment_in(buffer, number, flat.own_parts(buffer)))
    return segments


def _segment_in(buffer: FlatBuffer, number: int, parts: list[tuple[int, int]]) -> list[Segment]:
    """That of parameter ``number`` of ``buffer``, which lies in one bucket, so that at most one of ``parts`` has some.

    A parameter without elements gets an empty segment on each rank: then all know whether it has a state.
    """
    parameter, offset = buffer.parameters[number], buffer.layout.offsets[number]
    if parameter.numel() == 0:
        return [_segment(buffer, number, 0, 0)]
    clipped = ((max(begin, offset), min(end, offset + parameter.numel())) for begin, end in parts)
    return [_segment(buffer, number, begin - offset, end - offset) for begin, end in clipped if begin < end]


def _segment(buffer: FlatBuffer, number: int, begin: int, end: int) -> Segment:
    parameter, offset = buffer.parameters[number], buffer.layout.offsets[number]
    shape = parameter.shape if parameter.dim() == 0 else (end - begin,)
    data, grad = (values[offset + begin : offset + end].view(shape) for values in (buffer.data, buffer.grads))
    master = nn.Parameter(data if data.dtype in (torch.float32, torch.float64) else data.float())
    return Segment(buffer.names[number], parameter, buffer.gradients[number], begin, end, master, data, grad)
