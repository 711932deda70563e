"""Which gradients a rank counts in a norm, where several ranks have the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from te_graph.common.parameter_marks import is_copy, is_split
from te_graph.flat.flat_buffer import FlatBuffer
from te_graph.flat.layout import CHUNK


def counted_ranges(buffer: FlatBuffer, parts: Sequence[tuple[int, int]], is_first: bool) -> list[tuple[int, int]]:
    """Begins and ends of those, in elements of ``buffer``; at least one, which may be empty.

    Args:
        parts: begins and ends of what is whole on this rank, ascending.
        is_first: whether this rank counts what all ranks of its tensor-parallel group have.
    """
    left_out = [
        (begin, end)
        for parameter, begin, end in zip(
            buffer.parameters, buffer.layout.offsets, (*buffer.layout.offsets[1:], buffer.layout.numel), strict=True
        )
        if is_copy(parameter) or not (is_first or is_split(parameter))
    ]
    if not left_out:
        return list(parts)
    return [one for begin, end in parts for run in _without(left_out, begin, end) for one in _cut(*run)] or [(0, 0)]


def _without(left_out: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    for first, last in left_out:
        if first < end and last > begin:
            yield begin, first
            begin = last
    yield begin, end


def _cut(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Where sums of chunks begin alike, wherever the parts of ranks do: these begin with a chunk of the buffer."""
    chunk = -(-begin // CHUNK) * CHUNK
    yield from ((first, last) for first, last in ((begin, min(chunk, end)), (chunk, end)) if first < last)
