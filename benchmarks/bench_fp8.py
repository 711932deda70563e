"""Casts to FP8, of weights, activations and what norms and activations make, and updates of scales: device and host
time beside TransformerEngine, torch and a copy of as many bytes.

    python benchmarks/bench_fp8.py                                     # all parts and variants; needs a GPU
    python benchmarks/bench_fp8.py --small --parts weight update       # small shapes: a quick look
    python benchmarks/bench_fp8.py --device cpu                        # tries the script, times nothing

bf16 in, e4m3 out. What each variant leaves is compared with plain torch before it is timed. Device time is that of a
call in a graph that holds many, whose buffers, together four times the L2 cache, are taken in turn; for updates, which
are once in a graph for each set of buffers, something else is written into the cache before. Host time is that of one
call outside a graph, while the device is idle. Bandwidth is what an operation has to move, over device time, beside
that of a copy of gigabytes in the same run. A complete run is kept as results/fp8.json, a part of it only where --out
says. Exit status: 0 measured, 1 something failed or differs from torch, 2 bad input.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from cases.fp8.parts import BYTES, PARTS, Case
from cases.fp8.problems import make_problem
from cases.fp8.targets import achieved
from cases.fp8.variants import VARIANTS
from lib.harness import Benchmark, Measurements, choose_variants, describe
from lib.launches import count_in_rows
from lib.rotation import time_rotated
from lib.timing import BANDWIDTH_BYTES, SMALL_BANDWIDTH_BYTES, Sampling, measure_bandwidth
from lib.variants import import_packages

FULL, QUICK = Sampling(repeats=7, seconds=0.01), Sampling(repeats=3, seconds=0.002)
COUNTED = ("model", "update")  # parts whose launches are counted, which takes the profiler longer than timing
Timed = tuple[dict[str, Any], Callable[[], Any]]  # a row, and what one call is


def cases_of(part: str, is_small: bool) -> dict[str, Case]:
    return PARTS[part].small if is_small else PARTS[part].cases


@torch.no_grad()
def measure(
    part: str,
    names: Sequence[str],
    is_small: bool,
    variants: Sequence[str],
    device: str,
    seed: int,
    sampling: Sampling,
) -> dict[str, Any]:
    """What is measured on some cases of a part, in a process of its own.

    Returns:
        rows: of operations and variants. failures: likewise, with the error instead of times.
    """
    import_packages(VARIANTS[name] for name in variants)
    timed, failures = [], []
    for name in names:
        problem = make_problem(PARTS[part], cases_of(part, is_small)[name], device, seed)
        for op in PARTS[part].ops:
            for variant in variants:
                where = {"part": part, "case": name, "op": op, "variant": variant}
                try:
                    call = VARIANTS[variant].build(problem, op)
                    if call is None:
                        continue
                    row = {**where, **time_rotated(call, problem, op, sampling), "launches": None}
                except Exception as error:
                    failures.append({**where, "error": describe(error)})
                else:
                    timed.append((row, lambda call=call: call(0)) if part in COUNTED else (row, None))
    # The profiler comes last: launches after it may take longer.
    counted = count_in_rows(timed, device) if part in COUNTED else []
    failures += [{"part": part, "case": " ".join(names), **failure} for failure in counted]
    return {"rows": [row for row, _ in timed], "failures": failures}


def groups_of(parts: Sequence[str], is_small: bool) -> Iterator[tuple[str, list[str]]]:
    """Parts and the cases that share a process: models, which fill much of the memory, have one each."""
    for part in parts:
        names = list(cases_of(part, is_small))
        yield from ((part, [name]) for name in names) if part == "model" else [(part, names)]


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all parts that were asked for; what fails is listed and does not stop the others."""
    sampling = QUICK if options.quick or options.small else FULL
    nbytes = SMALL_BANDWIDTH_BYTES if options.small else BANDWIDTH_BYTES
    groups, rows = list(groups_of(options.parts, options.small)), []
    cases = {part: cases_of(part, options.small) for part in options.parts}
    with Measurements(len(groups) + 1) as measurements:
        bandwidth = measurements.run({"part": "bandwidth"}, measure_bandwidth, options.device, sampling, nbytes)
        for part, names in groups:
            what = (part, names, options.small, options.variants, options.device, options.seed, sampling)
            for row in measurements.rows({"part": part, "cases": " ".join(names)}, measure, *what):
                rows.append({**row, **moved(row, cases[part][row["case"]], bandwidth), "equal_to_eager": True})
    record = {
        "parts": options.parts,
        "cases": {part: {name: case.label for name, case in found.items()} for part, found in cases.items()},
        "ops": {part: PARTS[part].ops for part in options.parts},
        "elements": {part: {name: case.elements for name, case in found.items()} for part, found in cases.items()},
        "variants": {name: VARIANTS[name].label for name in options.variants},
        "not_measured": options.not_measured,
        "bandwidth_tb_per_s": bandwidth and {key: round(value / 1e12, 4) for key, value in bandwidth.items()},
        "rows": rows,
        "failures": measurements.failures,
    }
    # Targets are about megabytes and gigabytes on a GPU; small shapes say nothing about them.
    return record | {"targets": [] if options.small else achieved(record)}


def moved(row: dict[str, Any], case: Case, bandwidth: dict[str, float] | None) -> dict[str, float | None]:
    """Bandwidth of what an operation has to move, and what part of a copy's it is; None where it moves next to
    nothing."""
    if row["op"] not in BYTES:
        return {"tb_per_s": None, "fraction_of_copy": None}
    rate = BYTES[row["op"]] * case.elements / (row["device_us"] * 1e-6)
    return {
        "tb_per_s": round(rate / 1e12, 4),
        "fraction_of_copy": round(rate / bandwidth["copy"], 4) if bandwidth else None,
    }


def print_table(record: dict[str, Any]) -> None:
    columns = f"{'device us':>10}{'host us':>10}{'TB/s':>7}{'of copy':>9}{'launches':>10}"
    print(f"\n{'part':<12}{'case':<14}{'operation':<22}{'variant':<21}{columns}")
    for row in record["rows"]:
        rate = "-" if row["tb_per_s"] is None else f"{row['tb_per_s']:.2f}"
        fraction = "-" if row["fraction_of_copy"] is None else f"{row['fraction_of_copy']:.1%}"
        launches = row["launches"]["outside_graphs"] if row["launches"] else "-"
        print(
            f"{row['part']:<12}{row['case']:<14}{row['op']:<22}{row['variant']:<21}{row['device_us']:>10.1f}"
            f"{row['host_us']:>10.1f}{rate:>7}{fraction:>9}{launches:>10}"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--small", action="store_true", help="small shapes of the same names; always on a CPU")
    add("--parts", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}; default all")
    add("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"of {', '.join(VARIANTS)}; default all")


def prepare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.small = options.small or options.device == "cpu"
    options.parts = list(dict.fromkeys(options.parts or PARTS))
    choose_variants(parser, options, VARIANTS)


BENCHMARK = Benchmark(
    "fp8",
    "Time casts to FP8 and updates of scales.",
    add_options,
    part_options=("small", "parts", "variants"),
    prepare=prepare,
    measure=run_benchmark,
    print_table=print_table,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
