"""Clocks: wall time of steps back to back, host time of calls while the device is busy or idle, time on the device."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

WARMUP_CALLS = 3
# The driver blocks the caller once about a thousand launches wait for the device. Three calls of the largest eager
# workload stay below that, since the device works while they are queued.
TIMED_CALLS_PER_BURST = 2
CALLS_PER_TURN = 5
# The launches of this much host time stay far below the thousand that fit the device's queue.
QUEUED_SECONDS = 1.5e-3
CYCLES_PER_SECOND = 2e9  # no GPU's clock is much faster, so that a sleep of so many cycles is long enough
LONGEST_SLEEP = 0.2
BANDWIDTH_BYTES, SMALL_BANDWIDTH_BYTES = 2**32, 2**22  # of the buffers of `measure_bandwidth`


@dataclass(frozen=True)
class Sampling:
    """How long to measure: `repeats` numbers, each over calls of at least or about `seconds`, and `bursts` of
    `time_host`."""

    repeats: int
    seconds: float
    bursts: int = 0


def synchronizer(device: str) -> Callable[[], None]:
    """What waits for `device`, "cuda" or "cpu"."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def median_us(seconds: Sequence[float], calls: int) -> float:
    """Median as microseconds for one of the `calls` that each time in `seconds` holds."""
    return round(statistics.median(seconds) * 1e6 / calls, 3)


def time_wall(step: Callable[[], None], synchronize: Callable[[], None], sampling: Sampling) -> list[float]:
    """Seconds from one end of `step` to the next when it is called without pause, device work included.

    Args:
        step: What is timed; may return before the device has done the work.
        synchronize: Waits for the device.
        sampling: `repeats` and `seconds` are used.

    Returns:
        One mean per repeat, over as many calls as fill `sampling.seconds`. An additional repeat goes ahead as warm-up.
    """

    def run(calls: int) -> float:
        synchronize()
        start = perf_counter()
        for _ in range(calls):
            step()
        synchronize()
        return (perf_counter() - start) / calls

    run(WARMUP_CALLS)
    calls = max(3, math.ceil(sampling.seconds / run(WARMUP_CALLS)))
    return [run(calls) for _ in range(sampling.repeats + 1)][1:]


def time_host(
    parts: Sequence[Callable[[], None]], synchronize: Callable[[], None], bursts: int
) -> tuple[list[float], ...]:
    """Seconds for which each part of a step occupies the calling thread, one number per timed call.

    Each burst begins with a step that is not timed, so that the others find the device busy, and ends before the queue
    of launches is full.

    Args:
        parts: What is timed, in the order in which one step calls them.
        synchronize: Waits for the device.
        bursts: How many, of `TIMED_CALLS_PER_BURST` timed steps each.
    """
    times: tuple[list[float], ...] = tuple([] for _ in parts)
    for _ in range(bursts):
        synchronize()
        for part in parts:
            part()
        for _ in range(TIMED_CALLS_PER_BURST):
            for part, found in zip(parts, times, strict=True):
                start = perf_counter()
                part()
                found.append(perf_counter() - start)
    synchronize()
    return times


def time_calls(step: Callable[[], Any], device: str, sampling: Sampling) -> float:
    """Median seconds for which one `step` occupies the calling thread while the device has nothing else to do."""
    return time_in_turn([step], device, sampling)[0]


def time_in_turn(steps: Sequence[Callable[[], Any]], device: str, sampling: Sampling) -> list[float]:
    """The same of several, which take turns: clocks that change meanwhile are the same for all. A turn has calls before
    those that are timed, so that no code has to be fetched again."""
    synchronize = synchronizer(device)

    def one(step: Callable[[], Any]) -> float:
        synchronize()
        start = perf_counter()
        step()
        return perf_counter() - start

    def turn(step: Callable[[], Any]) -> list[float]:
        return [one(step) for _ in range(2 * CALLS_PER_TURN)][CALLS_PER_TURN:]

    longest = max(*(statistics.median(turn(step)) for step in steps), 1e-7)
    calls = max(3, min(10 * sampling.repeats, math.ceil(sampling.seconds / longest)))
    times = [[turn(step) for step in steps] for _ in range(math.ceil(calls / CALLS_PER_TURN))]
    synchronize()
    return [statistics.median(time for each in found for time in each) for found in zip(*times, strict=True)]


def time_device(
    step: Callable[[], Any],
    host_seconds: float,
    device: str,
    sampling: Sampling,
    prepare: Callable[[], None] = lambda: None,
) -> float:
    """Median seconds of one `step` on the device, between events around many of them.

    The device sleeps while the calls are queued, so that it does not wait for the host, as far as the queue holds them:
    a step whose call takes long is measured alone, and one of more launches than the queue holds partly waits.

    Args:
        step: What is timed; has run before.
        host_seconds: What `time_calls` found.
        device: "cuda" or "cpu". On a CPU the time of the call is the time.
        sampling: How long to measure.
        prepare: Called before each repeat, outside the time.
    """
    return time_device_in_turn([step], [host_seconds], device, sampling, prepare)[0]


def time_device_in_turn(
    steps: Sequence[Callable[[], Any]],
    host_seconds: Sequence[float],
    device: str,
    sampling: Sampling,
    prepare: Callable[[], None] = lambda: None,
) -> list[float]:
    """The same of several, which take turns: a device that grows warm and slows down does so for all."""
    if device == "cpu":
        return list(host_seconds)

    def repeat(step: Callable[[], Any], seconds: float, calls: int) -> float:
        prepare()
        return _elapsed(step, calls, seconds)

    def calls_of(step: Callable[[], Any], seconds: float) -> int:
        return max(1, min(int(QUEUED_SECONDS / seconds), math.ceil(sampling.seconds / repeat(step, seconds, 1))))

    timed = [(step, seconds, calls_of(step, seconds)) for step, seconds in zip(steps, host_seconds, strict=True)]
    times = [[repeat(*each) for each in timed] for _ in range(sampling.repeats)]
    return [statistics.median(found) for found in zip(*times, strict=True)]


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


def measure_bandwidth(device: str, sampling: Sampling, nbytes: int) -> dict[str, float]:
    """Bytes per second on buffers of `nbytes`: "copy" counts what is read and written, "read" a norm of one buffer."""
    source = torch.ones(nbytes // 4, device=device)
    target = torch.empty_like(source)

    def rate(step: Callable[[], Any], moved: int) -> float:
        return moved / time_device(step, time_calls(step, device, sampling), device, sampling)

    return {
        "copy": rate(lambda: target.copy_(source), 2 * nbytes),
        "read": max(rate(lambda: torch.linalg.vector_norm(source), nbytes), rate(source.sum, nbytes)),
    }
