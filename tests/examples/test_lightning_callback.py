"""examples/lightning_callback.py: under Lightning's autocast, accumulation and clipping all layers replay, and no bit
changes."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import te_graph

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
lightning_callback = importlib.import_module("lightning_callback")

pytestmark = pytest.mark.usefixtures("one_thread")


def test_all_layers_replay_and_equal_eager(monkeypatch, capsys, device):
    layers, graph_layers = [], te_graph.graph_layers

    def keep(model: torch.nn.Module, step: object) -> object:
        report = graph_layers(model, step)
        layers.extend(model.get_submodule(name) for name in report.layers)
        return report

    monkeypatch.setattr(te_graph, "graph_layers", keep)
    monkeypatch.setattr(lightning_callback, "STEPS", 3)
    assert lightning_callback.main(device) == 0
    assert "those of eager execution, bit for bit" in capsys.readouterr().out
    infos = [layer.te_graph.info() for layer in layers]
    # Two layers, eagerly and graphed; three steps of two micro-batches.
    assert [(info["forward_replays"], info["backward_replays"]) for info in infos] == [(0, 0)] * 2 + [(6, 6)] * 2


def test_a_difference_is_told(monkeypatch, capsys):
    runs = []

    def graph_layers(model: torch.nn.Module, step: object) -> None:
        runs.append(step)
        model.model.lm_head.weight.data.mul_(len(runs))

    monkeypatch.setattr(te_graph, "graph_layers", graph_layers)
    monkeypatch.setattr(lightning_callback, "STEPS", 1)
    with pytest.warns(UserWarning, match="no graph was replayed"):
        assert lightning_callback.main("cpu") == 1
    assert "error: graph and eager differ: ['loss'] differs: " in capsys.readouterr().err
