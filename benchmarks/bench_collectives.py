"""All-reduce, reduce-scatter and all-gather over the GPUs of one host, beside NCCL, torch's symmetric memory and vLLM.

    python benchmarks/bench_collectives.py                            # on all GPUs, at least two
    python benchmarks/bench_collectives.py --world 2 --sizes 4194304  # on two, up to 4 MB: a quick look
    python benchmarks/bench_collectives.py --device cpu               # tries the script, times nothing

bf16, 1 KB to 256 MB in the larger of input and result, in a graph of many calls and eagerly. This script starts a
process for each rank, with NVLink multicast off. What each variant leaves is compared with a reference before it is
timed, te_graph's bit for bit. Then variants alternate, so that drift affects all alike; a burst is a number of graphs,
or of groups of eager calls, back to back, timed one by one between events on the device. Each time is that of the
slowest rank. Inputs are zeros then: results that replace inputs, as those of NCCL's all-reduce, would grow. A complete
run is kept as results/collectives_RANKS.json, a part of it only where --out says. Exit status: 0 measured, 1 something
failed or is wrong, 2 bad input.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from cases.collectives.targets import achieved
from cases.collectives.variants import DTYPE, OPS, VARIANTS, Call, Reference, Setting, label_of
from lib.harness import Benchmark, choose_variants, describe
from lib.rank_processes import ENVIRONMENT, Rank, run_on_ranks
from lib.results import WORLDS
from lib.timing import CYCLES_PER_SECOND
from lib.units import KIB, MIB, micro, size_name
from tqdm import tqdm

SIZES = tuple(KIB * 4**power for power in range(10))  # 1 KB to 256 MB
CPU_SIZE = 64 * KIB
MODES = {"graph": "in a graph", "eager": "eager"}
TIME_LIMIT = 300  # seconds for all of it, several times what it takes
HEAD_START = 2e-4  # seconds for which the device sleeps, so that launches of graphs stay ahead of it


@dataclass(frozen=True)
class RoundRobin:
    """How long to measure: `rounds` bursts of each variant, each of `replays` times per size."""

    rounds: int
    replays: int

    def replays_of(self, nbytes: int) -> int:
        """Fewer of what takes a millisecond."""
        return self.replays if nbytes <= MIB else max(2, self.replays // 2)


FULL, QUICK, TRIAL = RoundRobin(rounds=10, replays=20), RoundRobin(rounds=3, replays=4), RoundRobin(rounds=2, replays=2)


def calls_for(nbytes: int, device: str) -> int:
    """Calls in a graph, or in a group of eager ones: as many of the small ones as a model of many layers makes, so that
    what lies between two graphs does not count. On a CPU there only have to be several.
    """
    return 2 if device == "cpu" else 100 if nbytes <= 4 * MIB else 40 if nbytes <= 16 * MIB else 10


@dataclass(frozen=True)
class Plan:
    """What is measured on all ranks."""

    ops: list[str]
    sizes: list[int]
    variants: list[str]
    seed: int
    turns: RoundRobin


@dataclass(frozen=True)
class Timed:
    """A variant in a mode, ready to be timed: one `step` is a graph, or a group of eager calls."""

    variant: str
    mode: str
    step: Callable[[], object]


def capture(call: Call, calls: int, rank: Rank) -> Callable[[], object]:
    """What replays a graph of so many calls. On a CPU, what makes the calls."""
    if not rank.is_gpu:
        return repeat(call.run, calls)
    graph = torch.cuda.CUDAGraph()
    # NCCL's own threads call the driver meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        repeat(call.run, calls)()
    call.captured()
    return graph.replay


def repeat(run: Callable[[], object], calls: int) -> Callable[[], None]:
    def step() -> None:
        for _ in range(calls):
            run()

    return step


def first_error(rank: Rank, error: str | None) -> str | None:
    """The first error among those of all ranks, which come here together."""
    found: list[str | None] = [None] * rank.world
    dist.all_gather_object(found, error, group=rank.control)
    return next((f"rank {number}: {what}" for number, what in enumerate(found) if what is not None), None)


def build_and_verify(setting: Setting, reference: Reference, variant: str, op: str, nbytes: int) -> list[Timed]:
    """Build and verify a variant, by itself and out of a graph."""
    call: Call = VARIANTS[variant].build(setting, op, nbytes)
    is_exact, calls = VARIANTS[variant].is_exact, calls_for(nbytes, setting.rank.device)
    reference.verify(call, call.run, is_exact)
    reference.verify(call, capture(call, 1, setting.rank), is_exact)
    call.x.zero_()
    steps = {"graph": capture(call, calls, setting.rank), "eager": repeat(call.run, calls)}
    return [Timed(variant, mode, steps[mode]) for mode in MODES]


def burst(timed: Timed, replays: int, rank: Rank) -> list[float]:
    """Seconds of each of so many steps back to back, all ranks beginning together."""
    rank.synchronize()
    dist.barrier(group=rank.control)
    # The first one waits for the rank that begins last, and is left out.
    if not rank.is_gpu:
        marks = [perf_counter()]
        for _ in range(replays + 1):
            timed.step()
            marks.append(perf_counter())
        return [end - start for start, end in pairwise(marks[1:])]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 2)]
    if timed.mode == "graph":
        torch.cuda._sleep(int(HEAD_START * CYCLES_PER_SECOND))
    events[0].record()
    for event in events[1:]:
        timed.step()
        event.record()
    rank.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events[1:])]


def time_in_turns(entries: Sequence[Timed], replays: int, rounds: int, rank: Rank) -> list[list[float]]:
    """Seconds of each step of each entry on the slowest rank. Entries alternate, and the first one rotates."""
    times: list[list[float]] = [[] for _ in entries]
    for turn in range(rounds):
        for number in range(len(entries)):
            place = (turn + number) % len(entries)
            times[place] += burst(entries[place], replays, rank)
    slowest = torch.tensor(times, dtype=torch.float64)  # [entries, rounds * replays]
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=rank.control)
    return slowest.tolist()


def summarize(seconds: Sequence[float], calls: int) -> dict[str, float]:
    """Median and 99th percentile of the time of one of the `calls` that each number holds."""
    ordered = sorted(seconds)
    high = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return {"p50_us": micro(statistics.median(ordered) / calls), "p99_us": micro(high / calls)}


@torch.no_grad()
def measure_one(setting: Setting, plan: Plan, op: str, nbytes: int) -> dict[str, Any]:
    """Rows and failures of an op at one size, the same on all ranks."""
    rank, entries, failures = setting.rank, [], []
    reference = Reference(rank, op, nbytes, plan.seed)
    for variant in plan.variants:
        if op not in VARIANTS[variant].ops:
            continue
        found, error = [], None
        try:
            found = build_and_verify(setting, reference, variant, op, nbytes)
        except Exception as raised:
            error = describe(raised)
        # What failed on one rank is left out on all, so that none waits for another.
        error = first_error(rank, error)
        if error is None:
            entries += found
        else:
            failures.append({"op": op, "bytes": nbytes, "variant": variant, "error": error})
    del reference
    replays, calls = plan.turns.replays_of(nbytes), calls_for(nbytes, rank.device)
    times = time_in_turns(entries, replays, plan.turns.rounds, rank) if entries else []
    rows = [
        {
            "op": op,
            "bytes": nbytes,
            "variant": timed.variant,
            "mode": timed.mode,
            **summarize(seconds, calls),
            "calls": calls,
            "replays": len(seconds),
            "equal_to_eager": True,
        }
        for timed, seconds in zip(entries, times, strict=True)
    ]
    setting.group.check()
    return {"rows": rows, "failures": failures}


def measure(rank: Rank, plan: Plan) -> None:
    """What each rank does; rank 0 emits what `measure_one` finds, one after the other."""
    setting = Setting(rank, max(plan.sizes))
    if rank.rank == 0:
        rank.emit({"uses_peers": setting.group.uses_peers})
    for op in plan.ops:
        for nbytes in plan.sizes:
            found = measure_one(setting, plan, op, nbytes)
            if rank.rank == 0:
                rank.emit(found)
    setting.group.close()


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what was asked for. If ranks fail, what they found until then is kept."""
    found: dict[str, Any] = {"uses_peers": None, "rows": [], "failures": []}
    turns = TRIAL if options.device == "cpu" else QUICK if options.quick else FULL
    plan = Plan(options.ops, options.sizes, options.variants, options.seed, turns)
    with tqdm(total=len(plan.ops) * len(plan.sizes), desc="benchmark", disable=None) as bar:

        def receive(part: dict[str, Any]) -> None:
            found["uses_peers"] = part.get("uses_peers", found["uses_peers"])
            for key in ("rows", "failures"):
                found[key] += part.get(key, [])
            bar.update("rows" in part)

        try:
            run_on_ranks(measure, options.world, options.device, (plan,), receive, TIME_LIMIT)
        except (RuntimeError, TimeoutError) as error:
            found["failures"].append({"op": "all", "error": describe(error)})
    record = {
        "world": options.world,
        "environment": ENVIRONMENT,
        "uses_peers": found["uses_peers"],
        "dtype": str(DTYPE).removeprefix("torch."),
        "ops": {op: OPS[op] for op in options.ops},
        "sizes": options.sizes,
        "modes": MODES,
        "variants": {name: label_of(name, options.device) for name in options.variants},
        "not_measured": options.not_measured,
        "rows": found["rows"],
        "failures": found["failures"],
    }
    # Targets are about GPUs.
    return record | {"targets": achieved(record) if options.device == "cuda" else []}


def print_table(record: dict[str, Any]) -> None:
    print(f"\n{'operation':<16}{'bytes':>8}  {'variant':<12}{'mode':<8}{'p50 us':>10}{'p99 us':>10}")
    for row in record["rows"]:
        print(
            f"{row['op']:<16}{size_name(row['bytes']):>8}  {row['variant']:<12}{row['mode']:<8}"
            f"{row['p50_us']:>10.2f}{row['p99_us']:>10.2f}"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--world", type=int, help="ranks; by default all GPUs")
    add("--ops", nargs="+", choices=OPS, metavar="OP", help=f"of {', '.join(OPS)}; default all")
    add("--sizes", type=int, metavar="BYTES", help="sizes up to this one; default all, on a CPU 64 KB")
    add("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"of {', '.join(VARIANTS)}; default all")


def prepare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    gpus = torch.cuda.device_count() if options.device == "cuda" else None
    options.world = options.world or (2 if gpus is None else gpus)
    if options.world < 2 or (gpus is not None and options.world > gpus):
        parser.error(f"--world: expected at least 2 ranks, each with a GPU, got {options.world}, with {gpus} GPUs")
    if options.world not in WORLDS and options.out is not None and not options.is_part:
        parser.error(f"--world: expected one of {', '.join(map(str, WORLDS))} for results to keep, got {options.world}")
    largest = options.sizes or (CPU_SIZE if options.device == "cpu" else SIZES[-1])
    options.sizes = [nbytes for nbytes in SIZES if nbytes <= largest]
    if not options.sizes:
        parser.error(f"--sizes: expected at least {SIZES[0]}, got {largest}")
    options.ops = list(dict.fromkeys(options.ops or OPS))
    choose_variants(parser, options, VARIANTS, options.world)
    options.results = f"collectives_{options.world}"


BENCHMARK = Benchmark(
    "collectives",
    "Time collectives over the GPUs of one host.",
    add_options,
    part_options=("ops", "sizes", "variants"),
    prepare=prepare,
    measure=run_benchmark,
    print_table=print_table,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
