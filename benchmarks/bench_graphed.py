"""GPT blocks replayed from graphs: wall time, host time and memory of forward + backward, beside eager execution.

    python benchmarks/bench_graphed.py                                  # all blocks and variants; needs a GPU
    python benchmarks/bench_graphed.py --package transformer_engine     # its layers instead of the blocks
    python benchmarks/bench_graphed.py --quick --shapes h512-t256 --variants eager te_graph
    python benchmarks/bench_graphed.py --device cpu --quick             # the recorder: tries the script, times nothing
    python benchmarks/bench_graphed.py --profile --shapes h512-t256     # where te_graph's host time goes

Eight blocks, or layers of another package, run after one another in bf16; gradients exist before and every iteration
adds to them. Each pair of shape and variant is measured in a process of its own. After its times and memory are taken,
the launches of one step are counted, and te_graph's host time is split: its forward and backward calls, and its graphs
launched without it.
A complete run is kept as results/graphed.json, with --package as results/graphed_PACKAGE.json, a part of one only where
--out says. Exit status: 0 measured, 1 something failed or gradients differ from eager ones, 2 bad input.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from cases.graphs.workloads import VARIANTS, Shape, Workload, block_workload
from lib.harness import Benchmark, Measurements, choose_variants, describe
from lib.launches import count_launches, trace_step
from lib.timing import Sampling, median_us, synchronizer, time_host, time_wall
from lib.training_step import measure_step, print_profile, summarize
from lib.variants import import_packages
from torch import Tensor

from te_graph.testing import deterministic, same_bits

LAYERS = 8
FULL, QUICK = Sampling(repeats=9, seconds=0.15, bursts=20), Sampling(repeats=3, seconds=0.02, bursts=3)

ENGINE = "transformer_engine"
CPU_SHAPE = "tiny"  # for machines without a GPU; the others take minutes there
SHAPES = {
    "h2048-t2048": Shape(hidden=2048, heads=16, tokens=2048),
    "h2048-tp4-t2048": Shape(hidden=2048, heads=16, tokens=2048, shards=4),
    "h2048-tp4-t512": Shape(hidden=2048, heads=16, tokens=512, shards=4),
    "h512-t256": Shape(hidden=512, heads=8, tokens=256),
    "te-h2048-t2048": Shape(hidden=2048, heads=16, tokens=2048, package=ENGINE),
    "te-h2048-t512": Shape(hidden=2048, heads=16, tokens=512, package=ENGINE),
    "te-h512-t256": Shape(hidden=512, heads=8, tokens=256, package=ENGINE),
    CPU_SHAPE: Shape(hidden=32, heads=2, tokens=8),
}
# What layers of a package are measured with: its own way to graph them, and the bounds of what can be reached.
PACKAGE_VARIANTS = ("eager", ENGINE, "te_graph", "whole_graph")
OUTSIDE_LAYERS = (
    "Outside the layers, a step copies x and the gradient of the last output into static memory of te_graph's first "
    "and last layer, and autograd adds the gradient of x to x.grad; outside_by_operator tells what was launched."
)


def split_host_time(workload: Workload, device: str, sampling: Sampling) -> dict[str, list[float]]:
    """Seconds of te_graph's calls and of its graphs launched in the same order without it.

    Returns:
        forward, backward: host times of one step's calls of the layers and of its one call of backward; the engine's
        work, which is autograd's, is in the latter. bare_forward, bare_backward: host times of the same graphs'
        `replay` in a Python loop. bare_wall: wall times of that loop. bare_engine: host times of one call of backward
        through a single view, which is what autograd itself takes.
    """
    graphs, synchronize = workload.graphs, synchronizer(device)
    if len(graphs) != 2 * LAYERS:
        raise RuntimeError(
            f"te_graph: expected a forward and a backward of {LAYERS} layers, got {len(graphs)} captures"
        )

    def launch(part: Sequence[Any]) -> None:
        for graph in part:
            graph.replay()

    # All forwards were captured before the first backward, each in the order in which a step replays them.
    bare = (partial(launch, graphs[:LAYERS]), partial(launch, graphs[LAYERS:]))
    forward, backward = time_host((workload.forward, workload.backward), synchronize, sampling.bursts)
    bare_forward, bare_backward = time_host(bare, synchronize, sampling.bursts)
    _, bare_engine = time_host(one_view(workload.x), synchronize, sampling.bursts)
    bare_wall = time_wall(partial(launch, graphs), synchronize, replace(sampling, repeats=min(sampling.repeats, 3)))
    return {
        "forward": forward,
        "backward": backward,
        "bare_forward": bare_forward,
        "bare_backward": bare_backward,
        "bare_engine": bare_engine,
        "bare_wall": bare_wall,
    }


def one_view(leaf: Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """A forward that views `leaf` [...], and its backward, which adds to the gradient of `leaf`."""
    views: list[Tensor] = []
    grad = leaf.detach().clone().zero_()
    return lambda: views.append(leaf.view_as(leaf)), lambda: views.pop().backward(grad)


def measure(shape: str, variant: str, device: str, seed: int, sampling: Sampling) -> dict[str, Any]:
    """What is measured of one variant, in a process of its own.

    Returns:
        What `measure_step` gives, and: replays, split (None unless te_graph runs), launches (None on a CPU); error: why
        the last two are missing, since the times are worth keeping without them.

    Raises:
        RuntimeError: te_graph's layers did not replay, so their times say nothing.
    """
    import_packages([VARIANTS[variant], SHAPES[shape]])
    workload = block_workload(SHAPES[shape], LAYERS, device, seed)
    step = VARIANTS[variant].build(workload)
    sample = {**measure_step(step, device, sampling), "split": None, "launches": None, "error": None}
    sample["replays"] = workload.replays() if workload.graphs else None
    try:
        if workload.graphs:
            sample["split"] = split_host_time(workload, device, sampling)
        if device == "cuda":
            sample["launches"] = count_launches(trace_step(step, device))
    except Exception as error:
        sample["error"] = describe(error)
    return sample


def check(shape: str, variants: Sequence[str], device: str, seed: int) -> dict[str, bool]:
    """Whether the gradients that two steps leave equal eager ones bit for bit; for a process of its own."""
    import_packages([SHAPES[shape], *(VARIANTS[name] for name in variants)])

    def gradients(variant: str) -> list[Tensor]:
        workload = block_workload(SHAPES[shape], LAYERS, device, seed)
        return workload.gradients_of(VARIANTS[variant].build(workload), count=2)

    with deterministic():
        expected = gradients("eager")
        if not all(grad.isfinite().all() and grad.any() for grad in expected):
            raise RuntimeError(f"{shape}: expected finite eager gradients with values other than zero")
        return {name: all(map(same_bits, expected, gradients(name))) for name in variants}


def row_of(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What JSON keeps of the samples of one shape and variant: times over all processes, counts of the last one."""
    splits = [sample["split"] for sample in samples if sample["split"]]
    parts = {key: [seconds for split in splits for seconds in split[key]] for key in (splits[0] if splits else ())}
    return {
        **summarize(samples, LAYERS),
        "launches": samples[-1]["launches"],
        "split_us_per_layer": {key: median_us(seconds, LAYERS) for key, seconds in parts.items()} or None,
        "replays": samples[-1]["replays"],
    }


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Measure and check all that was asked for; what fails is listed and does not stop the others."""
    pairs = [(shape, variant) for shape in options.shapes for variant in options.variants]
    rounds = [pair for number in range(options.rounds) for pair in (reversed(pairs) if number % 2 else pairs)]
    checked = [name for name in options.variants if name != "eager"]
    checks = options.shapes if options.check and checked else []
    samples: dict[tuple[str, str], list[dict[str, Any]]] = {pair: [] for pair in pairs}
    equal: dict[str, dict[str, bool]] = {}

    with Measurements(len(rounds) + len(checks)) as measurements:
        for shape, variant in rounds:
            names = {"shape": shape, "variant": variant}
            sample = measurements.run(names, measure, shape, variant, options.device, options.seed, options.sampling)
            if sample:
                samples[shape, variant].append(sample)
                if sample["error"]:
                    measurements.fail(names, sample["error"])
        for shape in checks:
            names = {"shape": shape, "variant": "check"}
            equal[shape] = measurements.run(names, check, shape, checked, options.device, options.seed) or {}

    return {
        "layers": LAYERS,
        "outside_layers": OUTSIDE_LAYERS,
        "shapes": {name: SHAPES[name].label for name in options.shapes},
        "variants": {name: VARIANTS[name].label for name in options.variants},
        "not_measured": options.not_measured,
        "rows": [
            {"shape": s, "variant": v, **row_of(found), "equal_to_eager": equal.get(s, {}).get(v)}
            for (s, v), found in samples.items()
            if found
        ],
        "failures": measurements.failures,
    }


def print_table(record: dict[str, Any]) -> None:
    print(
        f"\n{'shape':<16}{'variant':<19}{'wall us':>9}{'host us':>9}{'peak MiB':>10}{'spread':>8}{'graphs':>8}"
        f"{'outside':>8}{'waits':>6}  gradients"
    )
    words = {True: "= eager", False: "DIFFER", None: "-"}
    for row in record["rows"]:
        peak = "-" if row["peak_mib"] is None else f"{row['peak_mib']:.0f}"
        counts = row["launches"] or dict.fromkeys(("graphs", "outside_graphs", "waits"), "-")
        print(
            f"{row['shape']:<16}{row['variant']:<19}{row['wall_us_per_layer']:>9.1f}{row['host_us_per_layer']:>9.1f}"
            f"{peak:>10}{row['spread']:>8.1%}{counts['graphs']:>8}{counts['outside_graphs']:>8}{counts['waits']:>6}"
            f"  {words[row['equal_to_eager']]}"
        )
    for row in record["rows"]:
        name = f"{row['shape']} {row['variant']}"
        if row["split_us_per_layer"]:
            print(f"{name}: us per layer:", *(f"{k} {v:.1f}" for k, v in row["split_us_per_layer"].items()))
        if row["replays"]:
            print(f"{name}:", *(f"{key} {value}" for key, value in row["replays"].items()))
        if row["launches"] and row["launches"]["outside_by_operator"]:
            print(f"{name}: outside graphs:", row["launches"]["outside_by_operator"])


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--package", choices=[ENGINE], help="measure its layers instead of the blocks")
    add("--shapes", nargs="+", choices=SHAPES, metavar="SHAPE", help=f"of {', '.join(SHAPES)}; te-* with --package")
    add("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"of {', '.join(VARIANTS)}")
    add("--rounds", type=int, default=1, help="processes in which each pair is measured, in alternating order")
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="compare gradients with eager ones")
    add("--profile", action="store_true", help="profile te_graph on the first of --shapes instead of measuring")


def prepare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    shapes = [name for name, shape in SHAPES.items() if shape.package == options.package]
    for name in options.shapes or ():
        if name not in shapes:
            whose = f"layers of {options.package}" if options.package else "blocks, as there is no --package"
            parser.error(f"--shapes: expected {whose}, got {name}")
    if options.package and (missing := VARIANTS[options.package].missing(options.device)):
        parser.error(f"--package: expected what can be measured here, got {options.package}: {missing}")
    is_every_variant = not options.variants
    choose_variants(parser, options, VARIANTS)
    if options.package:
        options.results = f"graphed_{options.package}"
        options.variants = [name for name in options.variants if name in PACKAGE_VARIANTS or not is_every_variant]
    is_cuda = options.device == "cuda"
    options.shapes = list(dict.fromkeys(options.shapes or [name for name in shapes if (name == CPU_SHAPE) != is_cuda]))
    options.sampling = QUICK if options.quick else FULL


BENCHMARK = Benchmark(
    "graphed",
    "Time GPT blocks, eager and replayed from graphs.",
    add_options,
    part_options=("shapes", "variants", "check"),
    prepare=prepare,
    measure=run_benchmark,
    print_table=print_table,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, or the profiler; returns the exit status."""
    options = BENCHMARK.parse_args(argv)
    if not options.profile:
        return BENCHMARK.run(options)
    import_packages([SHAPES[options.shapes[0]]])
    workload = block_workload(SHAPES[options.shapes[0]], LAYERS, options.device, options.seed)
    print_profile(VARIANTS["te_graph"].build(workload))
    return 0


if __name__ == "__main__":
    sys.exit(main())
