"""Where parameters lie: aligned, in buckets that ranks can share, in the same chunks for any number of ranks."""

from __future__ import annotations

import random

import pytest
from seeds import first_seed

from te_graph.flat.layout import ALIGNMENT_BYTES, CHUNK, Layout


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_random_layouts(itemsize):
    draw = random.Random(first_seed("flat layouts"))
    for _ in range(200):
        numels = [
            draw.choice([0, 1, 7, 128, 8191, 8192, 8193, draw.randrange(40000)]) for _ in range(draw.randint(1, 12))
        ]
        bucket_numel = draw.choice([1, 1000, 20000, 10**9])
        by_ranks = {}
        for ranks in (1, 2, 3, 8):
            layout = by_ranks[ranks] = Layout.of(numels, itemsize=itemsize, bucket_numel=bucket_numel, ranks=ranks)
            end = 0
            for bucket in layout.buckets:
                assert bucket.begin == end and bucket.begin % CHUNK == 0
                end = bucket.end
                parts = [bucket.part(rank, ranks) for rank in range(ranks)]
                assert [begin for begin, _ in parts] == [bucket.begin, *(stop for _, stop in parts[:-1])]
                assert parts[-1][1] == bucket.end and all((stop - begin) % CHUNK == 0 for begin, stop in parts)
                # A bucket ends with the parameter that fills it.
                filled = sum(numels[number] for number in bucket.members)
                assert filled >= bucket_numel - len(bucket.members) * ALIGNMENT_BYTES or bucket is layout.buckets[-1]
                last = bucket.begin
                for number in bucket.members:
                    offset = layout.offsets[number]
                    assert offset >= last and offset * itemsize % ALIGNMENT_BYTES == 0
                    last = offset + numels[number]
                assert last <= bucket.end
            assert end == layout.numel
            cut = draw.randint(0, end)
            runs = [*layout.filled(0, cut), *layout.filled(cut, end)]
            assert runs == sorted(runs) and sum(last - begin for begin, last in runs) == sum(numels)
            for offset, numel in zip(layout.offsets, numels, strict=True):
                inside = (min(last, offset + numel) - max(begin, offset) for begin, last in runs)
                assert sum(one for one in inside if one > 0) == numel
            assert [number for bucket in layout.buckets for number in bucket.members] == list(range(len(numels)))
        # Chunks hold the same elements for any number of ranks, so norms have the same bits.
        for layout in by_ranks.values():
            chunks = [
                (offset - bucket.begin)
                for bucket in layout.buckets
                for offset in (layout.offsets[n] for n in bucket.members)
            ]
            assert chunks == [
                offset - bucket.begin
                for bucket in by_ranks[1].buckets
                for offset in (by_ranks[1].offsets[n] for n in bucket.members)
            ]
