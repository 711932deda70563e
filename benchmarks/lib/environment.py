"""What benchmarks share: timing, memory, and the record of where they ran."""

import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
DIRTY = "-dirty"

# The driver blocks the caller once about a thousand launches wait for the device. Three calls of the largest eager
# workload stay below that, since the device works while they are queued.
TIMED_CALLS_PER_BURST = 2
WARMUP_CALLS = 3
MIB = 2**20


@dataclass(frozen=True)
class Effort:
    """How long to measure: `repeats` wall times over at least `seconds` each, and `bursts` of host times."""

    repeats: int
    seconds: float
    bursts: int


def time_wall(step: Callable[[], None], synchronize: Callable[[], None], effort: Effort) -> list[float]:
    """Seconds from one end of `step` to the next when it is called without pause, device work included.

    Args:
        step: What is timed; may return before the device has done the work.
        synchronize: Waits for the device.
        effort: `repeats` and `seconds` are used.

    Returns:
        One mean per repeat, over as many calls as fill `effort.seconds`. An additional repeat goes ahead as warm-up.
    """

    def run(calls: int) -> float:
        synchronize()
        start = perf_counter()
        for _ in range(calls):
            step()
        synchronize()
        return (perf_counter() - start) / calls

    run(WARMUP_CALLS)
    calls = max(3, math.ceil(effort.seconds / run(WARMUP_CALLS)))
    return [run(calls) for _ in range(effort.repeats + 1)][1:]


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


def synchronizer(device: str) -> Callable[[], None]:
    """What waits for `device`, "cuda" or "cpu"."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None


def measure_step(step: Callable[[], None], device: str, effort: Effort) -> dict[str, Any]:
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
    wall = time_wall(step, synchronize, effort)
    (host,) = time_host((step,), synchronize, effort.bursts)
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


def median_us(seconds: Sequence[float], calls: int) -> float:
    """Median as microseconds for one of the `calls` that each time in `seconds` holds."""
    return round(statistics.median(seconds) * 1e6 / calls, 3)


def print_profile(step: Callable[[], None], calls: int = 10, rows: int = 25) -> None:
    """Print where `step` spends time on the host, most own CPU time first, over `calls` calls."""
    for _ in range(WARMUP_CALLS):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(calls):
            step()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows))


def make_deterministic() -> None:
    """Make eager execution repeat bit for bit for the rest of this process, which has not used the GPU yet."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def bits_equal(a: Tensor, b: Tensor) -> bool:  # a, b: any shape, dense
    """Whether two tensors are equal as bits: NaN equals itself, 0.0 differs from -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    pair = [tensor.flatten().clone(memory_format=torch.contiguous_format) for tensor in (a, b)]  # whatever its strides
    return torch.equal(pair[0].view(torch.uint8), pair[1].view(torch.uint8))


def environment(device: str, commit: str | None) -> dict[str, Any]:
    """Where and from what a benchmark runs.

    Args:
        device: "cuda" or "cpu".
        commit: Commit of this repository, with "-dirty" behind it if files differ from it. None: TE_GRAPH_COMMIT of the
            environment, else what git says.

    Returns:
        gpu, driver, commit and dirty are None where there is none or nobody can tell; date is UTC.
    """
    describe = ("git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--abbrev=40", f"--dirty={DIRTY}")
    state = commit or os.environ.get("TE_GRAPH_COMMIT") or _output_of(*describe)
    is_gpu = device == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if is_gpu else None,
        "cpu": _cpu_name(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if is_gpu else None,
        "python": platform.python_version(),
        "commit": state.removesuffix(DIRTY) if state else None,
        "dirty": state.endswith(DIRTY) if state else None,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write `record`, making the folder if needed; a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def _output_of(*command: str) -> str | None:
    """First line that a program prints, or None where it is missing or fails."""
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0].strip() if lines else None


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()
