"""bench_fp8_layers.py on small shapes, the proof of its numbers, and the table of them."""

import importlib
import json
import sys

import pytest
import torch
from benchmark_scripts import BENCHMARKS, run_script
from torch import nn

sys.path.insert(0, str(BENCHMARKS))
bench = importlib.import_module("bench_fp8_layers")
layers = importlib.import_module("cases.fp8.layers")
layer_targets = importlib.import_module("cases.fp8.layer_targets")
table = importlib.import_module("cases.fp8.layer_table")

MEASURED = [name for name, variant in layers.VARIANTS.items() if not variant.needs_cuda]
shapes = pytest.mark.parametrize("shape", ["h512-t256", "llama-8b-t2048"])


@pytest.fixture(scope="module")
def cpu_run(tmp_path_factory):
    """The script as CI can run it: its process and the folder of its JSON."""
    out = tmp_path_factory.mktemp("results")
    options = ("--device", "cpu", "--shapes", "h512-t256", "llama-8b-t2048", "--commit", "abc", "--out", out)
    return run_script("bench_fp8_layers.py", *options), out


@pytest.mark.full
def test_a_run_on_the_cpu_has_a_row_for_each_variant(cpu_run):
    process, out = cpu_run
    assert process.returncode == 0, process.stderr
    record = json.loads((out / "fp8_layers.json").read_text())
    assert [row["variant"] for row in record["rows"]] == MEASURED * 2
    assert list(record["not_measured"]) == [name for name in layers.VARIANTS if name not in MEASURED]
    lines = table.fp8_layers_table(record)
    assert lines[2] == "| | GPT 512 x 2048, 256 tokens | Llama 4096 x 14336, 2048 tokens |"
    assert [line.split(" | ")[0] for line in lines[4 : 4 + len(MEASURED)]] == [f"| {name}" for name in MEASURED]
    assert all(line.count("/") == 2 for line in lines[4 : 4 + len(MEASURED)])


@shapes
@pytest.mark.parametrize("variant", MEASURED)
@pytest.mark.one_of(5)
def test_variants_compute_the_layers(variant, shape, seed):
    problem = layers.Problem(layers.SMALL[shape], 2, "cpu", seed)
    expected = bench.numbers_of(layers.plain(problem, torch.float32))
    model = layers.VARIANTS[variant].build(problem)
    errors = bench.errors_of(bench.numbers_of(model), expected)
    assert (errors["y"] < 0.01) == ("bf16" in variant)
    once = [gradient.clone() for gradient in model.gradients()]
    model.step()
    for before, gradient in zip(once, model.gradients(), strict=True):
        assert gradient.dtype == (torch.float32 if "main_grad" in variant else torch.bfloat16)
        assert (gradient - before).norm() > 0.5 * before.norm()


@shapes
def test_the_plain_layer_is_that_of_te_graph_outside_of_fp8(shape, seed):
    problem = layers.Problem(layers.SMALL[shape], 2, "cpu", seed)
    found = bench.numbers_of(layers.te_graph_graphed(None, problem))
    expected = bench.numbers_of(layers.plain(problem))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    for one, other in zip(found[2], expected[2], strict=True):
        assert torch.equal(one, other)


def test_layers_that_are_wrong_are_told(seed):
    problem = layers.Problem(layers.SMALL["h512-t256"], 2, "cpu", seed)
    expected = bench.numbers_of(layers.plain(problem, torch.float32))
    model = layers.plain(problem)
    with torch.no_grad():
        model.parameters[0].add_(1)
    with pytest.raises(RuntimeError, match=r"expected errors of at most 0.25, got"):
        bench.errors_of(bench.numbers_of(model), expected)
    with pytest.raises(RuntimeError, match=r"expected errors of at most 0.25, got"):
        bench.errors_of((expected[0], expected[1] * float("nan"), expected[2]), expected)


def test_a_layer_that_runs_eagerly_is_not_timed_as_a_graph(seed):
    problem = layers.Problem(layers.SMALL["h512-t256"], 1, "cpu", seed)
    model = layers.te_graph_graphed("delayed", problem)
    with pytest.raises(RuntimeError, match="te_graph: expected replays, got"):
        model.check()
    model.step()
    model.check()


def test_parameters_of_transformer_engine_are_found_by_their_names(seed):
    """As version 2.20.2 names them, with ``fuse_qkv_params``."""
    names = {
        "self_attention.layernorm_qkv": ("layer_norm_weight", "layer_norm_bias", "weight", "bias"),
        "self_attention.proj": ("weight", "bias"),
        "layernorm_mlp": ("layer_norm_weight", "layer_norm_bias", "fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"),
    }
    layer = nn.Module()
    layer.self_attention = nn.Module()
    for path, parameters in names.items():
        parent, _, last = path.rpartition(".")
        module = nn.Module()
        for name in parameters:
            module.register_parameter(name, nn.Parameter(torch.zeros(())))
        layer.get_submodule(parent).add_module(last, module)
    problem = layers.Problem(layers.SMALL["h512-t256"], 1, "cpu", seed)
    found = {id(layers.engine_parameter(layer, name)) for name, _ in problem.layer.named_parameters()}
    assert found == {id(parameter) for parameter in layer.parameters()}


def test_targets_are_those_of_the_shapes_that_were_measured():
    def row(shape: str, variant: str, device: float, kernels: float) -> dict[str, object]:
        return {"shape": shape, "variant": variant, "device_us": device, "kernels": kernels}

    rows = [row("h2048-t512", layer_targets.OURS, 341, 30), row("h512-t256", layer_targets.OURS, 130, 36)]
    assert [(target["what"], target["got"], target["is_met"]) for target in layer_targets.targets_of(rows)] == [
        ("h2048-t512, te_graph delayed, graphed, device us", 341, False),
        ("h2048-t512, te_graph delayed, graphed, fp32 main_grad, device us", None, None),
        ("h512-t256, te_graph delayed, graphed, device us", 130, True),
        ("te_graph delayed, graphed, kernels of a layer", 36, False),
    ]
    assert {shape for shape, *_ in layer_targets.TIMES} <= set(layers.SHAPES)
    assert {variant for _, variant, _ in layer_targets.TIMES} <= set(layers.VARIANTS)
