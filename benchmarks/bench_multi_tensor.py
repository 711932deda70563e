"""Norm, clip and accumulate over lists of gradients: device and host time beside torch, TransformerEngine and bytes.

    python benchmarks/bench_multi_tensor.py                                     # all lists and variants; needs a GPU
    python benchmarks/bench_multi_tensor.py --small --lists 2000x1024           # small lists: a quick look
    python benchmarks/bench_multi_tensor.py --device cpu                        # tries the script, times nothing

What each variant leaves is compared with plain torch before it is timed. Device time is taken between events, with the
host's calls queued behind a sleep; host time is that of one call while the device is idle. The floor of an operation is
the bytes that it must move at the bandwidth measured in the same run: read-only for norms, copying for the rest. Each
list is measured in a process of its own, with the three functions of mixed precision on two of them. A complete run is
kept as results/multi_tensor.json, a part of it only where --out says. Exit status: 0 measured, 1 something failed or
differs from torch, 2 bad input.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cases.multi_tensor.hp_sequence import FUNCTIONS, HP_VARIANTS
from cases.multi_tensor.targets import achieved
from cases.multi_tensor.tensor_sets import LISTS, SMALL_LISTS
from cases.multi_tensor.variants import ACCUMULATES, OPS, VARIANTS, Problem, Step, floor_seconds
from lib.harness import Benchmark, Measurements, choose_variants, describe
from lib.launches import count_in_rows
from lib.timing import BANDWIDTH_BYTES, SMALL_BANDWIDTH_BYTES, Sampling, measure_bandwidth, time_calls, time_device
from lib.units import micro
from lib.variants import import_packages

HP_LISTS = ("gpt3-1.3b-bf16", "2000x1024")  # on which the three functions are measured
FULL, QUICK = Sampling(repeats=7, seconds=0.03), Sampling(repeats=3, seconds=0.002)


Calls = Iterator[tuple[dict[str, str], Step | Exception]]  # names, and what to call or why that cannot be


def time_steps(
    steps: Calls, problem: Problem, sampling: Sampling
) -> tuple[list[tuple[dict[str, Any], Step]], list[dict[str, Any]]]:
    """Rows with the times of steps, beside the steps; and what failed of them."""
    timed, failures = [], []
    for names, step in steps:
        try:
            if isinstance(step, Exception):
                raise step
            host = time_calls(step, problem.device, sampling)
            # Clips that clip start again from the same numbers, before these become too small.
            prepare = (problem.restore,) if names["op"] == "clip" else ()
            seconds = time_device(step, host, problem.device, sampling, *prepare)
            timed.append(({**names, "device_us": micro(seconds), "host_us": micro(host), "launches": None}, step))
        except Exception as error:
            failures.append({**names, "error": describe(error)})
    return timed, failures


def steps_of(problem: Problem, variants: Sequence[str]) -> Calls:
    """What runs each operation in each variant that has it, compared with plain torch."""
    for op in OPS:
        if op in ACCUMULATES and "high" not in vars(problem) and not problem.has_room_for_high():
            yield {"op": op, "variant": "all"}, MemoryError("gradients in fp32 do not fit")
            continue
        for name in variants:
            try:
                step = VARIANTS[name].build(problem, op)
                if step is None:
                    continue
                problem.verify(op, step)
                problem.restore()
            except Exception as error:
                step = error
            yield {"op": op, "variant": name}, step


def hp_steps_of(problem: Problem, variants: Sequence[str]) -> Calls:
    """The same of the three functions of mixed precision."""
    for name in variants:
        try:
            for function, step in HP_VARIANTS[name].steps(problem).items():
                yield {"op": function, "variant": name}, step
        except Exception as error:
            yield {"op": "all", "variant": name}, error


def walk(problem: Problem) -> Callable[[], list[Any]]:
    """The bare Python walk over parameters and gradients, which is what a function without a plan cannot avoid."""
    return lambda: [parameter.grad for parameter in problem.parameters]


def measure(
    name: str,
    is_small: bool,
    variants: Sequence[str],
    hp_variants: Sequence[str],
    device: str,
    seed: int,
    sampling: Sampling,
) -> dict[str, Any]:
    """What is measured on one list, in a process of its own.

    Returns:
        rows: of the operations. hp_rows: of the three functions of mixed precision. failures: of both. walk_us: host
        time of `walk`.
    """
    import_packages(VARIANTS[name] for name in variants)
    problem = Problem((SMALL_LISTS if is_small else LISTS)[name], device, seed)
    timed, failures = time_steps(steps_of(problem, variants), problem, sampling)
    hp_timed, hp_failures = time_steps(hp_steps_of(problem, hp_variants), problem, sampling)
    walk_us = micro(time_calls(walk(problem), device, sampling))
    # The profiler comes last: launches after it may take longer.
    failures += hp_failures + count_in_rows([*timed, *hp_timed], device)
    return {
        "rows": [row for row, _ in timed],
        "hp_rows": [row for row, _ in hp_timed],
        "failures": failures,
        "walk_us": walk_us,
    }


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all lists that were asked for; what fails is listed and does not stop the others."""
    lists = {name: (SMALL_LISTS if options.small else LISTS)[name] for name in options.lists}
    sampling = QUICK if options.quick or options.small else FULL
    nbytes = SMALL_BANDWIDTH_BYTES if options.small else BANDWIDTH_BYTES
    rows, hp_rows, walks = [], [], {}
    with Measurements(len(lists) + 1) as measurements:
        bandwidth = measurements.run({"list": "bandwidth"}, measure_bandwidth, options.device, sampling, nbytes)
        for name, tensor_set in lists.items():
            hp_variants = options.hp_variants if name in HP_LISTS else ()
            what = (name, options.small, options.variants, hp_variants, options.device, options.seed, sampling)
            found = measurements.run({"list": name}, measure, *what)
            if found is None:
                continue
            walks[name] = found["walk_us"]
            for row in found["rows"]:
                floor = bandwidth and floor_seconds(
                    row["op"], tensor_set.elements, tensor_set.dtype.itemsize, bandwidth
                )
                rows.append({"list": name, **row, **fraction_of(floor, row), "equal_to_eager": True})
            hp_rows += [{"list": name, **row, "equal_to_eager": True} for row in found["hp_rows"]]
            for failure in found["failures"]:
                measurements.fail({"list": name, "op": failure["op"], "variant": failure["variant"]}, failure["error"])
    record = {
        "lists": {name: tensor_set.label for name, tensor_set in lists.items()},
        "tensors": {name: len(tensor_set.shapes) for name, tensor_set in lists.items()},
        "elements": {name: tensor_set.elements for name, tensor_set in lists.items()},
        "ops": OPS,
        "variants": {name: VARIANTS[name].label for name in options.variants},
        "hp_functions": FUNCTIONS,
        "hp_variants": {name: HP_VARIANTS[name].label for name in options.hp_variants},
        "not_measured": options.not_measured,
        "bandwidth_tb_per_s": bandwidth and {key: round(value / 1e12, 4) for key, value in bandwidth.items()},
        "walk_us": walks,
        "rows": rows,
        "hp_rows": hp_rows,
        "failures": measurements.failures,
    }
    # Targets are about gigabytes on a GPU; small lists say nothing about them.
    return record | {"targets": [] if options.small else achieved(record)}


def fraction_of(floor: float | None, row: dict[str, Any]) -> dict[str, float | None]:
    """The floor in microseconds, and what part of the device time it is."""
    if floor is None:
        return {"floor_us": None, "fraction_of_floor": None}
    return {"floor_us": micro(floor), "fraction_of_floor": round(floor * 1e6 / row["device_us"], 4)}


def print_table(record: dict[str, Any]) -> None:
    print(f"\n{'list':<17}{'operation':<12}{'variant':<22}{'device us':>11}{'host us':>10}{'floor':>8}{'launches':>10}")
    for row in (*record["rows"], *record["hp_rows"]):
        floor = f"{row['fraction_of_floor']:.1%}" if row.get("fraction_of_floor") else "-"
        counts = row["launches"]
        launches = f"{counts['outside_graphs']}+{counts['graphs']}g" if counts else "-"
        print(
            f"{row['list']:<17}{row['op'][:11]:<12}{row['variant']:<22}{row['device_us']:>11.1f}{row['host_us']:>10.1f}"
            f"{floor:>8}{launches:>10}"
        )
    for name, found in record["walk_us"].items():
        print(f"{name}: bare walk {found:.1f} us")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--small", action="store_true", help="small lists of the same names; always on a CPU")
    add("--lists", nargs="+", choices=LISTS, metavar="LIST", help=f"of {', '.join(LISTS)}; default all")
    add("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"of {', '.join(VARIANTS)}; default all")


def prepare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.small = options.small or options.device == "cpu"
    options.lists = list(dict.fromkeys(options.lists or LISTS))
    choose_variants(parser, options, VARIANTS)
    absent = {variant.label: variant.missing for variant in HP_VARIANTS.values() if variant.missing}
    options.not_measured |= absent
    options.hp_variants = [name for name, variant in HP_VARIANTS.items() if variant.label not in absent]


BENCHMARK = Benchmark(
    "multi_tensor",
    "Time norm, clip and accumulate over lists of gradients.",
    add_options,
    part_options=("small", "lists", "variants"),
    prepare=prepare,
    measure=run_benchmark,
    print_table=print_table,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
