"""What collectives are to reach, and what a run has reached."""

from typing import Any

from lib.targets import at_most
from lib.units import KIB, MIB, size_name

OURS, WORST = "te_graph", 1.03
ALL_REDUCE_US = {  # in a graph, by ranks and bytes
    2: {KIB: 3.0, 64 * KIB: 3.2, MIB: 6.3, 4 * MIB: 14.5, 16 * MIB: 51.0, 64 * MIB: 191.0},
    4: {KIB: 3.5, 64 * KIB: 3.8, MIB: 9.0, 4 * MIB: 22.0, 16 * MIB: 77.0, 64 * MIB: 298.0},
}


def achieved(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets beside what `record` holds of bench_collectives.py, as `lib.targets` lists them; of the ops
    and sizes that were asked for."""
    times = {(row["op"], row["mode"], row["bytes"], row["variant"]): row["p50_us"] for row in record["rows"]}
    limits = ALL_REDUCE_US.get(record["world"], {}) if "all_reduce" in record["ops"] else {}
    targets = [
        at_most(
            f"all-reduce in a graph, {size_name(nbytes)}, us",
            limit,
            [times.get(("all_reduce", "graph", nbytes, OURS))],
        )
        for nbytes, limit in limits.items()
        if nbytes in record["sizes"]
    ]
    for op, label in record["ops"].items():
        for mode, name in record["modes"].items():
            ratios = [_ratio(record, times, (op, mode, nbytes)) for nbytes in record["sizes"]]
            targets.append(at_most(f"{label} {name}, time over that of the fastest other, any size", WORST, ratios))
    return targets


def _ratio(record: dict[str, Any], times: dict[tuple[Any, ...], float], where: tuple[Any, ...]) -> float | None:
    """None where te_graph, or all others, were not measured."""
    ours = times.get((*where, OURS))
    others = [times[(*where, name)] for name in record["variants"] if name != OURS and (*where, name) in times]
    return ours / min(others) if ours is not None and others else None
