"""What the multi-tensor ops are to reach, and what a run has reached."""

from typing import Any

from lib.targets import at_least, at_most

PLAN, PLAIN, TORCH = "te_graph_plan", "te_graph", "torch_foreach"
LARGE = ("gpt3-1.3b-bf16", "gpt3-1.3b-fp32", "llama3-8b-bf16", "one-4gb")
MANY = "2000x1024"


def achieved(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets beside what `record` holds of bench_multi_tensor.py, as `lib.targets` lists them."""
    rows = {(row["list"], row["op"], row["variant"]): row for row in record["rows"]}

    def value(name: str, op: str, variant: str, key: str) -> float | None:
        row = rows.get((name, op, variant))
        return row and row[key]

    def floors(op: str, names: tuple[str, ...] = LARGE) -> list[float | None]:
        found = [name for name in names if name in record["lists"]]
        return [value(name, op, variant, "fraction_of_floor") for name in found for variant in (PLAIN, PLAN)]

    def ratio(over: float | None, under: float | None) -> float | None:
        return over / under if over is not None and under else None

    def speedups(name: str) -> list[float | None]:
        theirs = value(name, "clip_none", TORCH, "device_us")
        return [ratio(theirs, value(name, "clip_none", variant, "device_us")) for variant in (PLAIN, PLAN)]

    clips = [value(MANY, op, variant, "device_us") for op in ("clip_none", "clip") for variant in (PLAIN, PLAN)]
    planned = [value(MANY, op, PLAN, "host_us") for op in ("clip_none", "clip")]
    walk = record["walk_us"].get(MANY)
    walked = [ratio(value(MANY, op, PLAIN, "host_us"), walk) for op in ("clip_none", "clip")]
    return [
        at_least("norm, part of read-only bandwidth", 0.9, floors("norm")),
        at_least("clip with nothing to clip, part of read-only bandwidth", 0.9, floors("clip_none")),
        at_least("clip with nothing to clip, bf16, times torch foreach", 6.0, speedups("gpt3-1.3b-bf16")),
        at_least("clip that clips, part of copy bandwidth over three passes", 0.9, floors("clip")),
        at_least("accumulate, part of copy bandwidth", 0.9, [*floors("store"), *floors("add")]),
        at_most("2000 x 1024, norm + clip, device us", 40.0, clips),
        at_most("2000 x 1024, norm + clip with a plan, host us", 60.0, planned),
        at_most("2000 x 1024, norm + clip without a plan, host time over the bare walk's", 1.5, walked),
    ]
