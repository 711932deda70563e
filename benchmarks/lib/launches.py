"""What the host does to the GPU in one step, read from a trace of torch's profiler."""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from lib.harness import describe
from lib.timing import synchronizer

STEP = "benchmark step"
NODE = "autograd::engine::evaluate_function: "
LAUNCH = re.compile(r"(cuda|cu)(Launch|Memcpy|Memset)")
GRAPH_LAUNCH = re.compile(r"(cuda|cu)GraphLaunch")
DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
WAITING = {
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemcpy2D"),
    *("cudaMalloc", "cudaFree", "cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize"),
}


def trace_step(step: Callable[[], None], device: str) -> list[dict[str, Any]]:
    """Events of one `step`, in the profiler's Chrome format; `step` has run before, so that it is warm.

    CUPTI starts with the first profile of a process and may miss calls in it, so a second one is kept.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    for _ in range(2):
        with profile(activities=activities, acc_events=True) as profiler:
            with record_function(STEP):
                step()
            synchronizer(device)()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def count_launches(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the calls of the CUDA runtime within the step of `trace_step`.

    Returns:
        graphs: graph launches. outside_graphs: launches of kernels, copies and memsets. outside_by_operator: the same
        by the operator that launched, and by the autograd node that ran it; empty without graphs, where everything is
        outside. waits: calls that wait for the device, or may (cudaMalloc, cudaFree).

    Raises:
        RuntimeError: there is no launch at all, so the profiler saw nothing.
    """
    (step,) = (event for event in events if event.get("cat") == "user_annotation" and event["name"] == STEP)
    runtime, driver = ([e for e in events if e.get("cat") == f"cuda_{name}"] for name in ("runtime", "driver"))
    # A call of the runtime calls the driver; such pairs are one call.
    direct = [e for e in driver if not any(call["tid"] == e["tid"] and _holds(call, e) for call in runtime)]
    calls = [call for call in runtime + direct if _holds(step, call)]
    graphs = [call for call in calls if GRAPH_LAUNCH.match(call["name"])]
    outside = [call for call in calls if LAUNCH.match(call["name"])]
    if not graphs and not outside:
        raise RuntimeError("expected launches in the trace of a step, got none: CUPTI is missing or in use")
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    return {
        "graphs": len(graphs),
        "outside_graphs": len(outside),
        "outside_by_operator": dict(Counter(_operator(call, operators) for call in outside)) if graphs else {},
        # CUDA's names have an underscore only before a version: cudaMemcpy_v3020, cuCtxSynchronize_v2.
        "waits": sum(call["name"].partition("_")[0] in WAITING for call in calls),
    }


def count_device_work(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Count what the device ran in the step of `trace_step`, in graphs and outside.

    Returns:
        kernels: kernels, copies and memsets. seconds: how long they took, all together.

    Raises:
        RuntimeError: there is nothing, so the profiler saw nothing.
    """
    times = [event["dur"] / 1e6 for event in events if event.get("cat") in DEVICE_WORK]
    if not times:
        raise RuntimeError("expected kernels in the trace of a step, got none: CUPTI is missing or in use")
    return {"kernels": len(times), "seconds": sum(times)}


def count_in_rows(timed: Sequence[tuple[dict[str, Any], Callable[[], Any]]], device: str) -> list[dict[str, Any]]:
    """Fill in what each step launches; returns what failed."""
    failures = []
    for row, step in timed if device == "cuda" else ():
        try:
            row["launches"] = count_launches(trace_step(step, device))
        except Exception as error:
            failures.append({"op": row["op"], "variant": row["variant"], "error": describe(error)})
    return failures


def _operator(call: dict[str, Any], operators: list[dict[str, Any]]) -> str:
    """`node > operator` around a call, as far as there are any, else the call's own name."""
    around = [operator for operator in operators if operator["tid"] == call["tid"] and _holds(operator, call)]
    around.sort(key=lambda operator: operator["dur"])
    nodes = [operator["name"].removeprefix(NODE) for operator in around if operator["name"].startswith(NODE)]
    innermost = around[0]["name"].removeprefix(NODE) if around else call["name"]
    return " > ".join(dict.fromkeys([*nodes[:1], innermost]))


def _holds(outer: dict[str, Any], inner: dict[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] <= outer["ts"] + outer["dur"]
