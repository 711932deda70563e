"""Time of an operation on the device, with the host's part hidden, and time of its call on the host alone."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from lib.common import synchronizer

# The launches of this much host time stay far below the thousand that fit the device's queue.
QUEUED_SECONDS = 1.5e-3
CYCLES_PER_SECOND = 2e9  # no GPU's clock is much faster, so that a sleep of so many cycles is long enough
LONGEST_SLEEP = 0.2


@dataclass(frozen=True)
class Patience:
    """How long to measure: medians of `repeats` numbers, each over calls of about `seconds`."""

    repeats: int
    seconds: float


def micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def time_calls(step: Callable[[], Any], device: str, patience: Patience) -> float:
    """Median seconds for which one `step` occupies the calling thread while the device has nothing else to do."""
    synchronize = synchronizer(device)

    def one() -> float:
        synchronize()
        start = perf_counter()
        step()
        return perf_counter() - start

    one()
    calls = max(3, min(10 * patience.repeats, math.ceil(patience.seconds / max(one(), 1e-7))))
    median = statistics.median(one() for _ in range(calls))
    synchronize()
    return median


def time_device(
    step: Callable[[], Any],
    host_seconds: float,
    device: str,
    patience: Patience,
    prepare: Callable[[], None] = lambda: None,
) -> float:
    """Median seconds of one `step` on the device, between events around many of them.

    The device sleeps while the calls are queued, so that it does not wait for the host, as far as the queue holds them:
    a step whose call takes long is measured alone, and one of more launches than the queue holds partly waits.

    Args:
        step: What is timed; has run before.
        host_seconds: What `time_calls` found.
        device: "cuda" or "cpu". On a CPU the time of the call is the time.
        patience: How long to measure.
        prepare: Called before each repeat, outside the time.
    """
    if device == "cpu":
        return host_seconds

    def repeat(calls: int) -> float:
        prepare()
        return _elapsed(step, calls, host_seconds)

    calls = max(1, min(int(QUEUED_SECONDS / host_seconds), math.ceil(patience.seconds / repeat(1))))
    return statistics.median(repeat(calls) for _ in range(patience.repeats))


def _elapsed(step: Callable[[], Any], calls: int, host_seconds: float) -> float:
    """Seconds per call between two events on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    # Twice the time that the calls are expected to take, and the time of this call and of the first event.
    torch.cuda._sleep(int(min(LONGEST_SLEEP, 2 * calls * host_seconds + 1e-4) * CYCLES_PER_SECOND))
    start.record()
    for _ in range(calls):
        step()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def measure_bandwidth(device: str, patience: Patience, nbytes: int) -> dict[str, float]:
    """Bytes per second on buffers of `nbytes`: "copy" counts what is read and written, "read" a norm of one buffer."""
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)

    def rate(step: Callable[[], Any], moved: int) -> float:
        return moved / time_device(step, time_calls(step, device, patience), device, patience)

    return {
        "copy": rate(lambda: target.copy_(source), 2 * nbytes),
        "read": max(rate(lambda: torch.linalg.vector_norm(source), nbytes), rate(source.sum, nbytes)),
    }
