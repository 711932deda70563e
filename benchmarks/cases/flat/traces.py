"""What the device runs in a step, by kinds, and when it reduces: from a trace of torch's profiler."""

import re
from typing import Any

from lib.launches import DEVICE_WORK, NODE

LAST_BACKWARD = "last backward"  # what a step calls its last backward in traces
# The first that matches; a trace of a CPU has operators instead of kernels.
KINDS = {
    "reductions": re.compile(
        r"nccl\w*(AllReduce|ReduceScatter)|(all_reduce|reduce_scatter|reduce_rows)\w*_kernel|"
        r"(te_graph|c10d|_c10d_functional)::_?(all_?reduce|reduce_scatter)",
    ),
    "gathers": re.compile(r"nccl\w*AllGather|all_gather\w*_kernel|(te_graph|c10d|_c10d_functional)::_?all_?gather"),
    "cat and split": re.compile(r"CatArray|chunk_cat|split_with_sizes_copy|^aten::cat$"),
    "memsets": re.compile(r"^Memset|FillFunctor|^aten::(zero_|fill_)$"),
    "copies": re.compile(r"^Memcpy|copy_kernel|CopyFunctor|^aten::copy_$"),
}
OTHERS = "others"
COLLECTIVES = {"reductions", "gathers"}


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), OTHERS)


def count_kinds(events: list[dict[str, Any]], device: str) -> dict[str, int]:
    """How many kernels, copies and memsets of each kind there are in ``events`` of ``trace_step``."""
    counts = dict.fromkeys((*KINDS, OTHERS), 0)
    for event in _work(events, device):
        counts[kind_of(event["name"])] += 1
    return counts


def reduction_times(events: list[dict[str, Any]], device: str) -> dict[str, float] | None:
    """When the first reduction of a step begins on the device, in microseconds.

    What a backward runs is what its autograd nodes launch, on streams on which no collective runs that they launch.

    Returns:
        after_begin: behind the begin of the last backward there. before_end: ahead of the end of its last kernel.
        None where there is no reduction.

    Raises:
        RuntimeError: the trace has no last backward, or nothing that it has launched.
    """
    backward = next((e for e in events if e["name"] == LAST_BACKWARD and e.get("cat") == "user_annotation"), None)
    if backward is None:
        raise RuntimeError("expected the last backward in the trace of a step, got none")
    work = _work(events, device)
    reductions = [event["ts"] for event in work if kind_of(event["name"]) == "reductions"]
    launched = _launched_by_nodes(events, work, backward) if device == "cuda" else _held(work, backward)
    busy = {_stream(event) for event in launched if kind_of(event["name"]) in COLLECTIVES}
    own = [
        e for e in launched if kind_of(e["name"]) not in COLLECTIVES and (device != "cuda" or _stream(e) not in busy)
    ]
    if not own:
        raise RuntimeError("expected kernels of the last backward in the trace of a step, got none")
    if not reductions:
        return None
    begin, end = min(event["ts"] for event in own), max(event["ts"] + event["dur"] for event in own)
    first = min(reductions)
    return {"after_begin": round(first - begin, 1), "before_end": round(end - first, 1)}


def _work(events: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    kinds = DEVICE_WORK if device == "cuda" else {"cpu_op"}
    return [event for event in events if event.get("cat") in kinds]


def _launched_by_nodes(
    events: list[dict[str, Any]], work: list[dict[str, Any]], backward: dict[str, Any]
) -> list[dict[str, Any]]:
    """What was launched on the device within nodes of a backward, whatever thread ran them."""
    nodes = _held([event for event in events if event["name"].startswith(NODE)], backward)
    calls = _held([e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")], backward)
    of_threads: dict[Any, list[tuple[float, float]]] = {}
    for node in nodes:
        of_threads.setdefault(node["tid"], []).append((node["ts"], node["ts"] + node["dur"]))
    ids = {
        call["args"]["correlation"]
        for call in calls
        if any(begin <= call["ts"] <= end for begin, end in of_threads.get(call["tid"], ()))
    }
    return [event for event in work if event["args"].get("correlation") in ids]


def _held(events: list[dict[str, Any]], outer: dict[str, Any]) -> list[dict[str, Any]]:
    end = outer["ts"] + outer["dur"]
    return [event for event in events if outer["ts"] <= event["ts"] <= end]


def _stream(event: dict[str, Any]) -> Any:
    return event.get("args", {}).get("stream")
