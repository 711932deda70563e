"""Time of a call inside a graph that holds many, on buffers taken in turn: a call finds none of its own cached."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from lib.timing import Sampling, time_calls, time_device
from lib.units import micro

FOOTPRINT = 4 * 60 * 2**20  # four times the L2 cache of an H200
FEWEST_SLOTS, MOST_SLOTS = 2, 128
FEWEST_CALLS = 32  # in a graph of short calls, beside which launching the graph counts for little

Call = Callable[[int], Any]  # of the slot whose buffers it is to use


class Problem(Protocol):
    """What calls work on.

    Attributes:
        kind: What variants tell problems apart by.
        device: "cuda" or "cpu".
        slots: Sets of buffers.
        prepare: Called before each timed replay, which then is one alone; None where calls can be repeated.
    """

    kind: str
    device: str
    slots: int
    prepare: Callable[[], None] | None

    def calls(self, op: str) -> int:
        """How many calls a graph is to hold; a multiple of `slots`."""

    def clear(self) -> None:
        """Make all that calls write as it was before the first of them."""

    def verify(self, op: str, results: Sequence[Any]) -> None:
        """Raise RuntimeError unless `results`, of a call on each slot, are those of plain torch."""


def slots_for(nbytes: int, device: str) -> int:
    """How many sets of buffers of `nbytes` make up FOOTPRINT. On a CPU they only have to take turns."""
    if device == "cpu":
        return FEWEST_SLOTS
    return max(FEWEST_SLOTS, min(MOST_SLOTS, math.ceil(FOOTPRINT / nbytes)))


def calls_for(slots: int) -> int:
    """At least FEWEST_CALLS, each slot as often as the others."""
    return slots * math.ceil(FEWEST_CALLS / slots)


def capture(call: Call, slots: int, calls: int) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """A graph of `calls` calls that take turns on the slots, and what the last call on each slot returned.

    What a call allocates stays allocated until the next one on its slot, so that these buffers take turns, too.
    """
    graph, results = torch.cuda.CUDAGraph(), [None] * slots
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for number in range(calls):
            results[number % slots] = call(number % slots)
    return graph, results


def time_rotated(call: Call, problem: Problem, op: str, sampling: Sampling) -> dict[str, float]:
    """Verify a call, run by itself and out of a graph, and time it: device time in the graph, host time by itself.

    Raises:
        RuntimeError: results differ from those of plain torch.
    """
    slots, device = range(problem.slots), problem.device
    for slot in slots:  # compiles, loads kernels, allocates
        call(slot)
    problem.clear()
    problem.verify(op, [call(slot) for slot in slots])
    turns = itertools.cycle(slots)
    host = time_calls(lambda: call(next(turns)), device, sampling)
    seconds = host if device == "cpu" else _time_in_graph(call, problem, op, sampling)
    return {"device_us": micro(seconds), "host_us": micro(host)}


def _time_in_graph(call: Call, problem: Problem, op: str, sampling: Sampling) -> float:
    calls = problem.calls(op)
    graph, results = capture(call, problem.slots, calls)
    problem.clear()
    graph.replay()
    problem.verify(op, results)
    host = time_calls(graph.replay, problem.device, sampling)
    if problem.prepare is None:
        return time_device(graph.replay, host, problem.device, sampling) / calls
    once = replace(sampling, seconds=0.0)
    return time_device(graph.replay, host, problem.device, once, problem.prepare) / calls
