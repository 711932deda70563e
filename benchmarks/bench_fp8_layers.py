"""Transformer layers that train in FP8: device and host time of forward + backward, and how many kernels that takes;
beside bf16, torch, its compiler, and TransformerEngine.

    python benchmarks/bench_fp8_layers.py                                 # all shapes and variants; needs a GPU
    python benchmarks/bench_fp8_layers.py --shapes h2048-t512 --quick     # a quick look
    python benchmarks/bench_fp8_layers.py --shapes h2048-t512 --variants "te_graph delayed, graphed"
    python benchmarks/bench_fp8_layers.py --device cpu                    # tries the script on small shapes

Four layers are called one after another, and numbers are those of one: a step is a later micro-batch, in which weights
have been cast and gradients are added to those that are there. Before a variant is timed, its result and gradients are
compared with the layers in float32: in FP8 the relative error may be 0.25. Host time is that of a step while the device
is idle; device time that between events around many; kernels, with copies and memsets, are those that the profiler sees
the device run, in graphs too. torch's compiler takes long, so that two shapes are compiled, unless --variants asks for
it. A complete run is kept as results/fp8_layers.json, a part of it only where --out says. Exit status: 0 measured, 1
something failed or is far from float32, 2 bad input.
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from typing import Any

import torch
from cases.fp8.layer_targets import targets_of
from cases.fp8.layers import COMPILED, COMPILED_SHAPES, SHAPES, SMALL, VARIANTS, Problem, Trained, plain
from lib.harness import Benchmark, Measurements, choose_variants, describe
from lib.launches import count_device_work, trace_step
from lib.timing import WARMUP_CALLS, Sampling, time_calls, time_device
from lib.units import micro
from lib.variants import import_packages
from torch import Tensor

FULL, QUICK = Sampling(repeats=15, seconds=0.03), Sampling(repeats=3, seconds=0.002)
LAYERS = 4
MOST_ERROR = 0.25


def numbers_of(model: Trained) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y and the gradient of x, [tokens, 1, hidden], and what one step adds to gradients [...], once scales have
    settled."""
    for _ in range(WARMUP_CALLS):
        model.step()
    for gradient in model.gradients():
        gradient.zero_()
    y, dx = model.step()
    model.check()
    return y.detach(), dx, model.gradients()


def errors_of(found: tuple[Tensor, Tensor, list[Tensor]], expected: tuple[Tensor, Tensor, list[Tensor]]) -> Any:
    """Relative errors of `numbers_of` a model; of its parameters the largest.

    Raises:
        RuntimeError: one is too large.
    """
    y, dx, *grads = (
        float((one.float() - other).norm() / other.norm())
        for one, other in zip((*found[:2], *found[2]), (*expected[:2], *expected[2]), strict=True)
    )
    errors = {"y": y, "dx": dx, "dw": max(grads)}
    if not all(error <= MOST_ERROR for error in (y, dx, *grads)):
        raise RuntimeError(f"expected errors of at most {MOST_ERROR}, got {errors}")
    return {name: round(error, 5) for name, error in errors.items()}


def measure_variant(problem: Problem, variant: str, expected: Any, sampling: Sampling) -> dict[str, Any]:
    """What a row holds of a variant."""
    model, device = VARIANTS[variant].build(problem), problem.device
    errors = errors_of(numbers_of(model), expected)
    host = time_calls(model.step, device, sampling)
    device_seconds = time_device(model.step, host, device, sampling)
    work = count_device_work(trace_step(model.step, device)) if device == "cuda" else {}
    model.check()
    return {
        "host_us": micro(host / LAYERS),
        "device_us": micro(device_seconds / LAYERS),
        "kernels": work["kernels"] / LAYERS if work else None,
        "busy_us": micro(work["seconds"] / LAYERS) if work else None,
        "errors": errors,
        "equal_to_eager": True,
    }


def measure(shape: str, variants: Sequence[str], device: str, seed: int, sampling: Sampling) -> Any:
    """Rows and failures of a shape, in a process of its own; one variant at a time is in memory."""
    import_packages(VARIANTS[name] for name in variants)
    rows, failures = [], []
    problem = Problem((SMALL if device == "cpu" else SHAPES)[shape], LAYERS, device, seed)
    expected = numbers_of(plain(problem, torch.float32))
    for variant in variants:
        try:
            found = measure_variant(problem, variant, expected, sampling)
            rows.append({"shape": shape, "variant": variant, **found})
        except Exception as error:
            failures.append({"shape": shape, "variant": variant, "error": describe(error)})
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return {"rows": rows, "failures": failures}


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all that was asked for; what fails is listed and does not stop the others."""
    sampling = QUICK if options.quick or options.device == "cpu" else FULL
    rows = []
    with Measurements(len(options.shapes)) as measurements:
        for shape in options.shapes:
            is_compiled = options.compiles_all or shape in COMPILED_SHAPES
            variants = [name for name in options.variants if is_compiled or name != COMPILED]
            what = (shape, variants, options.device, options.seed, sampling)
            rows += measurements.rows({"shape": shape}, measure, *what)
    return {
        "shapes": {name: SHAPES[name].label for name in options.shapes},
        "variants": {name: VARIANTS[name].label for name in options.variants},
        "layers": LAYERS,
        "not_measured": options.not_measured,
        "rows": rows,
        "targets": [] if options.device == "cpu" else targets_of(rows),
        "failures": measurements.failures,
    }


def print_table(record: dict[str, Any]) -> None:
    print(
        f"\n{'shape':<16}{'variant':<43}{'device us':>10}{'busy':>9}{'kernels':>9}{'host us':>9}  errors of y, dx, dw"
    )
    for row in record["rows"]:
        times = "".join(
            f"{'-' if row[key] is None else format(row[key], '.1f'):>{width}}"
            for key, width in (("device_us", 10), ("busy_us", 9), ("kernels", 9), ("host_us", 9))
        )
        print(f"{row['shape']:<16}{row['variant']:<43}{times}  {' '.join(map(str, row['errors'].values()))}")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, metavar="SHAPE", help=f"of {', '.join(SHAPES)}; default all")
    add("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"of {'; '.join(VARIANTS)}; default all")


def prepare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.shapes = list(dict.fromkeys(options.shapes or SHAPES))
    options.compiles_all = options.variants is not None
    choose_variants(parser, options, VARIANTS)


BENCHMARK = Benchmark(
    "fp8_layers",
    "Time transformer layers that train in FP8.",
    add_options,
    part_options=("shapes", "variants"),
    prepare=prepare,
    measure=run_benchmark,
    print_table=print_table,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
