"""The tables of graphed.json, graphed_PACKAGE.json, graphed_sweep.json and flags.json."""

from typing import Any

from lib.remarks import join_remarks, not_measured_remark, show_number, show_range, table_head


def graphed_table(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown for graphed.json, or that of a package's layers: one row per shape, one column per variant, and
    what else was counted."""
    rows = {(row["shape"], row["variant"]): row for row in record["rows"]}
    variants = record["variants"]
    lines = [
        "Transformer layer in bf16, forward + backward with gradients present: wall µs / host µs per layer, peak MiB.",
        "",
        *table_head(variants.values()),
    ]
    for shape, label in record["shapes"].items():
        lines.append(f"| {label} | {' | '.join(_cell(rows.get((shape, variant))) for variant in variants)} |")
    remarks = [_gradients(record), _launches(record, variants), _split(record), not_measured_remark(record)]
    return [*lines, "", join_remarks(remarks, record)]


def sweep_plot(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown for graphed_sweep.json: the plot, and the growth that it shows."""
    few, many = min(record["parameters"]), max(record["parameters"])
    rows = {(row["variant"], row["callables"], row["parameters"]): row for row in record["rows"]}
    chain = record["callables"][len(record["callables"]) // 2]
    growths = []
    for variant, label in record["variants"].items():
        ends = [rows.get((variant, chain, number)) for number in (few, many)]
        if few < many and None not in ends:
            times = (
                f"{' → '.join(show_number(row[f'{part}_us_per_call']) for row in ends)} {part}"
                for part in ("forward", "backward")
            )
            growths.append(f"{label} {', '.join(times)}")
    growth = f"From {few} to {many} parameters, chain of {chain}: {'; '.join(growths)}." if growths else ""
    return [
        "![Host time of a call against its number of parameters](benchmarks/results/graphed_sweep.svg)",
        "",
        "Host µs per call of a callable with few kernels, against its number of parameters, gradients present.",
        join_remarks([growth, _gradients(record), not_measured_remark(record)], record),
    ]


def flags_table(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown for flags.json: one row per way to switch a flag, one column per number of nodes."""
    rows = {(row["variant"], row["nodes"]): row for row in record["rows"]}

    def cell(variant: str, nodes: int) -> str:
        row = rows.get((variant, nodes))
        return f"{show_number(row['launch_sync_us'])} / {show_number(row['host_us'])}" if row else "failed"

    lines = [
        "A flag switched before each launch of a graph of so many updates of scales: launch + sync µs / host µs.",
        "",
        *table_head(map(_updates, record["nodes"])),
    ]
    for variant, label in record["variants"].items():
        lines.append(f"| {label} | {' | '.join(cell(variant, nodes) for nodes in record['nodes'])} |")
    return [*lines, "", join_remarks([not_measured_remark(record)], record)]


def _updates(nodes: int) -> str:
    return f"{nodes} update" + ("" if nodes == 1 else "s")


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "failed"
    peak = "" if row["peak_mib"] is None else f", {row['peak_mib']:.0f} MiB"
    return f"{show_number(row['wall_us_per_layer'])} / {show_number(row['host_us_per_layer'])}{peak}"


def _gradients(record: dict[str, Any]) -> str:
    """What the comparison of gradients found; what was not compared is named too."""

    def names_of(verdict: bool | None) -> str:
        rows = [row for row in record["rows"] if row["variant"] != "eager" and row["equal_to_eager"] is verdict]
        return ", ".join(f"{record['variants'][row['variant']]} ({_case(record, row)})" for row in rows)

    parts = [f"Gradients differ from eager ones: {names_of(False)}."] if names_of(False) else []
    if names_of(None):
        parts.append(f"Gradients were not compared: {names_of(None)}.")
    if names_of(True) and not parts:
        parts.append("All gradients equal eager ones bit for bit.")
    return " ".join(parts)


def _case(record: dict[str, Any], row: dict[str, Any]) -> str:
    if "shape" in row:
        return record["shapes"][row["shape"]]
    return f"{row['parameters']} parameters, chain of {row['callables']}"


def _launches(record: dict[str, Any], variants: dict[str, str]) -> str:
    """How much is launched outside graphs, over all shapes; empty where nothing was counted."""
    counts = []
    for variant, label in variants.items():
        launches = [row["launches"] for row in record["rows"] if row["variant"] == variant and row.get("launches")]
        if launches:
            counts.append(f"{label} {show_range([found['outside_graphs'] for found in launches], '{:.0f}'.format)}")
    if not counts:
        return ""
    return f"Launches outside graphs in a step of {record['layers']} layers: {', '.join(counts)}."


def _split(record: dict[str, Any]) -> str:
    """Whose te_graph's host time is, over all shapes; empty where it was not split."""
    key = "split_us_per_layer"
    splits = [row[key] for row in record["rows"] if row["variant"] == "te_graph" and row.get(key)]
    if not splits:
        return ""
    forward, backward = (show_range([split[part] for split in splits], show_number) for part in ("forward", "backward"))
    bare = show_range([split["bare_forward"] + split["bare_backward"] for split in splits], show_number)
    engine = show_range([split["bare_engine"] for split in splits], show_number)
    return (
        f"Host µs of te_graph: forward {forward}, backward {backward}; of these the bare launches of its graphs take "
        f"{bare}, and autograd, for a `backward()` through one view, {engine}."
    )
