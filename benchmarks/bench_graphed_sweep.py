"""Host time of a call against the number of parameters of the callable, and the number of callables in a chain.

    python benchmarks/bench_graphed_sweep.py                         # all points; needs a GPU
    python benchmarks/bench_graphed_sweep.py --parameters 4 256 --callables 8
    python benchmarks/bench_graphed_sweep.py --device cpu --quick    # the recorder: tries the script, times nothing

A callable has its parameters in pairs, each in a module of its own as in a model, and multiplies its input with their
sum: a handful of kernels, however many parameters there are, so that what is seen is the cost of a call. All callables
feed one another; gradients exist before and every step adds to them. A complete run is kept as
results/graphed_sweep.json, a part of it only where --out says. Exit status: 0 measured, 1 something failed or gradients
differ from eager ones, 2 bad input.
"""

import argparse
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from cases.graphs.workloads import VARIANTS, Workload
from lib.harness import Benchmark, Measurements
from lib.timing import WARMUP_CALLS, median_us, synchronizer, time_host
from torch import Tensor, nn

from te_graph.testing import same_bits

PARAMETERS, CALLABLES = (4, 16, 64, 256), (1, 8, 64)
CPU_PARAMETERS, CPU_CALLABLES = (4, 16), (1, 8)  # for machines without a GPU, where recording the others takes long
SWEPT = ("torch_graphed", "te_graph")
WIDTH = 8
BURSTS, QUICK_BURSTS = 640, 64  # of one callable; chains get fewer, so that all points have as many timed calls


class Scale(nn.Module):
    """x * the sum of `count` parameters, which lie in pairs in modules of their own."""

    def __init__(self, count: int, **factory: Any) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(nn.LayerNorm(WIDTH, **factory) for _ in range(count // 2))
        with torch.no_grad():
            for parameter in self.parameters():
                # The sum is near one: a long chain neither overflows nor vanishes.
                parameter.normal_(mean=1 / count, std=0.1 / count)

    def forward(self, x: Tensor) -> Tensor:  # x: [width] -> [width]
        # One concatenation, whose backward makes views: the number of kernels hardly depends on that of parameters.
        return x * torch.cat(list(self.parameters())).view(-1, WIDTH).sum(0)


def scale_workload(parameters: int, callables: int, device: str, seed: int) -> Workload:
    torch.manual_seed(seed)
    layers = [Scale(parameters, device=device) for _ in range(callables)]
    return Workload(layers, torch.randn(WIDTH, device=device, requires_grad=True))


def measure(
    variant: str, parameters: int, callables: Sequence[int], device: str, seed: int, bursts: int
) -> list[dict[str, Any]]:
    """Rows of the JSON for one variant and number of parameters; for a process of its own.

    Raises:
        RuntimeError: te_graph's callables did not replay.
    """
    return [measure_point(variant, parameters, count, device, seed, max(1, bursts // count)) for count in callables]


def measure_point(variant: str, parameters: int, callables: int, device: str, seed: int, bursts: int) -> dict[str, Any]:
    """One row: medians per call of a callable, and whether two steps leave the gradients that eager ones leave.

    nodes is those of a callable's graphs, forward and backward, and None where the library does not show its graphs.
    """
    synchronize = synchronizer(device)
    workload = scale_workload(parameters, callables, device, seed)
    started = perf_counter()
    step = VARIANTS[variant].build(workload)
    capture_seconds = perf_counter() - started
    for _ in range(WARMUP_CALLS):
        step()
    forward, backward = time_host((workload.forward, workload.backward), synchronize, bursts)
    replays = workload.replays() if workload.graphs else None
    eager = scale_workload(parameters, callables, device, seed)
    expected = eager.gradients_of(eager.step, count=2)
    return {
        "variant": variant,
        "parameters": parameters,
        "callables": callables,
        "forward_us_per_call": median_us(forward, callables),
        "backward_us_per_call": median_us(backward, callables),
        "nodes_per_callable": round(replays["nodes"] / callables, 2) if replays else None,
        "capture_seconds": round(capture_seconds, 3),
        "equal_to_eager": all(map(same_bits, expected, workload.gradients_of(step, count=2))),
    }


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all points that were asked for; what fails is listed and does not stop the others."""
    groups = [(variant, count) for variant in options.variants for count in options.parameters]
    rows = []
    with Measurements(len(groups)) as measurements:
        for variant, count in groups:
            names = {"variant": variant, "parameters": count}
            group = (variant, count, options.callables, options.device, options.seed, options.bursts)
            rows += measurements.run(names, measure, *group) or []
    return {
        "parameters": options.parameters,
        "callables": options.callables,
        "variants": {name: VARIANTS[name].label for name in options.variants},
        "not_measured": options.not_measured,
        "rows": rows,
        "failures": measurements.failures,
    }


def print_table(record: dict[str, Any]) -> None:
    print(
        f"\n{'variant':<15}{'callables':>10}{'parameters':>11}{'forward us':>12}{'backward us':>12}{'nodes':>7}"
        f"{'capture s':>11}  gradients"
    )
    for row in sorted(record["rows"], key=lambda row: (row["variant"], row["callables"], row["parameters"])):
        print(
            f"{row['variant']:<15}{row['callables']:>10}{row['parameters']:>11}{row['forward_us_per_call']:>12.1f}"
            f"{row['backward_us_per_call']:>12.1f}{row['nodes_per_callable'] or '-':>7}{row['capture_seconds']:>11.2f}"
            f"  {'= eager' if row['equal_to_eager'] else 'DIFFER'}"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parameters", nargs="+", type=int, metavar="N", help=f"of each callable, even; default {PARAMETERS}")
    add("--callables", nargs="+", type=int, metavar="N", help=f"in one chain; default {CALLABLES}")


def prepare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    is_cuda = options.device == "cuda"
    options.parameters = sorted(set(options.parameters or (PARAMETERS if is_cuda else CPU_PARAMETERS)))
    options.callables = sorted(set(options.callables or (CALLABLES if is_cuda else CPU_CALLABLES)))
    for number in options.parameters:
        if number < 2 or number % 2:
            parser.error(f"--parameters: expected even numbers of at least 2, got {number}")
    if options.callables[0] < 1:
        parser.error(f"--callables: expected at least 1, got {options.callables[0]}")
    missing = {name: reason for name in SWEPT if (reason := VARIANTS[name].missing(options.device))}
    options.variants = [name for name in SWEPT if name not in missing]
    options.not_measured = {VARIANTS[name].label: reason for name, reason in missing.items()}
    options.bursts = QUICK_BURSTS if options.quick else BURSTS


BENCHMARK = Benchmark(
    "graphed_sweep",
    "Time calls of graphed callables against their number of parameters.",
    add_options,
    part_options=("parameters", "callables"),
    prepare=prepare,
    measure=run_benchmark,
    print_table=print_table,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
