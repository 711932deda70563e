"""Sources that a walk has found, for a second guard."""

from __future__ import annotations

from torch import nn

from te_graph.graphs.guards.sources import Source, TensorReader, copies_of, walk


def way_to(source: Source | None) -> list[tuple]:
    way = []
    while source is not None:
        way.append((id(source.obj), source.name, source.kind, source.key, source.index))
        source = source.parent
    return way


def test_copies_are_the_same_ways_to_the_same_objects_and_know_no_steps() -> None:
    shared = nn.Linear(2, 2)
    sources = list(walk(TensorReader(nn.Sequential(shared, nn.Sequential(shared, nn.ReLU())))))
    for number, source in enumerate(sources):
        source.step, source.in_guard = number, True
    copies = copies_of(sources)
    assert list(map(way_to, copies)) == list(map(way_to, sources))
    assert not {id(one) for one in copies} & {id(one) for one in sources}
    assert all(one.step == -1 and not one.in_guard for one in copies)
    again = [(one.again, other.again) for one, other in zip(sources, copies, strict=True) if one.again is not None]
    assert again
    assert all(copies[sources.index(first)] is copy for first, copy in again)
    assert all(source.step == number for number, source in enumerate(sources))
