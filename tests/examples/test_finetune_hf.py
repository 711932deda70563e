"""examples/finetune_hf.py with tiny sizes: graphs replay in every step, and equal an eager, uninterrupted run."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import te_graph
from te_graph.testing import assert_bitwise_equal, deterministic, find_differences

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
finetune_hf = importlib.import_module("finetune_hf")
hf_models = importlib.import_module("hf_models")

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, MICRO_BATCHES, LAYERS = 4, 2, 2
TINY = {
    "--layers": LAYERS,
    "--hidden": 16,
    "--heads": 2,
    "--seq-len": 11,
    "--batch-size": 3,
    "--micro-batches": MICRO_BATCHES,
    "--steps": STEPS,
    "--device": "cpu",
}


@pytest.fixture
def run(seed: int) -> Callable[..., int]:
    """Calls main() with tiny sizes, a seed of the test's own and `options`; returns the exit status."""

    def run(*options: object) -> int:
        defaults = [f"{name}={value}" for name, value in (TINY | {"--seed": seed}).items()]
        try:
            return finetune_hf.main([*defaults, *map(str, options)])
        except SystemExit as stop:  # argparse's way
            return stop.code

    return run


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list:
    """The TrainResult of each training that main() makes."""
    kept, train = [], finetune_hf.train

    def keep(*args: object) -> object:
        kept.append(train(*args))
        return kept[-1]

    monkeypatch.setattr(finetune_hf, "train", keep)
    return kept


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> list:
    """The layers that are captured, in all trainings."""
    kept, graph_layers = [], te_graph.graph_layers

    def keep(model: torch.nn.Module, batch: object) -> object:
        report = graph_layers(model, batch)
        kept.extend(model.get_submodule(name) for name in report.layers)
        return report

    monkeypatch.setattr(te_graph, "graph_layers", keep)
    return kept


def replays(layers: list) -> list[tuple[int, int]]:
    infos = [layer.te_graph.info() for layer in layers]
    assert [info["eager_calls"] for info in infos] == [{}] * len(layers)
    return [(info["forward_replays"], info["backward_replays"]) for info in infos]


@pytest.mark.parametrize("model", ["llama", "gpt2", "qwen"])
def test_the_loop_replays_every_layer_and_equals_eager(run, graphed, capsys, device, model):
    assert run("--compare", "--model", model, "--device", device) == 0
    count = STEPS * MICRO_BATCHES
    assert replays(graphed) == [(count, count)] * LAYERS
    output = capsys.readouterr().out.splitlines()
    assert output[-1] == "losses, final parameters and optimizer state are equal bit for bit"
    assert f"{LAYERS} layers graphed" in "".join(output)


def test_trainer_resumes_replays_every_layer_saves_and_equals_eager(run, results, graphed, device, tmp_path):
    # Dropout, which is GPT-2's default, makes the restored generators matter.
    options = ("--trainer", "hf", "--model", "gpt2", "--device", device, "--save-every", 1)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    with deterministic():
        assert run(*options, "--no-graph", "--output", whole) == 0
        assert run(*options, "--output", resumed, "--resume", whole / "checkpoint-2") == 0
    count = (STEPS - 2) * MICRO_BATCHES
    assert replays(graphed) == [(count, count)] * LAYERS
    eager, graph = results
    assert len(eager.losses) == STEPS
    assert_bitwise_equal((graph.losses, graph.state), (eager.losses, eager.state))
    for step in range(3, STEPS + 1):
        saved = [load_file(path / f"checkpoint-{step}" / "model.safetensors") for path in (resumed, whole)]
        assert_bitwise_equal(*saved)


def test_state_is_that_of_parameters_and_optimizer_and_training_changes_it(run, results):
    assert run("--no-graph", "--steps", 1) == 0
    assert run("--no-graph", "--steps", 20, "--lr", 1e-2) == 0
    first, last = results
    parameters = [name for name in first.state if " of " not in name]
    assert len(first.state) == 4 * len(parameters)  # with two moments and the step of each
    assert len(find_differences(first.state, last.state)) == len(first.state)
    assert last.losses[0] == first.losses[0] and last.losses[-1] < first.losses[0] - 0.3


@pytest.mark.parametrize("trainer", ["loop", "hf"])
def test_compare_fails_when_graphs_change_the_last_bit(run, monkeypatch, capsys, trainer):
    def graph_layers(model: torch.nn.Module, batch: object) -> str:
        model.lm_head.weight.data.mul_(1 + torch.finfo(torch.float32).eps)
        return "nothing"

    monkeypatch.setattr(te_graph, "graph_layers", graph_layers)
    assert run("--compare", "--steps", 1, "--no-bf16", "--trainer", trainer) == 1
    assert "error: graph and eager differ: [" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--heads", 3), "--heads: expected twice of it to divide --hidden 16, got 3"),
        (("--trainer", "hf", "--output", "a"), "--save-every, --output: expected both or neither, got one"),
        (("--output", "a", "--save-every", 2), "--output, --resume: expected --trainer hf with them, got loop"),
        (("--trainer", "hf", "--compare", "--output", "a", "--save-every", 2), "--compare: expected no --output"),
        (("--trainer", "hf", "--resume", "nowhere"), "--resume: expected a checkpoint of Trainer, got nowhere"),
        (("--data", "nowhere"), "--data: expected a text file, got nowhere"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_trained(run, monkeypatch, capsys, options, words):
    monkeypatch.setattr(finetune_hf, "train", lambda *args: pytest.fail("it trained"))
    assert run(*options) == 2
    assert words in capsys.readouterr().err


def test_a_loss_that_is_no_number_ends_the_run_with_an_error(run, capsys):
    assert run("--no-graph", "--lr", 1e30) == 1
    assert "error: the loss of step" in capsys.readouterr().err


def test_sequences_are_the_text_in_order_with_itself_as_labels():
    data = torch.arange(23, dtype=torch.uint8)
    sequences = [one for one in map(hf_models.Sequences(data, 5).__getitem__, range(4))]
    assert len(hf_models.Sequences(data, 5)) == 4
    assert torch.equal(torch.cat([one["input_ids"] for one in sequences]), torch.arange(20))
    assert all(torch.equal(one["labels"], one["input_ids"]) for one in sequences)
