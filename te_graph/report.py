"""te_graph.info(): one line for each graphed callable and each function of graphed()."""

from __future__ import annotations

from typing import Any

from te_graph.common.reporters import reporters


def info() -> str:
    """What was captured and how much of the training runs from graphs, as text.

    Returns:
        One line for each callable or function that is graphed now, functions since their first call: the share of its
        calls that were replayed, signatures, graphs, nodes, memory, seconds of capture, and the reason of each eager
        call.
        The same numbers as a dictionary are in ``.te_graph.info()`` of a callable, ``.info()`` of a function.
    """
    return "\n".join(_line(reporter.info()) for reporter in reporters())


def _line(facts: dict[str, Any]) -> str:
    eager = sum(facts["eager_calls"].values())
    calls = facts["forward_replays"] + eager
    share = f"{facts['forward_replays'] / calls:.0%} of {calls} calls replayed" if calls else "not called yet"
    parts = [
        f"{facts['name']}: {share}",
        _count(facts["signatures"], "signature"),
        _count(facts["graphs"], "graph"),
        _count(facts["nodes"], "node"),
        f"{facts['bytes'] / 2**20:.1f} MiB",
        f"captured in {facts['capture_seconds']:.2f} s",
    ]
    if facts["recaptures"]:
        parts.append(f"captured again {_count(facts['recaptures'], 'time')}")
    reasons = [f"{count} x {reason}" for reason, count in facts["eager_calls"].items()]
    return ", ".join(parts) + (f"; eager: {', '.join(reasons)}" if reasons else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
