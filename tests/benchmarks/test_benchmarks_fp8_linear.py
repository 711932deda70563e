"""bench_fp8_linear.py on small shapes, the proof of its numbers, and the table of them."""

import importlib
import json
import sys

import pytest
import torch
from benchmark_scripts import BENCHMARKS, run_script

sys.path.insert(0, str(BENCHMARKS))
bench = importlib.import_module("bench_fp8_linear")
linears = importlib.import_module("cases.fp8.linears")
table = importlib.import_module("cases.fp8.linear_table")


@pytest.fixture(scope="module")
def cpu_run(tmp_path_factory):
    """The script as CI can run it: its process and the folder of its JSON."""
    out = tmp_path_factory.mktemp("results")
    options = ("--device", "cpu", "--shapes", "t256-h512", "--commit", "abc", "--out", out)
    return run_script("bench_fp8_linear.py", *options), out


@pytest.mark.full
def test_a_run_on_the_cpu_has_a_row_for_each_variant(cpu_run):
    process, out = cpu_run
    assert process.returncode == 0, process.stderr
    record = json.loads((out / "fp8_linear.json").read_text())
    measured = ["torch bf16", "te_graph delayed", "te_graph current"]
    assert [row["variant"] for row in record["rows"]] == measured
    assert list(record["not_measured"]) == [
        "casts + _scaled_mm",
        "TransformerEngine delayed",
        "TransformerEngine current",
        "torchao tensorwise",
    ]
    lines = table.fp8_linear_table(record)
    assert lines[4].startswith("| 256 x 512 -> 512 | ")
    assert lines[4].count("/") == 6


@pytest.mark.parametrize("variant", ["torch bf16", "te_graph delayed", "te_graph current"])
def test_variants_compute_a_linear_layer(variant, seed):
    problem = linears.Problem(linears.SMALL["t256-h512"], "cpu", seed)
    layers = [linears.VARIANTS[variant].build(problem) for _ in range(3)]
    errors = bench.errors_of(problem, layers[0])
    assert (max(errors.values()) < 0.01) == (variant == "torch bf16")
    forward, both = bench.steps_of(problem, layers)
    assert [y.shape for y in forward()] == [problem.grad.shape] * 3
    both()
    assert all(calls.parameters[0].grad is not None for calls in layers)


def test_a_layer_that_is_wrong_is_told(seed):
    problem = linears.Problem(linears.SMALL["t256-h512"], "cpu", seed)
    calls = linears.VARIANTS["torch bf16"].build(problem)
    with torch.no_grad():
        calls.parameters[0].add_(0.02)
    with pytest.raises(RuntimeError, match=r"expected errors of at most 0.1, got"):
        bench.errors_of(problem, calls)


def test_targets_compare_with_the_worst_shape():
    def row(shape: str, variant: str, host: float, device: float) -> dict[str, object]:
        names = ("host_forward_us", "host_both_us", "device_forward_us", "device_both_us")
        return {
            "shape": shape,
            "variant": variant,
            **dict(zip(names, (host, 4 * host, device, 3 * device), strict=True)),
            "weight_bytes": 4 + device / 1000,
        }

    rows = [row("a", bench.OURS, 20, 10), row("a", bench.BF16, 20, 15), row("a", bench.FLOOR, 40, 9)]
    rows += [row("b", bench.OURS, 30, 20), row("b", bench.BF16, 20, 15), row("b", bench.FLOOR, 40, 20)]
    assert [(target["got"], target["is_met"]) for target in bench.targets_of(rows)] == [
        (1.5, False),
        (1.5, False),
        (1, True),
        (4.02, True),
        (3, False),
    ]
