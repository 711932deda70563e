"""FP8 linear layers, eagerly: host and device time of a forward and of forward + backward, memory, errors; beside
torch in bf16, TransformerEngine, torchao, and te_graph's casts with torch._scaled_mm.

    python benchmarks/bench_fp8_linear.py                               # all shapes and variants; needs a GPU
    python benchmarks/bench_fp8_linear.py --shapes t512-h2048 --quick   # a quick look
    python benchmarks/bench_fp8_linear.py --device cpu                  # tries the script on small shapes

Eight layers are called in one region, one after another on the same values, and times are those of one layer; a call is
that of a later micro-batch: weights have been cast, gradients are added to those that are there. Results and gradients
of each variant are compared with a layer in float64 before it is timed: in FP8 the relative error may be 0.1. Variants
take turns: host time is that of a step while the device is idle, device time that between events around many. Memory is
what layers have allocated once they have been called, workspaces that a package keeps with it. A complete run is
kept as results/fp8_linear.json, a part of it only where --out says. Exit status: 0 measured, 1 something failed or is
far from float64, 2 bad input.
"""

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cases.fp8.linears import SHAPES, SMALL, VARIANTS, Calls, Problem
from lib.harness import Benchmark, Measurements, choose_variants, describe
from lib.targets import at_most
from lib.timing import Sampling, time_device_in_turn, time_in_turn
from lib.units import micro
from lib.variants import import_packages
from torch.nn import functional as F

FULL, QUICK = Sampling(repeats=20, seconds=0.05), Sampling(repeats=3, seconds=0.002)
MOST_ERROR = 0.1
LAYERS = 8
OURS, BF16, FLOOR = "te_graph delayed", "torch bf16", "casts + _scaled_mm"


def errors_of(problem: Problem, calls: Calls) -> dict[str, float]:
    """Relative errors of y and of the gradients of x and weight, against float64, once scales have settled.

    Raises:
        RuntimeError: one is too large.
    """
    x, weight, bias = (t.detach().double().requires_grad_() for t in (problem.x, problem.weight, problem.bias))
    y = F.linear(x, weight, bias)
    expected = [y.detach(), *torch.autograd.grad(y, (x, weight), problem.grad.double())]
    for _ in range(3):
        with calls.region():
            result = calls.forward(problem.x)
        grads = torch.autograd.grad(result, (problem.x, calls.parameters[0]), problem.grad)
    found = {
        name: float((one.double() - other).norm() / other.norm())
        for name, one, other in zip(("y", "dx", "dw"), (result.detach(), *grads), expected, strict=True)
    }
    if not max(found.values()) <= MOST_ERROR:
        raise RuntimeError(f"expected errors of at most {MOST_ERROR}, got {found}")
    return {name: round(error, 5) for name, error in found.items()}


def steps_of(problem: Problem, layers: Sequence[Calls]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forwards of all layers, and these with their backwards."""
    inputs = [problem.x.detach().requires_grad_() for _ in layers]
    grads = [problem.grad] * len(layers)

    def forward() -> list[torch.Tensor]:
        with layers[0].region():
            return [calls.forward(x) for calls, x in zip(layers, inputs, strict=True)]

    def both() -> None:
        torch.autograd.backward(forward(), grads)

    return forward, both


def measure(shapes: Sequence[str], variants: Sequence[str], device: str, seed: int, sampling: Sampling) -> Any:
    """Rows and failures of some shapes, in a process of its own."""
    import_packages(VARIANTS[name] for name in variants)
    rows, failures = [], []
    for name in shapes:
        problem = Problem((SMALL if device == "cpu" else SHAPES)[name], device, seed)
        steps, facts = {}, {}
        for variant in variants:
            try:
                before = allocated(device)
                layers = [VARIANTS[variant].build(problem) for _ in range(LAYERS)]
                forward, both = steps_of(problem, layers)
                forward()
                weight_bytes = (allocated(device) - before) / (LAYERS * problem.weight.numel())
                facts[variant] = {"errors": errors_of(problem, layers[0]), "weight_bytes": round(weight_bytes, 3)}
                for _ in range(3):
                    both()
                steps[variant] = forward, both
            except Exception as error:
                failures.append({"shape": name, "variant": variant, "error": describe(error)})
        if not steps:
            continue
        timed = [step for each in steps.values() for step in each]
        host = time_in_turn(timed, device, sampling)
        times = time_device_in_turn(timed, host, device, sampling)
        for number, variant in enumerate(steps):
            forward, both = 2 * number, 2 * number + 1
            rows.append(
                {
                    "shape": name,
                    "variant": variant,
                    "host_forward_us": micro(host[forward] / LAYERS),
                    "host_both_us": micro(host[both] / LAYERS),
                    "device_forward_us": micro(times[forward] / LAYERS),
                    "device_both_us": micro(times[both] / LAYERS),
                    **facts[variant],
                    "equal_to_eager": True,
                }
            )
    return {"rows": rows, "failures": failures}


def allocated(device: str) -> int:
    """Bytes that tensors take on the GPU; 0 on the CPU."""
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def targets_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Host time beside torch's layer, device time beside the casts and products alone."""
    found = {(row["shape"], row["variant"]): row for row in rows}
    shapes = list(dict.fromkeys(row["shape"] for row in rows))

    def over(key: str, other: str, change: Callable[[float, float], float]) -> list[float | None]:
        pairs = [(found.get((shape, OURS)), found.get((shape, other))) for shape in shapes]
        return [change(one[key], two[key]) if one and two else None for one, two in pairs]

    ratio, difference = (lambda a, b: a / b), (lambda a, b: a - b)
    return [
        at_most("host time of a forward beside torch bf16", 1.25, over("host_forward_us", BF16, ratio)),
        at_most("host time of forward + backward beside torch bf16", 0.70, over("host_both_us", BF16, ratio)),
        at_most("device us of a forward above casts + _scaled_mm", 2, over("device_forward_us", FLOOR, difference)),
        at_most(
            "bytes for an element of a weight", 4.05, [found.get((s, OURS), {}).get("weight_bytes") for s in shapes]
        ),
        at_most("device us of both above casts + _scaled_mm", 2, over("device_both_us", FLOOR, difference)),
    ]


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all that was asked for; what fails is listed and does not stop the others."""
    sampling = QUICK if options.quick or options.device == "cpu" else FULL
    rows = []
    with Measurements(len(options.shapes)) as measurements:
        for shape in options.shapes:
            what = ([shape], options.variants, options.device, options.seed, sampling)
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
    columns = f"{'host us':>9}{'both':>9}{'device us':>11}{'both':>9}  errors of y, dx, dw"
    print(f"\n{'shape':<18}{'variant':<28}{columns}")
    for row in record["rows"]:
        times = (row["host_forward_us"], row["host_both_us"], row["device_forward_us"], row["device_both_us"])
        widths = (9, 9, 11, 9)
        cells = "".join(f"{value:>{width}.1f}" for value, width in zip(times, widths, strict=True))
        print(f"{row['shape']:<18}{row['variant']:<28}{cells}  {' '.join(map(str, row['errors'].values()))}")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shapes", nargs="+", choices=SHAPES, metavar="SHAPE", help=f"of {', '.join(SHAPES)}; default all")
    add("--variants", nargs="+", choices=VARIANTS, metavar="VARIANT", help=f"of {', '.join(VARIANTS)}; default all")


def prepare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    options.shapes = list(dict.fromkeys(options.shapes or SHAPES))
    choose_variants(parser, options, VARIANTS)


BENCHMARK = Benchmark(
    "fp8_linear",
    "Time FP8 linear layers.",
    add_options,
    part_options=("shapes", "variants"),
    prepare=prepare,
    measure=run_benchmark,
    print_table=print_table,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
