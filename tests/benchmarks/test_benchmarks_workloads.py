"""Workloads of the benchmarks on the recorder: the example's block, eager gradients, a stand-in for others' graphs."""

import importlib
import sys
import types
from pathlib import Path

import pytest
import torch

from te_graph.testing import same_bits

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
workloads = importlib.import_module("cases.graphs.workloads")
sys.path.insert(0, str(BENCHMARKS.parent / "examples"))
gpt = importlib.import_module("gpt")

LAYERS = 3
VARIANTS = workloads.VARIANTS


def tiny_workload(seed: int):
    return workloads.block_workload(workloads.Shape(hidden=16, heads=2, tokens=4), LAYERS, "cpu", seed)


def test_a_block_computes_what_the_block_of_the_example_computes():
    block = workloads.Block(workloads.Shape(hidden=24, heads=4, tokens=7))
    example = gpt.Block(hidden=24, heads=4, dropout=0.0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter))
    example.load_state_dict(block.state_dict())
    x = torch.randn(1, 7, 24)
    torch.testing.assert_close(block(x), example(x))


def test_a_sharded_block_keeps_a_quarter_of_heads_and_projections():
    block = workloads.Block(workloads.Shape(hidden=2048, heads=16, tokens=2048, shards=4), device="meta")
    sizes = {name: tuple(getattr(block, name).weight.shape) for name in ("qkv", "proj", "fc1", "fc2")}
    assert sizes == {"qkv": (1536, 2048), "proj": (2048, 512), "fc1": (2048, 2048), "fc2": (2048, 2048)}
    assert block.heads == 4 and len(list(block.parameters())) == 12
    half = workloads.Block(workloads.Shape(hidden=24, heads=4, tokens=7, shards=2))
    assert half(torch.randn(1, 7, 24)).shape == (1, 7, 24)


def test_every_step_adds_to_gradients_that_are_already_there(seed):
    workload = tiny_workload(seed)
    buffers = [leaf.grad for leaf in workload.leaves]
    assert len(buffers) == 1 + 12 * LAYERS and not any(grad.any() for grad in buffers)
    workload.step()
    once = [grad.clone() for grad in buffers]
    workload.step()
    assert all(leaf.grad is grad for leaf, grad in zip(workload.leaves, buffers, strict=True))
    assert all(torch.equal(grad, first + first) for grad, first in zip(buffers, once, strict=True))


@pytest.mark.parametrize("variant", ["te_graph", "te_graph_unchained"])
def test_a_te_graph_variant_replays_and_never_runs_eagerly(seed, variant):
    workload = tiny_workload(seed)
    step = VARIANTS[variant].build(workload)
    step()
    for layer in workload.layers:
        info = layer.te_graph.info()
        assert (info["forward_replays"], info["backward_replays"], info["eager_calls"]) == (1, 1, {})


def test_bare_launches_of_chained_graphs_do_what_a_step_does(seed):
    workload = tiny_workload(seed)
    step = VARIANTS["te_graph"].build(workload)

    def launch(graphs):
        for graph in graphs:
            graph.replay()

    expected = workload.gradients_of(step, count=2)[1:]  # x.grad is autograd's
    assert all(map(same_bits, expected, workload.gradients_of(lambda: launch(workload.graphs), count=2)[1:]))
    forwards, backwards = workload.graphs[:LAYERS], workload.graphs[LAYERS:]
    assert len(backwards) == LAYERS
    assert not any(grad.any() for grad in workload.gradients_of(lambda: launch(forwards), count=1))
    assert all(grad.any() for grad in workload.gradients_of(lambda: launch(backwards), count=1)[1:])


def test_layers_that_ran_eagerly_are_not_reported_as_replays(seed):
    workload = tiny_workload(seed)
    step = VARIANTS["te_graph"].build(workload)
    step()
    assert workload.replays()["nodes"] == sum(layer.te_graph.info()["nodes"] for layer in workload.layers)
    workload.layers[1].eval()
    step()
    with pytest.raises(RuntimeError, match=r"expected replays, got eager calls.*callable 1"):
        workload.replays()


def test_eager_layers_are_not_measured_as_te_graph(monkeypatch, seed):
    monkeypatch.setenv("TE_GRAPH_DISABLE", "1")
    with pytest.raises(RuntimeError, match="expected graphs, got eager layers"):
        VARIANTS["te_graph"].build(tiny_workload(seed))


def test_layers_of_transformer_engine_take_the_place_of_blocks(monkeypatch, seed):
    made = []

    def make_layer(hidden, inner, heads, **options):
        made.append((hidden, inner, heads, options["layer_number"]))
        return torch.nn.Linear(hidden, hidden, dtype=options["params_dtype"])

    engine = types.ModuleType("transformer_engine.pytorch")
    engine.TransformerLayer = make_layer
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    shape = workloads.Shape(hidden=16, heads=2, tokens=4, package="transformer_engine")
    assert shape.label == "TransformerLayer of TransformerEngine, h 16, 4 tokens"
    workload = workloads.block_workload(shape, 2, "cpu", seed)
    assert made == [(16, 64, 2, 1), (16, 64, 2, 2)] and len(workload.leaves) == 5
    workload.step()
    assert workload.x.grad.shape == (1, 4, 16)


def test_transformer_engine_gets_the_same_layers_with_a_sample_for_each(monkeypatch, seed):
    given = []
    engine = types.ModuleType("transformer_engine.pytorch")
    engine.make_graphed_callables = lambda modules, sample_args: given.append((modules, sample_args))
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    workload = tiny_workload(seed)
    assert VARIANTS["transformer_engine"].build(workload) == workload.step
    ((modules, samples),) = given
    assert modules is workload.layers
    assert len({sample.data_ptr() for (sample,) in samples} | {workload.x.data_ptr()}) == 1 + LAYERS
    for (sample,) in samples:
        assert (sample.shape, sample.dtype) == (workload.x.shape, workload.x.dtype)
        assert sample.requires_grad and sample.is_leaf
