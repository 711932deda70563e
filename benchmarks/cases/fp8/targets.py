"""What FP8 casts and updates are to reach, and what a run has reached."""

from typing import Any

from lib.targets import at_least, at_most

OURS, COPY, GPT, LONGEST = "te_graph", "copy", "gpt3-1.3b", "history-1024"
PART, GPT_US, SKIPPED_US, UPDATE_US = 0.9, 1257.0, 5.0, 5.0
# Times the device time of a copy of as many bytes in the same run: of weights, and of operations of each kind.
SINGLE_WEIGHTS, OF_WEIGHT = ("4096x4096", "8192x2048"), 1.03
FUSED = (
    (1.10, ("plain",)),
    (1.15, ("norm", "add_norm", "gelu", "swiglu")),
    (1.25, ("plain_sums", "gelu_backward", "norm_backward")),
)


def achieved(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets beside what `record` holds of bench_fp8.py, as `lib.targets` lists them; of the parts that
    were measured."""
    rows = {(row["part"], row["case"], row["op"]): row for row in record["rows"] if row["variant"] == OURS}
    copies = {(row["part"], row["case"], row["op"]): row for row in record["rows"] if row["variant"] == COPY}
    cases = record["cases"]

    def value(part: str, case: str, op: str, key: str) -> float | None:
        row = rows.get((part, case, op))
        return row and row[key]

    def times_copy(part: str, case: str, op: str) -> float | None:
        ours, copy = rows.get((part, case, op)), copies.get((part, case, op))
        return ours and copy and ours["device_us"] / copy["device_us"]

    what = "cast + transpose + amax, {}, part of copy bandwidth"
    targets = [
        at_least(what.format(label), PART, [value(part, case, op, "fraction_of_copy")])
        for part, op in (("weight", "cast_transpose"), ("model", "weights"))
        for case, label in cases.get(part, {}).items()
    ]
    if weights := cases.get("weight"):
        single = {case: times_copy("weight", case, "cast_transpose") for case in SINGLE_WEIGHTS}
        what_of_copy = "cast + transpose + amax, {}, times a copy"
        targets += [at_most(what_of_copy.format(weights[case]), OF_WEIGHT, [got]) for case, got in single.items()]
    if fused := cases.get("fused"):
        names = record["ops"]["fused"]
        targets += [
            at_most(
                f"{names[op]}, from 32 MB on, times a copy", limit, [times_copy("fused", case, op) for case in fused]
            )
            for limit, ops in FUSED
            for op in ops
        ]
    if models := cases.get("model"):
        skipped = [value("model", case, "weights_skipped", "device_us") for case in models]
        targets.append(at_most(f"{models[GPT]}, device us", GPT_US, [value("model", GPT, "weights", "device_us")]))
        targets.append(at_most("all weights skipped by a flag, device us", SKIPPED_US, skipped))
    if updates := cases.get("update"):
        update = value("update", LONGEST, "update", "device_us")
        targets.append(at_most(f"amax and scale update, {updates[LONGEST]}, device us", UPDATE_US, [update]))
    return targets
