"""examples/fp8_mlp.py end to end: references are its eager FP8 run, and its bf16 run of the same options."""

import math
import sys
from collections.abc import Callable

import pytest
import torch
from fp8_runs import fp8_linear, fp8_mlp
from gpt_runs import text_file

import te_graph as tg

pytestmark = pytest.mark.usefixtures("one_thread")
text = pytest.fixture(text_file)
TINY = {
    "--context": 4,
    "--embedding": 16,
    "--hidden": 48,
    "--batch-size": 32,
    "--microbatches": 2,
    "--steps": 3,
    "--device": "cpu",
}


@pytest.fixture
def run(seed, text) -> Callable[..., int]:
    """Calls main() with tiny sizes, a seed of the test's own and `options`; returns the exit status."""

    def run(*options: object) -> int:
        defaults = [f"{name}={value}" for name, value in (TINY | {"--seed": seed, "--data": text}).items()]
        try:
            return fp8_mlp.main([*defaults, *map(str, options)])
        except SystemExit as stop:  # argparse's way
            return stop.code

    return run


@pytest.fixture
def results(monkeypatch) -> list:
    """The TrainResult of each training that main() makes."""
    kept, train = [], fp8_mlp.train

    def keep(*args: object, **kwargs: object) -> object:
        kept.append(train(*args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(fp8_mlp, "train", keep)
    return kept


@pytest.mark.parametrize("mechanism", fp8_linear.MECHANISMS)
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_compare_finds_graphs_equal_to_eager(microbatches, mechanism, run, results, device, capsys):
    options = ("--device", device, "--microbatches", microbatches, "--mechanism", mechanism)
    assert run("--compare", *options) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("are equal bit for bit")
    eager, graph = results
    assert len(eager.losses) == 3 and len({loss.hex() for loss in eager.losses}) == 3
    assert eager.losses == graph.losses
    compared = eager.state.keys() & graph.state
    for name in ("embedding.weight", "layers.layers.0.weight8_t", "exp_avg of embedding.weight"):
        assert name in compared
    for name in ("history", "scale", "scale_inv"):
        assert {f"layers.forward_scaling.{name}", f"layers.backward_scaling.{name}"} <= compared


def test_compare_fails_when_one_scale_is_another(run, monkeypatch, capsys):
    class Disturbed(fp8_linear.MicroBatches):
        def __init__(self, model, layers, sample_args):
            super().__init__(model, layers, sample_args)
            if sample_args is not None:
                layers.backward_scaling.scale[1] *= 1.0625

    monkeypatch.setattr(fp8_mlp, "MicroBatches", Disturbed)
    assert run("--compare") == 1
    error = capsys.readouterr().err
    assert "error: graph and eager differ: ['losses'][1] differs: got " in error


# 0.0 and -0.0 are equal as numbers, not as bits.
@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({}, ""),
        ({"loss": -0.0}, "['losses'][1] differs: got -0.0, expected 0.0"),
        ({"scale": -0.0}, "['state']['scale'] differs: 1 of 1 elements, "),
        ({"extra": 1.0}, "the structure differs: "),
    ],
)
def test_compare_tells_what_is_different(other, difference):
    def result(loss: float = 0.0, **tensors: float) -> object:
        tensors = {"weight": 1.0, "scale": 0.0} | tensors
        return fp8_mlp.TrainResult([1.0, loss], {name: torch.tensor([value]) for name, value in tensors.items()})

    found = fp8_mlp.tell_differences(vars(result(**other)), vars(result()))
    assert found.startswith(difference) and bool(found) == bool(difference)


def test_the_loss_falls_and_ends_near_that_of_bf16(run, results, tmp_path, device):
    plot = tmp_path / "loss.png"
    options = ("--steps", 60, "--lr", 4e-3, "--microbatches", 1, "--batch-size", 64, "--plot", plot)
    assert run("--device", device, *options) == 0
    fp8, bf16 = (result.losses for result in results)
    assert len(fp8) == len(bf16) == 60
    for losses in (fp8, bf16):
        assert abs(losses[0] - math.log(256)) < 0.3  # untrained: every byte is equally likely
    ends = [sum(losses[-10:]) / 10 for losses in (fp8, bf16)]
    assert max(ends) < 3.6 and abs(ends[0] - ends[1]) < 0.1
    assert fp8 != bf16
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_every_product_of_every_micro_batch_is_in_fp8(run, monkeypatch, device):
    formats, gemm = [], fp8_linear.gemm

    def watch(a8, a_scale_inv, b8, b_scale_inv, out_dtype, **options):
        formats.append((a8.dtype, b8.dtype, options.get("use_fast_accum", False)))
        return gemm(a8, a_scale_inv, b8, b_scale_inv, out_dtype, **options)

    monkeypatch.setattr(fp8_linear, "gemm", watch)
    assert run("--no-graph", "--device", device) == 0
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    layers, micro_batches = 3, 6
    assert formats.count((e4m3, e4m3, True)) == layers * micro_batches  # results
    assert formats.count((e5m2, e4m3, False)) == 2 * layers * micro_batches  # gradients of inputs and of weights
    assert len(formats) == 3 * layers * micro_batches


@pytest.mark.parametrize("option", ["--graph", "--no-graph"])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_weights_are_cast_once_in_a_step(microbatches, option, run, monkeypatch, device):
    casts, cast_ = [], tg.Fp8Weights.cast_

    def spy(weights, **kwargs):
        casts.append(len(weights))
        cast_(weights, **kwargs)

    monkeypatch.setattr(tg.Fp8Weights, "cast_", spy)
    assert run(option, "--device", device, "--microbatches", microbatches) == 0
    assert casts == [3] * 3  # three layers, three steps


def test_with_graphs_the_model_is_replayed_for_every_micro_batch(run, monkeypatch, device):
    trainers, initialize = [], fp8_mlp.Trainer.__init__

    def keep(trainer, *args):
        initialize(trainer, *args)
        trainers.append(trainer)

    monkeypatch.setattr(fp8_mlp.Trainer, "__init__", keep)
    assert run("--graph", "--device", device) == 0
    (trainer,) = trainers
    info = trainer.model.te_graph.info()
    assert (info["forward_replays"], info["backward_replays"], info["eager_calls"]) == (6, 6, {})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--hidden", 40), ("--hidden", "multiple of 16", "got 40")),
        (("--batch-size", 8), ("--batch-size", "multiple of 16", "got 8")),
        (("--embedding", 0), ("--embedding", "at least 1", "got 0")),
        (("--lr", "nan"), ("--lr", "positive", "got nan")),
        (("--mechanism", "host"), ("--mechanism", "host")),
        (("--plot", "a.txt"), ("--plot", "ends in .png", "a.txt")),
        (("--plot", "no/such/folder/a.png"), ("--plot", "existing folder")),
        (("--data", "no/such/file"), ("--data", "not a file")),
    ],
)
def test_wrong_options_are_refused_before_anything_is_trained(options, words, run, results, capsys):
    assert run(*options) == 2
    (message,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    for word in words:
        assert word in message
    assert results == []


def test_a_device_without_fp8_is_refused(run, results, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run("--device", "cuda") == 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert run("--device", "cuda") == 2
    errors = capsys.readouterr().err
    assert "got cuda, which torch finds none of" in errors and "compute capability 8.9 or more" in errors
    assert results == []


def test_a_plot_without_matplotlib_is_refused(run, results, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("--plot", tmp_path / "a.png") == 2
    assert "matplotlib" in capsys.readouterr().err
    assert results == []


def test_a_loss_that_is_no_number_ends_the_run_with_an_error(run, capsys):
    assert run("--lr", 1e30, "--steps", 6) == 1
    assert "error: the loss is" in capsys.readouterr().err


def test_both_precisions_begin_with_the_same_weights(seed):
    config = fp8_mlp.Config(
        **{"data": None, "device": "cpu", "context": 4, "embedding": 16, "hidden": 32, "batch_size": 16},
        **{"microbatches": 1, "steps": 1, "lr": 1e-3, "history_length": 2, "mechanism": "flag", "seed": seed},
        **{"graph": False, "compare": False, "plot": None},
    )
    models = [fp8_mlp.build_model(config, precision) for precision in ("fp8", "bf16")]
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(models[0].embedding.weight, models[0].embedding.weight.roll(1, 0))
