"""Where parameters lie in a flat buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 256  # by which cuBLASLt chooses its kernels; vector loads need 16
# Elements that a norm sums in fp32 before it adds exactly. Ranks divide buckets between chunks only, so that a norm has
# the same bits for any number of ranks.
CHUNK = 8192


@dataclass(frozen=True)
class Bucket:
    """A run of a flat buffer that is reduced by one collective.

    Attributes:
        begin, end: elements; their difference divides by the number of ranks, into whole chunks.
        members: numbers of the parameters in it.
    """

    begin: int
    end: int
    members: range

    def part(self, rank: int, ranks: int) -> tuple[int, int]:
        """Begin and end of what belongs to ``rank``."""
        size = (self.end - self.begin) // ranks
        return self.begin + rank * size, self.begin + (rank + 1) * size


@dataclass(frozen=True)
class Layout:
    """Places of parameters that come one after the other, each at an aligned offset.

    Attributes:
        offsets: first element of each parameter.
        buckets: one behind the other, of all of the buffer.
        runs: begins and ends of what parameters fill without a gap, ascending; padding is between these.
    """

    offsets: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    runs: tuple[tuple[int, int], ...]

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.buckets[-1].end if self.buckets else 0

    @classmethod
    def of(cls, numels: Sequence[int], *, itemsize: int, bucket_numel: int, ranks: int) -> Layout:
        """That of parameters of ``numels`` elements.

        Args:
            itemsize: bytes of an element in the buffer that has the smallest ones.
            bucket_numel: elements from which on a bucket is full.
            ranks: among which each bucket is divided.
        """
        alignment = max(1, ALIGNMENT_BYTES // itemsize)
        offsets, buckets = [], []
        begin = end = first = 0
        for number, numel in enumerate(numels):
            offsets.append(end)
            end = _round_up(end + numel, alignment)
            if end - begin >= bucket_numel or number + 1 == len(numels):
                end = begin + _round_up(end - begin, CHUNK * ranks)
                buckets.append(Bucket(begin, end, range(first, number + 1)))
                begin, first = end, number + 1
        return cls(tuple(offsets), tuple(buckets), tuple(_runs(offsets, numels)))

    def filled(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Begins and ends of what parameters fill between two elements."""
        clipped = ((max(begin, first), min(end, last)) for first, last in self.runs)
        yield from ((first, last) for first, last in clipped if first < last)


def _runs(offsets: Sequence[int], numels: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for offset, numel in zip(offsets, numels, strict=True):
        begin = runs.pop()[0] if runs and runs[-1][1] == offset else offset
        runs.append((begin, offset + numel))
    return runs


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple
