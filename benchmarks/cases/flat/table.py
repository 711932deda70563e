"""The table of flat.json."""

from typing import Any

from lib.remarks import join_remarks, missed_targets_remark, not_measured_remark, show_number, show_range, table_head

from cases.flat.targets import exposed_ms
from cases.flat.traces import OTHERS

GIB_IN_MIB = 1024


def flat_table(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown for flat.json: a row for each variant, a column for each model and number of tokens."""
    columns = [(model, tokens) for model in record["models"] for tokens in record["tokens"]]
    names = [f"{record['models'][model]}, {tokens} tokens" for model, tokens in columns]
    lines = [
        f"A step of {record['microbatches']} micro-batches on {record['world']} ranks: ms, of these what reducing adds "
        "to the backwards / the optimizer's step; GiB at the peak, of graphs what is reserved.",
        "",
        *table_head(names),
    ]
    found = {(row["model"], row["tokens"], row["variant"]): row for row in record["rows"]}
    failed = {(failure["model"], failure["variant"]) for failure in record["failures"]}

    def cell(model: str, tokens: int, variant: str) -> str:
        row = found.get((model, tokens, variant))
        if row is None:
            return "failed" if (model, variant) in failed else ""
        times = f"{show_number(row['step_ms'])}, {exposed_ms(row):.1f} / {show_number(row['optimizer_ms'])}"
        peak = row["reserved_mib"] if "graphed" in variant else row["peak_mib"]
        return times if peak is None else f"{times}; {peak / GIB_IN_MIB:.1f} GiB"

    for variant, label in record["variants"].items():
        lines.append(f"| {label} | {' | '.join(cell(*column, variant) for column in columns)} |")
    remarks = [_counted(record), _differing(record), missed_targets_remark(record), not_measured_remark(record)]
    return [*lines, "", join_remarks(remarks, record)]


def _counted(record: dict[str, Any]) -> str:
    """What was counted, variant by variant."""
    parts = []
    for variant, label in record["variants"].items():
        rows = [row for row in record["rows"] if row["variant"] == variant]
        if not rows:
            continue
        words = []
        for key, show, what in (("wire_bytes", "{:.2f}", "sent"), ("device_bytes", "{:.0f}", "to sum gradients")):
            numbers = [row[key] for row in rows if row[key] is not None]
            words += [f"{show_range(numbers, show.format)} {what}"] if numbers else []
        counts = [row["kernels"] for row in rows if row["kernels"]]
        kinds = [kind for kind in (counts[0] if counts else ()) if kind != OTHERS]
        shown = [f"{show_range([one[kind] for one in counts], str)} {kind}" for kind in kinds]
        parts.append(f"{label} {', '.join([*words, *shown])}")
    return f"Bytes for each element, kernels in a step: {'; '.join(parts)}." if parts else ""


def _differing(record: dict[str, Any]) -> str:
    wrong = [f"{row['variant']} ({row['model']})" for row in record["rows"] if row["equal_to_eager"] is False]
    return f"Losses differ from eager ones: {', '.join(wrong)}." if wrong else ""
