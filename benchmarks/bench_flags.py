"""Ways to switch update_weight_scale_inv between replays of one graph: launch + sync and host time, many nodes.

    python benchmarks/bench_flags.py                            # needs a GPU; with nvcc the IF node too
    python benchmarks/bench_flags.py --nodes 10 --quick         # a quick look
    python benchmarks/bench_flags.py --device cpu               # tries the script with te_graph's recorder

A graph holds as many updates of few scales as there are nodes. Each step switches the flag, by one write into device
memory that all updates read, or on each of their nodes, and launches the graph; "nothing switched" launches it alone.
That the flag counts is verified before a step is timed. The conditional IF node is measured by a CUDA program of its
own, cases/graphs/conditional_node.cu, beside the same graph without one. A complete run is kept as results/flags.json,
a part of it only where --out says. Exit status: 0 measured, 1 something failed or computes something else, 2 bad input.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lib.harness import Benchmark, Measurements
from lib.timing import Sampling, synchronizer, time_calls
from lib.units import micro
from torch import Tensor

import te_graph as tg

NODES = (1, 10, 100)
COLUMNS, HISTORY = 6, 16
FULL, QUICK = Sampling(repeats=30, seconds=0.3), Sampling(repeats=3, seconds=0.002)
VARIANTS = {
    "unchanged": "nothing switched",
    "step_state": "StepState.set_",
    "kernel_node": "KernelNode.set_ on each node",
}
CONDITIONAL_VARIANTS = {
    "plain": "C++: no condition",
    "if_run": "C++: IF node, body run",
    "if_skipped": "C++: IF node, body skipped",
}
SOURCE = Path(__file__).parent / "cases" / "graphs" / "conditional_node.cu"

Switch = Callable[[bool], None]


class Problem:
    """Scales of weights, ``COLUMNS`` for each of ``nodes`` updates, and graphs of these updates.

    Args:
        nodes: updates in a graph.
        device: "cuda" or "cpu".
        seed: of the histories.
    """

    def __init__(self, nodes: int, device: str, seed: int) -> None:
        torch.manual_seed(seed)
        self._device = device
        self._history = torch.rand(nodes, HISTORY, COLUMNS, device=device) + 0.1
        self._scale = torch.ones(nodes, COLUMNS, device=device)
        self._scale_inv = torch.ones(nodes, COLUMNS, device=device)
        self._mask = torch.zeros(COLUMNS, dtype=torch.bool, device=device)

    def capture(self, flag: bool | Tensor) -> Any:  # [1] where a tensor
        """A graph of all updates with this flag."""
        graph = tg.create_graph() if self._device == "cuda" else tg.Recorder()
        with tg.capture_to_graph(graph):
            for history, scale, scale_inv in zip(self._history, self._scale, self._scale_inv, strict=True):
                tg.amax_and_scale_update_inplace(history, scale, scale_inv, self._mask, flag, 448.0)
        return graph

    def verify(self, step: Switch) -> None:
        """Raise RuntimeError unless ``step(True)`` writes all ``scale_inv``, and ``step(False)`` none."""
        for flag in (True, False, True):
            self._scale_inv.zero_()
            step(flag)
            expected = self._scale.reciprocal() if flag else torch.zeros_like(self._scale)
            if not torch.equal(self._scale_inv, expected):
                raise RuntimeError(f"expected scale_inv of weights {'written' if flag else 'as before'}, got otherwise")


def steps_of(problem: Problem, device: str) -> Iterator[tuple[str, Switch]]:
    """For each variant: what replays its graph with the flag given."""
    state = tg.StepState(device)
    reading = problem.capture(state.update_weight_scale_inv)

    def write_and_replay(flag: bool) -> None:
        state.set_(flag)
        reading.replay()

    yield "step_state", write_and_replay
    passing = problem.capture(False)
    nodes = tg.KernelNode.find(passing, "amax_and_scale_update")

    def set_and_replay(flag: bool) -> None:
        for node in nodes:
            node.set_(update_weight_scale_inv=flag)
        passing.replay()

    yield "kernel_node", set_and_replay


def alternating(step: Switch) -> Callable[[], None]:
    """Calls ``step`` with another flag each time."""
    flag = False

    def call() -> None:
        nonlocal flag
        flag = not flag
        step(flag)

    return call


def measure(nodes: int, device: str, seed: int, sampling: Sampling) -> list[dict[str, Any]]:
    """Rows of one number of nodes, in a process of its own."""
    problem, synchronize = Problem(nodes, device, seed), synchronizer(device)

    def row(variant: str, call: Callable[[], Any]) -> dict[str, Any]:
        host = time_calls(call, device, sampling)
        both = time_calls(lambda: (call(), synchronize()), device, sampling)
        return {"nodes": nodes, "variant": variant, "launch_sync_us": micro(both), "host_us": micro(host)}

    rows = [row("unchanged", problem.capture(False).replay)]
    for variant, step in steps_of(problem, device):
        problem.verify(step)
        rows.append(row(variant, alternating(step)))
    return rows


def find_nvcc() -> str | None:
    """The compiler, or None."""
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin")


def measure_conditional(nodes: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Compile and run conditional_node.cu; its rows.

    Raises:
        RuntimeError: either failed; with what it printed.
    """
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder, "conditional_node"))
        # Setting a condition is device code of the CUDA runtime, which is linked as relocatable code.
        options = ["-O3", "-std=c++17", f"-arch=sm_{major}{minor}", "-rdc=true", "-o", program, str(SOURCE)]
        _output_of([find_nvcc(), *options, "-lcudadevrt"])
        return json.loads(_output_of([program, *map(str, (repeats, *nodes))]))


def _output_of(command: Sequence[str]) -> str:
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(f"{Path(command[0]).name}: {process.stderr.strip() or process.stdout.strip()}")
    return process.stdout


def run_benchmark(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all numbers of nodes that were asked for; what fails is listed and does not stop the others."""
    sampling = QUICK if options.quick or options.device == "cpu" else FULL
    rows = []
    with Measurements(len(options.nodes) + (not options.not_measured)) as measurements:
        for nodes in options.nodes:
            found = measurements.run({"nodes": nodes}, measure, nodes, options.device, options.seed, sampling)
            rows += [row | {"equal_to_eager": True} for row in found or []]
        if not options.not_measured:
            what = (options.nodes, 10 * sampling.repeats)
            found = measurements.run({"program": SOURCE.name}, measure_conditional, *what)
            rows += [row | {"equal_to_eager": None} for row in found or []]
    return {
        "nodes": options.nodes,
        "variants": VARIANTS if options.not_measured else VARIANTS | CONDITIONAL_VARIANTS,
        "not_measured": options.not_measured,
        "rows": rows,
        "failures": measurements.failures,
    }


def print_table(record: dict[str, Any]) -> None:
    print(f"\n{'nodes':>6}  {'variant':<30}{'launch + sync us':>18}{'host us':>10}")
    for row in record["rows"]:
        label = record["variants"][row["variant"]]
        print(f"{row['nodes']:>6}  {label:<30}{row['launch_sync_us']:>18.1f}{row['host_us']:>10.1f}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", nargs="+", type=int, metavar="N", help="updates in a graph; default 1 10 100")


def prepare(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if min(options.nodes or NODES) < 1:
        parser.error(f"--nodes: expected positive numbers, got {options.nodes}")
    options.nodes = list(dict.fromkeys(options.nodes or NODES))
    missing = "needs a GPU" if options.device == "cpu" else "" if find_nvcc() else "nvcc was not found"
    options.not_measured = {"conditional IF node": missing} if missing else {}


BENCHMARK = Benchmark(
    "flags",
    "Time ways to switch a flag between replays of one graph.",
    add_options,
    part_options=("nodes",),
    prepare=prepare,
    measure=run_benchmark,
    print_table=print_table,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
