"""What flat parameters are to reach, and what a run has reached."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lib.targets import at_least, at_most

from cases.flat.variants import DDP, DDP_BF16, FSDP2, SENT_BF16, SPLIT_CAT, SUMMED_BF16, VARIANTS, key_of

Row = dict[str, Any]

SHARDS, MODES = ("none", "optimizer"), ("eager", "graphed")
OURS = [name for name, variant in VARIANTS.items() if variant.is_ours]
OVERLAPPED = [name for name in OURS if name not in {key_of(shard, mode, False) for shard in SHARDS for mode in MODES}]
# Of elements, of a ring: a reduce-scatter in float32, or in bf16, and an all-gather in bf16.
SENT_BYTES, SENT_BF16_BYTES, PADDING = 4 + 2, 2 + 2, 1.001
LAST_BUCKET_ALLOWANCE = 0.05  # of all buckets
SAVED_TIME, SAVED_STEP, SAVED_TOKENS = 0.9, 0.10, 512
PEAK = 1.02


def targets_of(
    rows: Sequence[Row], microbatches: int, world: int, copy_bandwidth: float | None
) -> list[dict[str, Any]]:
    """The targets beside the rows of bench_flat.py, as `lib.targets` lists them.

    Args:
        rows: of all models, tokens and variants.
        microbatches: of a step.
        world: ranks.
        copy_bandwidth: bytes per second that a copy reads and writes, None if it was not measured.
    """
    found = {(row["model"], row["tokens"], row["variant"]): row for row in rows}
    places = list(dict.fromkeys((row["model"], row["tokens"]) for row in rows))

    def each(variants: Iterable[str], number: Callable[[Row], float | None]) -> list[float | None]:
        measured = [found.get((*place, variant)) for place in places for variant in variants]
        return [None if row is None else number(row) for row in measured]

    def against(variant: str, other: str, number: Callable[[Row, Row], float | None], among: Any = places) -> list[Any]:
        pairs = [(found.get((*place, variant)), found.get((*place, other))) for place in among]
        return [None if one is None or two is None else number(one, two) for one, two in pairs]

    def step_ratio(one: Row, two: Row) -> float:
        return one["step_ms"] / two["step_ms"]

    def saved_time(one: Row, two: Row) -> float | None:
        if copy_bandwidth is None or one["device_bytes"] is None or two["device_bytes"] is None:
            return None
        saved_bytes = (two["device_bytes"] - one["device_bytes"]) * one["parameters"]
        return (two["step_ms"] - one["step_ms"]) / 1e3 / (saved_bytes / copy_bandwidth)

    replicated, sharded = ([key_of(shard, "eager", overlap) for overlap in (True, False)] for shard in SHARDS)
    eager = [*replicated, *sharded]
    plain = key_of("none", "eager", False)
    few = [place for place in places if place[1] == SAVED_TOKENS]
    ratios = [
        at_most(f"te_graph, {what}, {mode}, step over that of {label}", 1.0, against(ours, peer, step_ratio))
        for mode in MODES
        for ours, what, peer, label in (
            (key_of("none", mode, True), "shard none", DDP, "DDP with fp32 copies"),
            (SUMMED_BF16[mode], "shard none, bf16 gradients", DDP, "DDP with fp32 copies"),
            (key_of("none", mode, True), "shard none", DDP_BF16, "DDP in bf16"),
            (key_of("optimizer", mode, True), "shard optimizer", FSDP2, "FSDP2"),
        )
    ]
    return [
        at_most("te_graph, kernels of cat and split in a step", 0, each(OURS, _kernels_of("cat and split"))),
        at_least("te_graph, first reduction behind begin of last backward, us", 0, each(OURS, _first("after_begin"))),
        at_least(
            "overlap, first reduction ahead of end of last backward, us", 0, each(OVERLAPPED, _first("before_end"))
        ),
        at_most(
            "shard optimizer, eager, bytes sent for each element",
            round(SENT_BYTES * (world - 1) / world * PADDING, 4),
            each(sharded, lambda row: row["wire_bytes"]),
        ),
        at_most(
            "shard optimizer, eager, bf16 sent, bytes sent for each element",
            round(SENT_BF16_BYTES * (world - 1) / world * PADDING, 4),
            each([SENT_BF16["eager"]], lambda row: row["wire_bytes"]),
        ),
        at_most(
            "te_graph, eager, bytes on the device to sum gradients, for each element",
            round((6 + 10 * (microbatches - 1)) * PADDING, 3),
            each(eager, lambda row: row["device_bytes"]),
        ),
        at_most("overlap, time of reducing over last bucket + 5 % of all", 1.0, each(OVERLAPPED, _exposed_ratio)),
        *ratios,
        at_least("time saved beside split and cat over bytes saved", SAVED_TIME, against(plain, SPLIT_CAT, saved_time)),
        at_least(
            f"part of the step of split and cat that is saved, {SAVED_TOKENS} tokens",
            SAVED_STEP,
            against(plain, SPLIT_CAT, lambda one, two: 1 - step_ratio(one, two), few),
        ),
        at_most("te_graph, eager, memory at the peak over what is listed", PEAK, each(eager, _peak_ratio)),
    ]


def exposed_ms(row: Row) -> float:
    """What reducing adds to the micro-batches of a step."""
    return row["reducing_ms"] - row["accumulating_ms"]


def _kernels_of(kind: str) -> Callable[[Row], float | None]:
    return lambda row: None if row["kernels"] is None else row["kernels"][kind]


def _first(key: str) -> Callable[[Row], float | None]:
    return lambda row: None if row["first_reduction_us"] is None else row["first_reduction_us"][key]


def _exposed_ratio(row: Row) -> float:
    return exposed_ms(row) / (row["last_bucket_ms"] + LAST_BUCKET_ALLOWANCE * row["all_buckets_ms"])


def _peak_ratio(row: Row) -> float | None:
    return None if row["terms_mib"] is None else row["peak_mib"] / sum(row["terms_mib"].values())
