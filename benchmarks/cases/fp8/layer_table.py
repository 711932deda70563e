"""The table of fp8_layers.json."""

from typing import Any

from lib.remarks import join_remarks, missed_targets_remark, not_measured_remark, show_number, table_head


def fp8_layers_table(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown for fp8_layers.json: a row for each variant, a column for each shape."""
    lines = [
        f"One of {record['layers']} transformer layers in a later micro-batch, forward + backward: device µs / host "
        "µs, and how many kernels, copies and memsets; what is empty was not measured.",
        "",
        *table_head(record["shapes"].values()),
    ]
    found = {(row["shape"], row["variant"]): row for row in record["rows"]}
    failed = {(failure["shape"], failure.get("variant")) for failure in record["failures"]}

    def cell(shape: str, variant: str) -> str:
        row = found.get((shape, variant))
        if row is None:
            return "failed" if {(shape, variant), (shape, None)} & failed else ""
        times = f"{show_number(row['device_us'])} / {show_number(row['host_us'])}"
        return times if row["kernels"] is None else f"{times}, {row['kernels']:g}"

    for variant, label in record["variants"].items():
        lines.append(f"| {label} | {' | '.join(cell(shape, variant) for shape in record['shapes'])} |")
    return [*lines, "", join_remarks([missed_targets_remark(record), not_measured_remark(record)], record)]
