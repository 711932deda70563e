"""The table of fp8_training.json."""

import statistics
from typing import Any

from lib.remarks import join_remarks, missed_targets_remark, not_measured_remark, table_head

from cases.fp8.training_targets import BASELINE, difference_of, losses_of, spread_of


def fp8_training_table(record: dict[str, Any]) -> list[str]:
    """Lines of Markdown for fp8_training.json: a row for each recipe."""
    lines = [
        "![Validation loss of trainings in bf16 and FP8](benchmarks/results/fp8_training.svg)",
        "",
        f"GPT, {record['parameters'] / 1e6:.0f} M parameters, {record['settings']}: mean validation loss behind the "
        f"last {record['validated']} steps, in nats per byte.",
        "",
        *table_head([*(f"seed {seed}" for seed in record["seeds"]), "mean", "beside bf16", "seconds, graphs / eager"]),
    ]
    baseline = losses_of(record["rows"], BASELINE)
    for recipe in record["recipes"]:
        rows = [row for row in record["rows"] if row["recipe"] == recipe]
        by_seed = {row["seed"]: f"{row['validation_loss']:.4f}" for row in rows if row["mode"] == "graphed"}
        losses = losses_of(rows, recipe)
        is_complete = len(losses) == len(baseline) == len(record["seeds"])
        mean = f"{statistics.mean(losses):.4f}" if is_complete else ""
        beside = f"{difference_of(losses, baseline):+.2f}%" if is_complete and recipe != BASELINE else ""
        times = " / ".join(
            f"{statistics.median(found):.0f}"
            for mode in ("graphed", "eager")
            if (found := [row["seconds"] for row in rows if row["mode"] == mode])
        )
        cells = [*(by_seed.get(seed, "") for seed in record["seeds"]), mean, beside, times]
        lines.append(f"| {recipe} | {' | '.join(cells)} |")
    remarks = [missed_targets_remark(record), not_measured_remark(record)]
    if len(baseline) == len(record["seeds"]):
        remarks.insert(0, f"Seeds are {spread_of(baseline):.2f}% apart in {BASELINE}.")
    compared = [row["run"] for row in record["rows"] if row["equal_to_eager"]]
    if compared:
        remarks.append(f"All losses equal eager ones bit for bit: {', '.join(compared)}.")
    corpus = record["corpus"]
    if corpus:
        remarks.append(f"{corpus['bytes'] / 1e6:.1f} MB of {corpus['files']} files, sha256 `{corpus['sha256'][:16]}`.")
    return [*lines, "", join_remarks(remarks, record)]
