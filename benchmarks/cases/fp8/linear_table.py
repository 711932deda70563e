"""The table of fp8_linear.json."""

from typing import Any

from lib.remarks import join_remarks, missed_targets_remark, not_measured_remark, table_head


def fp8_linear_table(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown for fp8_linear.json: a row for each shape, a column for each variant."""
    lines = [
        f"One of {record['layers']} linear layers in a later micro-batch, tokens x inputs -> outputs: host µs of a "
        "forward / of forward + backward; device µs of the same.",
        "",
        *table_head(record["variants"].values()),
    ]
    found = {(row["shape"], row["variant"]): row for row in record["rows"]}
    failed = {(failure["shape"], failure.get("variant")) for failure in record["failures"]}

    def cell(shape: str, variant: str) -> str:
        row = found.get((shape, variant))
        if row is None:
            return "failed" if {(shape, variant), (shape, None)} & failed else ""
        host = f"{row['host_forward_us']:.0f} / {row['host_both_us']:.0f}"
        return f"{host}; {row['device_forward_us']:.1f} / {row['device_both_us']:.1f}"

    for shape, label in record["shapes"].items():
        lines.append(f"| {label} | {' | '.join(cell(shape, variant) for variant in record['variants'])} |")
    return [*lines, "", join_remarks([missed_targets_remark(record), not_measured_remark(record)], record)]
