"""What ``te_graph.info()`` reports: everything that is graphed now."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class CaptureFacts:
    """What ``info()`` of a graphed callable or function reports."""

    name: str
    backend: str | None
    signatures: int
    slots: int
    graphs: int
    nodes: int
    fp8_calls: int
    clones: int
    bytes: int
    capture_seconds: float
    recaptures: int
    in_flight: int
    forward_replays: int
    backward_replays: int
    eager_calls: dict[str, int]

    def line(self) -> str:
        """In one line, for ``te_graph.info()``."""
        calls = self.forward_replays + sum(self.eager_calls.values())
        share = f"{self.forward_replays / calls:.0%} of {calls} calls replayed" if calls else "not called yet"
        parts = [
            f"{self.name}: {share}",
            _count(self.signatures, "signature"),
            _count(self.graphs, "graph"),
            _count(self.nodes, "node"),
            *([_count(self.fp8_calls, "FP8 layer")] if self.fp8_calls else []),
            f"{self.bytes / 2**20:.1f} MiB",
            f"captured in {self.capture_seconds:.2f} s",
        ]
        if self.recaptures:
            parts.append(f"captured again {_count(self.recaptures, 'time')}")
        reasons = [f"{count} x {reason}" for reason, count in self.eager_calls.items()]
        return ", ".join(parts) + (f"; eager: {', '.join(reasons)}" if reasons else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


class Reporter(Protocol):
    """Has an ``info()``."""

    def info(self) -> dict[str, Any]: ...


# Of the whole process, as info() is: callables of different make_graphed_callables know nothing of each other.
_live: list[weakref.ref[Reporter]] = []
_collecting: list[list[Reporter]] = []  # of keep_registered() in progress


def register(reporter: Reporter) -> None:
    """Let ``te_graph.info()`` report ``reporter`` for as long as it lives; the list does not keep it alive."""
    if any(reference() is reporter for reference in _live):
        return
    _live.append(weakref.ref(reporter, _live.remove))
    for kept in _collecting:
        kept.append(reporter)


def unregister(reporter: Reporter) -> None:
    """Let ``te_graph.info()`` no longer report ``reporter``."""
    _live[:] = [reference for reference in _live if reference() is not reporter]


def reporters() -> Iterator[Reporter]:
    """Those that live, in the order of their registration."""
    for reference in list(_live):
        if (reporter := reference()) is not None:
            yield reporter


@contextlib.contextmanager
def keep_registered() -> Iterator[list[Reporter]]:
    """Collects what is registered meanwhile, and so keeps it alive, to be asked afterwards."""
    kept: list[Reporter] = []
    _collecting.append(kept)
    try:
        yield kept
    finally:
        _collecting[:] = [other for other in _collecting if other is not kept]
