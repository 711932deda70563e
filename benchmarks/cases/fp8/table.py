"""The table of fp8.json."""

from typing import Any

from lib.remarks import (
    join_remarks,
    missed_targets_remark,
    not_measured_remark,
    show_number,
    show_range,
    show_times,
    table_head,
)

SHOWN_ACTIVATION = "2048x8192"  # the others are in the plot
FUSED = "fused"  # has a table of its own


def fp8_table(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown for fp8.json: a row for each case and operation, a column for each variant."""
    variants = record["variants"]
    lines = [
        "![Bandwidth of casts as part of a copy's](benchmarks/results/fp8.svg)",
        "",
        "Casts to FP8 (bf16 in, e4m3 out) and updates of scales: device µs of a call in a graph, on rotated buffers, / "
        "host µs of one outside, % of the bandwidth of a copy.",
        "",
        *table_head(variants.values()),
    ]
    for part, cases in record["cases"].items():
        for case, label in cases.items():
            if part != FUSED and (part != "activation" or case == SHOWN_ACTIVATION):
                lines += [_row(record, part, case, label, op) for op in record["ops"][part]]
    remarks = [_bandwidth(record), _launches(record), missed_targets_remark(record), not_measured_remark(record)]
    return [*lines, *_fused_table(record), "", join_remarks(remarks, record)]


def _fused_table(record: dict[str, Any]) -> list[str]:
    """A row for each fused cast, a column for each case; empty where none was measured."""
    cases = record["cases"].get(FUSED)
    if not cases:
        return []
    found = {
        (row["op"], row["case"], row["variant"]): row["device_us"] for row in record["rows"] if row["part"] == FUSED
    }

    def cell(op: str, case: str) -> str:
        ours, copy = found.get((op, case, "te_graph")), found.get((op, case, "copy"))
        if ours is None:
            return "failed"
        return show_number(ours) + ("" if copy is None else f", {ours / copy:.2f} x")

    return [
        "",
        "Casts of what is made where it is cast: device µs, and how many times that of a copy of as many bytes.",
        "",
        *table_head(cases.values()),
        *(
            f"| {label} | {' | '.join(cell(op, case) for case in cases)} |"
            for op, label in record["ops"][FUSED].items()
        ),
    ]


def _row(record: dict[str, Any], part: str, case: str, label: str, op: str) -> str:
    """A cell is empty where a variant has no such operation."""
    rows = {row["variant"]: row for row in record["rows"] if (row["part"], row["case"], row["op"]) == (part, case, op)}
    failed = {
        failure.get("variant", "all")
        for failure in record["failures"]
        if failure["part"] == part
        and case in failure.get("case", failure.get("cases", "")).split()
        and failure.get("op", op) == op
    }

    def cell(variant: str) -> str:
        if variant not in rows:
            return "failed" if failed & {variant, "all"} else ""
        fraction = rows[variant]["fraction_of_copy"]
        return show_times(rows[variant]) + ("" if fraction is None else f", {fraction:.0%}")

    return f"| {label}: {record['ops'][part][op]} | {' | '.join(map(cell, record['variants']))} |"


def _bandwidth(record: dict[str, Any]) -> str:
    """Empty where no bandwidth was measured."""
    rates = record["bandwidth_tb_per_s"]
    if not rates:
        return ""
    return f"A copy reached {rates['copy']:.2f} TB/s; elements are counted as read once, and written once or twice."


def _launches(record: dict[str, Any]) -> str:
    """Launches of a cast of all weights; empty where nothing was counted."""
    counts = []
    for variant, label in record["variants"].items():
        rows = [
            row for row in record["rows"] if (row["variant"], row["op"]) == (variant, "weights") and row["launches"]
        ]
        if rows:
            launches = [row["launches"]["outside_graphs"] for row in rows]
            counts.append(f"{label} {show_range(launches, '{:.0f}'.format)}")
    return f"Launches for all weights: {', '.join(counts)}." if counts else ""
