"""Times and memory of a training step in a process of its own, summarized over processes; and its profile."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lib.timing import WARMUP_CALLS, Sampling, median_us, synchronizer, time_host, time_wall
from lib.units import MIB


def measure_step(step: Callable[[], None], device: str, sampling: Sampling) -> dict[str, Any]:
    """Times and memory of `step`, in a process that has done nothing but set it up.

    Memory is what torch's allocator has reserved, since graphs keep more than the tensors that are alive.

    Returns:
        wall, host: lists of seconds. peak: bytes at the peak of further calls that start without cached memory;
        setup_peak: at the peak until the first calls, warm-up and capture included; both None on a CPU.
    """
    is_gpu, synchronize = device == "cuda", synchronizer(device)
    for _ in range(WARMUP_CALLS):
        step()
    setup_peak = torch.cuda.max_memory_reserved() if is_gpu else None
    wall = time_wall(step, synchronize, sampling)
    (host,) = time_host((step,), synchronize, sampling.bursts)
    if is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARMUP_CALLS):
        step()
    synchronize()
    peak = torch.cuda.max_memory_reserved() if is_gpu else None
    return {"wall": wall, "host": host, "peak": peak, "setup_peak": setup_peak}


def summarize(samples: Sequence[dict[str, Any]], layers: int) -> dict[str, Any]:
    """What JSON keeps of `measure_step` of one or more processes: medians over all of them, and the largest peaks.

    `spread` is (maximum - minimum) / median of the wall times.
    """
    wall, host = ([value for sample in samples for value in sample[key]] for key in ("wall", "host"))
    peak, setup_peak = (
        None if samples[0][key] is None else round(max(sample[key] for sample in samples) / MIB, 1)
        for key in ("peak", "setup_peak")
    )
    return {
        "wall_us_per_layer": median_us(wall, layers),
        "host_us_per_layer": median_us(host, layers),
        "peak_mib": peak,
        "setup_peak_mib": setup_peak,
        "repeats": len(wall),
        "spread": round((max(wall) - min(wall)) / statistics.median(wall), 4),
    }


def print_profile(step: Callable[[], None], calls: int = 10, rows: int = 25) -> None:
    """Print where `step` spends time on the host, most own CPU time first, over `calls` calls."""
    for _ in range(WARMUP_CALLS):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(calls):
            step()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows))
