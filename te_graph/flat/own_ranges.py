"""Which gradients a rank has, and which of these it counts in a norm, where several ranks have the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from te_graph.common.parameter_marks import is_copy, is_split
from te_graph.flat.flat_buffer import FlatBuffer
from te_graph.flat.layout import CHUNK

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class OwnRanges:
    """What a rank has of the gradients in buffers, without padding, and what of that it counts."""

    def __init__(
        self, buffers: Sequence[FlatBuffer], parts: Sequence[Sequence[tuple[int, int]]], tp_group: ProcessGroup | None
    ) -> None:
        """
        Args:
            parts: of each buffer, begins and ends of what is whole on this rank, ascending.
            tp_group: whose first rank counts what all its ranks have; None: this one does.
        """
        counts_alike = tp_group is None or tp_group.rank() == 0
        self._buffers = buffers
        self._filled = [
            [run for begin, end in own for run in buffer.layout.filled(begin, end)] or [(0, 0)]
            for buffer, own in zip(buffers, parts, strict=True)
        ]
        self._counted = [_counted_ranges(buffer, own, counts_alike) for buffer, own in zip(buffers, parts, strict=True)]

    def filled(self) -> list[Tensor]:
        """[n] each, what this rank has."""
        return self._views(self._filled)

    def counted(self) -> list[Tensor]:
        """[n] each, what it counts, perhaps with padding between."""
        return self._views(self._counted)

    def _views(self, ranges: Sequence[Sequence[tuple[int, int]]]) -> list[Tensor]:
        return [
            buffer.grads[begin:end] for buffer, own in zip(self._buffers, ranges, strict=True) for begin, end in own
        ]


def _counted_ranges(buffer: FlatBuffer, parts: Sequence[tuple[int, int]], counts_alike: bool) -> list[tuple[int, int]]:
    """Begins and ends of those, in elements of ``buffer``; at least one, which may be empty."""
    left_out = [
        (begin, end)
        for parameter, begin, end in zip(
            buffer.parameters, buffer.layout.offsets, (*buffer.layout.offsets[1:], buffer.layout.numel), strict=True
        )
        if is_copy(parameter) or not (counts_alike or is_split(parameter))
    ]
    if not left_out:
        return list(parts)
    return [one for begin, end in parts for run in _without(left_out, begin, end) for one in _cut(*run)] or [(0, 0)]


def _without(left_out: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    for first, last in left_out:
        if first < end and last > begin:
            if begin < first:
                yield begin, first
            begin = last
    if begin < end:
        yield begin, end


def _cut(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Split at the first chunk boundary of the buffer, so that chunk sums begin at the same elements whichever rank has
    the range."""
    chunk = -(-begin // CHUNK) * CHUNK
    yield from ((first, last) for first, last in ((begin, min(chunk, end)), (chunk, end)) if first < last)
