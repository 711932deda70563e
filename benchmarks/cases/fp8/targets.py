"""What FP8 casts and updates are to reach, and what a run has reached."""

from typing import Any

from lib.targets import at_least, at_most

OURS, GPT, LONGEST = "te_graph", "gpt3-1.3b", "history-1024"
PART, GPT_US, SKIPPED_US, UPDATE_US = 0.9, 1257.0, 5.0, 5.0


def achieved(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets beside what `record` holds of bench_fp8.py, as `lib.targets` lists them; of the parts that
    were measured."""
    rows = {(row["part"], row["case"], row["op"]): row for row in record["rows"] if row["variant"] == OURS}
    cases = record["cases"]

    def value(part: str, case: str, op: str, key: str) -> float | None:
        row = rows.get((part, case, op))
        return row and row[key]

    what = "cast + transpose + amax, {}, part of copy bandwidth"
    targets = [
        at_least(what.format(label), PART, [value(part, case, op, "fraction_of_copy")])
        for part, op in (("weight", "cast_transpose"), ("model", "weights"))
        for case, label in cases.get(part, {}).items()
    ]
    if models := cases.get("model"):
        skipped = [value("model", case, "weights_skipped", "device_us") for case in models]
        targets.append(at_most(f"{models[GPT]}, device us", GPT_US, [value("model", GPT, "weights", "device_us")]))
        targets.append(at_most("all weights skipped by a flag, device us", SKIPPED_US, skipped))
    if updates := cases.get("update"):
        update = value("update", LONGEST, "update", "device_us")
        targets.append(at_most(f"amax and scale update, {updates[LONGEST]}, device us", UPDATE_US, [update]))
    return targets
