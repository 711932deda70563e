"""The table of collectives_RANKS.json."""

from typing import Any

from lib.remarks import join_remarks, missed_targets_remark, not_measured_remark, show_number, table_head
from lib.units import KIB, MIB, size_name

SHOWN = {  # sizes in the table, of ops that do not show all; the others are in the plot
    "reduce_scatter": (64 * KIB, MIB, 16 * MIB, 256 * MIB),
    "all_gather": (64 * KIB, MIB, 16 * MIB, 256 * MIB),
}


def collectives_table(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown for collectives_RANKS.json: a row for each op and size, a column for each variant."""
    variants, name = record["variants"], record["benchmark"]
    lines = [
        f"![Time of collectives against bytes, {record['world']} ranks](benchmarks/results/{name}.svg)",
        "",
        f"{record['world']} ranks, {record['dtype']}: µs per call in a graph (99th percentile) / eager.",
        "",
        *table_head(variants.values()),
    ]
    for op in record["ops"]:
        lines += [_row(record, op, nbytes) for nbytes in record["sizes"] if nbytes in SHOWN.get(op, record["sizes"])]
    remarks = [_transport(record), _multicast(record), missed_targets_remark(record), not_measured_remark(record)]
    return [*lines, "", join_remarks(remarks, record)]


def _row(record: dict[str, Any], op: str, nbytes: int) -> str:
    """A cell is empty where a variant has no such operation."""
    rows = {(row["variant"], row["mode"]): row for row in record["rows"] if (row["op"], row["bytes"]) == (op, nbytes)}
    failed = {
        failure.get("variant", "all")
        for failure in record["failures"]
        if failure["op"] in (op, "all") and failure.get("bytes", nbytes) == nbytes
    }

    def cell(variant: str) -> str:
        graph, eager = (rows.get((variant, mode)) for mode in ("graph", "eager"))
        if graph is None or eager is None:
            return "failed" if failed & {variant, "all"} else ""
        times = [show_number(value) for value in (graph["p50_us"], graph["p99_us"], eager["p50_us"])]
        return "{} ({}) / {}".format(*times)

    return f"| {record['ops'][op]}, {size_name(nbytes)} | {' | '.join(map(cell, record['variants']))} |"


def _transport(record: dict[str, Any]) -> str:
    """Empty where te_graph used its own kernels, or there was no GPU that could have."""
    is_plain = record["gpu"] is not None and record["uses_peers"] is False
    return "te_graph found no peers and went through NCCL." if is_plain else ""


def _multicast(record: dict[str, Any]) -> str:
    return f"NVLink multicast is off (`{' '.join(f'{key}={value}' for key, value in record['environment'].items())}`)."
