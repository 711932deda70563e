"""The table of multi_tensor.json."""

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

SHOWN = (  # rows of the table of multi-tensor ops: list and operation
    ("gpt3-1.3b-bf16", "norm"),
    ("gpt3-1.3b-bf16", "clip_none"),
    ("gpt3-1.3b-bf16", "clip"),
    ("gpt3-1.3b-bf16", "add"),
    ("gpt3-1.3b-fp32", "clip"),
    ("llama3-8b-bf16", "clip_none"),
    ("2000x1024", "clip_none"),
    ("20000x100", "clip_none"),
)


def multi_tensor_table(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown for multi_tensor.json: a row for each pair of SHOWN, a column for each variant."""
    lines = [
        "Norm, clip and accumulate over lists of gradients: device µs / host µs of a call.",
        "",
        *table_head([*record["variants"].values(), "bytes"]),
        *(_row(record, name, op) for name, op in SHOWN if name in record["lists"]),
    ]
    remarks = [
        _bandwidth(record),
        _launches(record),
        _hp_functions(record),
        missed_targets_remark(record),
        not_measured_remark(record),
    ]
    return [*lines, "", join_remarks(remarks, record)]


def _row(record: dict[str, Any], name: str, op: str) -> str:
    """A cell is empty where the library has no such operation."""
    rows = {row["variant"]: row for row in record["rows"] if (row["list"], row["op"]) == (name, op)}
    failures = [failure for failure in record["failures"] if failure["list"] == name]
    failed = {failure.get("variant", "all") for failure in failures if failure.get("op", op) == op}

    def cell(variant: str) -> str:
        if variant in rows:
            return show_times(rows[variant])
        return "failed" if failed & {variant, "all"} else ""

    floor = next((show_number(row["floor_us"]) for row in rows.values() if row["floor_us"] is not None), "")
    cells = [f"{record['lists'][name]}: {record['ops'][op]}", *map(cell, record["variants"]), floor]
    return f"| {' | '.join(cells)} |"


def _bandwidth(record: dict[str, Any]) -> str:
    """What the column of bytes is; empty where no bandwidth was measured."""
    rates = record["bandwidth_tb_per_s"]
    if not rates:
        return ""
    return f"Bytes: what must move, at this run's {rates['read']:.2f} (read) and {rates['copy']:.2f} TB/s (copy)."


def _launches(record: dict[str, Any]) -> str:
    """Launches of a call over the rows shown; empty where nothing was counted."""
    counts = []
    for variant, label in record["variants"].items():
        rows = [row for row in record["rows"] if row["variant"] == variant and (row["list"], row["op"]) in SHOWN]
        launches = [row["launches"]["outside_graphs"] + row["launches"]["graphs"] for row in rows if row["launches"]]
        if launches:
            counts.append(f"{label} {show_range(launches, '{:.0f}'.format)}")
    return f"Launches in these rows: {', '.join(counts)}." if counts else ""


def _hp_functions(record: dict[str, Any]) -> str:
    """Times of the three functions of mixed precision in a row, on each list where they were measured."""
    parts = []
    for name, label in record["lists"].items():
        rows = {row["variant"]: row for row in record["hp_rows"] if (row["list"], row["op"]) == (name, "all")}
        times = [f"{title} {show_times(rows[key])}" for key, title in record["hp_variants"].items() if key in rows]
        if times:
            parts.append(f"{label}: {', '.join(times)}")
    names = "`update_hp_grads`, `get_global_norm_of_tensors`, `clip_tensors_by_global_norm` in a row"
    return f"{names}, {'; '.join(parts)}." if parts else ""
