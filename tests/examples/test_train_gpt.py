"""examples/train_gpt.py end to end: the reference of every run is an eager, uninterrupted one of the same options."""

import importlib
import math
import os
import random
import re
import sys
import types

import pytest
import torch
import torch.utils.deterministic
from gpt_runs import gpt, load, text_data, text_file, tiny_run, train_gpt, trainer

from te_graph.testing import assert_bitwise_equal, deterministic, find_differences

pytestmark = pytest.mark.usefixtures("one_thread")
text, run = pytest.fixture(text_file), pytest.fixture(tiny_run)


@pytest.fixture
def refuses(run, capsys, monkeypatch):
    """Asserts that options are refused with status 2 and one error line with the given words, nothing trained."""

    def refuses(*options: object, words: tuple[object, ...]) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(train_gpt, "train", lambda *args, **kwargs: pytest.fail("it trained"))
            assert run(*options) == 2
        (message,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        for word in words:
            assert str(word) in message

    return refuses


def perturbed_graphs(factor: float) -> types.ModuleType:
    """A stand-in for te_graph whose "graphs" run everything eagerly and multiply the layers' outputs by `factor`."""
    module = types.ModuleType("te_graph")

    def make_graphed_callables(callables, sample_args):
        assert all(args[0].requires_grad for args in sample_args)
        for layer in callables:
            layer.register_forward_hook(lambda layer, args, output: output * factor)
        return callables

    class Sequence:
        def __init__(self, function):
            self.function = function

        def __call__(self, *args):
            return self.function(*args)

        def info(self):
            return {"forward_replays": 0, "eager_calls": {}}

    module.make_graphed_callables = make_graphed_callables
    module.graphed = Sequence
    module.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_
    return module


def test_the_loss_falls(run, tmp_path, capsys):
    checkpoint = tmp_path / "end.pt"
    assert run("--no-graph", "--steps", 40, "--lr", 1e-2, "--checkpoint", checkpoint) == 0
    losses = load(checkpoint)["losses"]
    assert len(losses) == 40
    assert abs(losses[0] - math.log(256)) < 0.3  # untrained: every byte is equally likely
    assert losses[-1] < 4.2
    table = capsys.readouterr().out.splitlines()[-1].split()
    assert table[:4] == ["eager", "40", f"{losses[0]:.4f}", f"{losses[-1]:.4f}"]
    assert abs(float(table[4]) - losses[-1]) < 1  # the held-out text is predicted about as well


# Dropout makes the restored generators matter; bf16 optimizer state must survive as it is.
@pytest.mark.parametrize("option", ["--dropout=0.1", "--dtype=bfloat16", "--fp8=delayed"])
def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(run, tmp_path, option):
    whole, half, end = (tmp_path / name for name in ("whole.pt", "half.pt", "end.pt"))
    assert run("--no-graph", option, "--checkpoint", whole) == 0
    assert run("--no-graph", option, "--checkpoint", half, "--stop-after", 3) == 0
    assert len(load(half)["losses"]) == 3
    assert run("--no-graph", option, "--checkpoint", end, "--resume", half) == 0
    assert len(load(end)["losses"]) == 6
    assert_bitwise_equal(load(end), load(whole))
    assert find_differences(load(half)["model"], load(whole)["model"])


def test_save_every_leaves_the_checkpoint_of_that_step(run, tmp_path, monkeypatch):
    half, saved = tmp_path / "half.pt", []
    assert run("--no-graph", "--checkpoint", half, "--stop-after", 4) == 0

    def keep(path, state):
        trainer.save_checkpoint(path, state)
        saved.append(load(path))

    monkeypatch.setattr(train_gpt, "save_checkpoint", keep)
    assert run("--no-graph", "--checkpoint", tmp_path / "end.pt", "--save-every", 4) == 0
    assert [len(state["losses"]) for state in saved] == [4, 6]
    assert_bitwise_equal(saved[0], load(half))


def test_another_seed_gives_another_run(run, tmp_path, seed):
    for path, value in (("a.pt", seed), ("b.pt", seed), ("c.pt", seed + 1)):
        assert run("--no-graph", "--stop-after", 1, "--seed", value, "--checkpoint", tmp_path / path) == 0
    assert_bitwise_equal(load(tmp_path / "a.pt"), load(tmp_path / "b.pt"))
    assert find_differences(load(tmp_path / "a.pt")["losses"], load(tmp_path / "c.pt")["losses"])


def test_a_checkpoint_cut_short_is_refused(run, refuses, tmp_path, rng):
    checkpoint = tmp_path / "whole.pt"
    assert run("--no-graph", "--stop-after", 1, "--checkpoint", checkpoint) == 0
    content = checkpoint.read_bytes()
    for length in (0, 1, 100, rng.randrange(len(content)), len(content) // 2, len(content) - 1):
        checkpoint.write_bytes(content[:length])
        refuses("--no-graph", "--resume", checkpoint, words=("--resume", checkpoint, "cut short"))


def test_a_checkpoint_of_another_configuration_is_refused_by_name(run, refuses, text, tmp_path, rng):
    checkpoint = tmp_path / "half.pt"
    assert run("--no-graph", "--stop-after", 1, "--checkpoint", checkpoint) == 0
    resume = ("--no-graph", "--resume", checkpoint)
    refuses(*resume, "--hidden", 64, words=(checkpoint, "--hidden is 32 there, 64 here"))
    refuses(*resume, "--clip", 2, words=("--clip is 1.0 there, 2.0 here",))
    refuses(*resume, "--lr", 0.5, "--steps", 7, words=("--lr is 0.001 there, 0.5 here", "--steps is 6 there, 7 here"))
    text.write_bytes(rng.randbytes(1000))
    refuses(*resume, words=("SHA-256 of --data",))


def test_files_that_are_no_checkpoint_are_refused(refuses, tmp_path):
    path = tmp_path / "file.pt"
    refuses("--no-graph", "--resume", path, words=("--resume", path, "not a file"))
    path.write_text("losses: none")
    refuses("--no-graph", "--resume", path, words=("--resume", path, "is no checkpoint"))
    torch.save({"model": {}}, path)
    refuses(
        "--no-graph", "--resume", path, words=(path, "lacks fp8, losses, norms, optimizer, rng, scheduler, settings")
    )
    torch.save([1], path)
    refuses("--no-graph", "--resume", path, words=(path, "lacks"))


def test_a_write_that_fails_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    trainer.save_checkpoint(path, {"step": 1})

    def fail(state, file):
        file.write(b"half of it")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space"):
        trainer.save_checkpoint(path, {"step": 2})
    assert load(path) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_data_that_is_missing_or_empty_or_too_short_is_refused(run, refuses, text, tmp_path, rng):
    text.unlink()
    refuses("--no-graph", words=("--data", text, "not a file"))
    refuses("--no-graph", "--data", tmp_path, words=("--data", tmp_path, "not a file"))
    text.write_bytes(b"")
    refuses("--no-graph", words=("--data", text, "empty"))
    text.write_bytes(rng.randbytes(65))
    refuses("--no-graph", words=("--data", "at least 66 bytes", "got 65"))
    text.write_bytes(rng.randbytes(66))
    assert run("--no-graph") == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--heads", 3), ("--heads", "divisor of --hidden 32", "got 3")),
        (("--stop-after", 7), ("--stop-after", "at most --steps 6", "got 7")),
        (("--save-every", 2), ("--save-every", "expected --checkpoint")),
        (("--compare", "--checkpoint", "a.pt"), ("--compare", "neither --checkpoint nor --resume")),
        (("--checkpoint", "no/such/folder/a.pt"), ("--checkpoint", "existing folder", "no/such/folder/a.pt")),
        (("--plot", "a.txt"), ("--plot", "ends in .png", "a.txt")),
        (("--layers", 0), ("--layers", "at least 1", "got 0")),
        (("--lr", "nan"), ("--lr", "positive", "got nan")),
        (("--clip", "-1"), ("--clip", "0 or a positive number", "got -1")),
        (("--clip=-inf",), ("--clip", "0 or a positive number", "got -inf")),
        (("--clip", "nan"), ("--clip", "0 or a positive number", "got nan")),
        (("--clip", "much"), ("--clip", "much")),
        (("--dropout", 1), ("--dropout", "below 1", "got 1")),
        (("--dtype", "float16"), ("--dtype", "float16")),
    ],
)
def test_wrong_and_contradicting_options_are_refused(refuses, options, words):
    refuses("--no-graph", *options, words=words)


def test_cuda_is_refused_where_there_is_none(refuses, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuses("--no-graph", "--device", "cuda", words=("--device", "got cuda"))


def test_a_plot_without_matplotlib_is_refused(refuses, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refuses("--no-graph", "--plot", tmp_path / "a.png", words=("--plot", "matplotlib"))


def test_graphs_and_clipping_without_te_graph_are_refused(run, refuses, monkeypatch):
    monkeypatch.setitem(sys.modules, "te_graph", None)
    refuses("--clip", 0, words=("--graph", "te_graph", "--no-graph"))
    refuses("--no-graph", words=("--clip", "te_graph", "--clip 0"))
    refuses("--compare", "--no-graph", "--clip", 0, words=("te_graph",))
    assert run("--no-graph", "--clip", 0) == 0


def test_a_plot_is_drawn_for_whole_and_for_resumed_runs(run, tmp_path):
    plot, half = tmp_path / "a.png", tmp_path / "half.pt"
    assert run("--no-graph", "--plot", plot, "--stop-after", 3, "--checkpoint", half) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    plot.unlink()
    assert run("--no-graph", "--plot", plot, "--resume", half) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_loss_that_is_no_number_ends_the_run_with_an_error(run, tmp_path, capsys):
    checkpoint = tmp_path / "a.pt"
    assert run("--no-graph", "--lr", 1e30, "--checkpoint", checkpoint) == 1
    assert "error: the loss of step" in capsys.readouterr().err
    assert not checkpoint.exists()


def test_a_byte_is_predicted_from_those_before_it_alone():
    block = gpt.Block(hidden=16, heads=2, dropout=0.0)
    x = torch.randn(3, 8, 16)  # [batch, seq, hidden]
    changed = x.clone()
    changed[:, 5:] += 1
    same = (block(x) == block(changed)).all(-1)  # [batch, seq]
    assert same[:, :5].all() and not same[:, 5:].any()


def test_held_out_text_is_never_trained_on(rng):
    text, seq_len = rng.randbytes(rng.randrange(100, 1000)), rng.randrange(1, 49)
    corpus = text_data.split_text(text, seq_len)
    assert bytes(corpus.training.tolist() + corpus.validation.tolist()) == text
    # Every byte of a drawn batch must come from the training part, here marked by zeros.
    tokens, targets = next(text_data.draw_batches(corpus.training * 0, 1, 512, seq_len, torch.Generator()))
    assert not tokens.any() and not targets.any()
    assert tokens.shape == targets.shape == (512, seq_len)


def test_batches_are_consecutive_bytes_and_reach_both_ends_of_the_text(seed):
    data = torch.arange(20, dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = next(text_data.draw_batches(data, 1, 1000, 8, generator))
    assert torch.equal(targets, tokens + 1) and torch.equal(tokens, tokens[:, :1] + torch.arange(8))
    assert tokens.min() == 0 and targets.max() == 19
    walked = [token for batch, _ in text_data.all_batches(data, 2, 6) for token in batch.flatten().tolist()]
    assert walked == list(range(18))


def test_the_generator_is_the_position_in_the_text(seed):
    data = torch.randint(256, (5000,), dtype=torch.uint8)
    generator, resumed = torch.Generator().manual_seed(seed), torch.Generator()
    tokens, _ = next(text_data.draw_batches(data, 1, 100, 8, generator))
    resumed.set_state(generator.get_state())
    second, again = (next(text_data.draw_batches(data, 1, 100, 8, g))[0] for g in (generator, resumed))
    assert torch.equal(second, again) and not torch.equal(second, tokens)


def test_compare_fails_when_graphs_change_the_last_bit(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "te_graph", perturbed_graphs(1 + torch.finfo(torch.float32).eps))
    assert run("--compare") == 1
    error = capsys.readouterr().err
    # Which of the numbers of a step differs first depends on how the sum of the loss is rounded.
    assert re.match(r"error: graph and eager differ: \['(losses|norms)'\]\[\d+\] differs: ", error)


# 0.0 and -0.0 are equal as numbers, not as bits.
@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({}, ""),
        ({"loss": 2.5}, "['losses'][1] differs: got 2.5, expected 0.0"),
        ({"norm": -0.0, "loss": 2.5}, "['losses'][1] differs: got 2.5, expected 0.0; 1 more differ"),
        ({"norm": -0.0}, "['norms'][0] differs: got -0.0, expected 0.0"),
        ({"weight": -0.0}, "['state']['weight'] differs: 1 of 2 elements, the first at 1: got -0.0, expected 0.0"),
        ({"moment": -0.0}, "['optimizer_state']['exp_avg of weight'] differs: 1 of 1 elements, "),
    ],
)
def test_compare_tells_what_is_different(other, difference):
    def result(loss: float = 0.0, norm: float = 0.0, weight: float = 0.0, moment: float = 0.0) -> dict:
        tensors = {"weight": torch.tensor([0.5, weight])}, {"exp_avg of weight": torch.tensor([moment])}
        return train_gpt.compared(train_gpt.TrainResult([1.0, loss], [norm, 1.0], [random.random()], *tensors, 0.0))

    found = train_gpt.tell_differences(result(**other), result())
    assert found == difference if not difference.endswith(", ") else found.startswith(difference)


@pytest.mark.parametrize("before", [(False, True, None), (True, False, ":16:8")])
def test_compare_runs_deterministic_algorithms_and_undoes_it(run, monkeypatch, before):
    def settings() -> tuple[object, ...]:
        fill = torch.utils.deterministic.fill_uninitialized_memory
        return torch.are_deterministic_algorithms_enabled(), fill, os.environ.get("CUBLAS_WORKSPACE_CONFIG")

    def watch(*args, **kwargs):
        seen.append(settings())
        return train(*args, **kwargs)

    seen, train = [], train_gpt.train
    monkeypatch.setattr(train_gpt, "train", watch)
    monkeypatch.setitem(sys.modules, "te_graph", perturbed_graphs(1.0))
    enabled, fill, workspace = before
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill)
    if workspace is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    else:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    torch.use_deterministic_algorithms(enabled)
    try:
        assert run("--compare") == 0
        assert seen == [(True, False, workspace or ":4096:8")] * 2
        assert settings() == before
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("option", ["--dtype=float32", "--dtype=bfloat16", "--dropout=0.1", "--fp8=delayed"])
def test_compare_finds_graphs_equal_to_eager(run, capsys, option):
    assert run("--compare", option) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("losses, gradient norms, final parameters and optimizer state are equal bit for bit")
    eager, graph = lines[-4].split(), lines[-3].split()
    assert (eager[0], graph[0]) == ("eager", "graph")
    assert eager[1:6] == graph[1:6]


@pytest.mark.parametrize("options", [(), ("--fp8=delayed",), ("--fp8=current",)], ids=["plain", "delayed", "current"])
def test_with_graphs_every_layer_is_replayed_for_every_micro_batch(run, monkeypatch, options):
    te_graph = importlib.import_module("te_graph")
    graphed, make_graphed_callables = [], te_graph.make_graphed_callables

    def watch(callables, sample_args):
        graphed.extend(callables)
        return make_graphed_callables(callables, sample_args)

    monkeypatch.setattr(te_graph, "make_graphed_callables", watch)
    assert run("--graph", *options) == 0
    infos = [layer.te_graph.info() for layer in graphed]
    assert [info["fp8_calls"] > 0 for info in infos] == [bool(options)] * 2
    counts = [(info["recaptures"], info["forward_replays"], info["backward_replays"]) for info in infos]
    assert counts == [(0, 12, 12)] * 2  # 6 steps of 2 micro-batches, 2 layers


def test_graphs_resume_an_eager_run_and_eager_one_of_graphs(run, tmp_path):
    whole = tmp_path / "whole.pt"
    assert run("--no-graph", "--dropout", 0.1, "--checkpoint", whole) == 0
    for first, second in (("--graph", "--no-graph"), ("--no-graph", "--graph"), ("--graph", "--graph")):
        half, end = tmp_path / f"{first}{second}half.pt", tmp_path / f"{first}{second}end.pt"
        assert run(first, "--dropout", 0.1, "--checkpoint", half, "--stop-after", 3) == 0
        assert run(second, "--dropout", 0.1, "--checkpoint", end, "--resume", half) == 0
        assert_bitwise_equal(load(end), load(whole))


@pytest.mark.gpu
@pytest.mark.parametrize("option", ["--dtype=float32", "--dtype=bfloat16", "--dropout=0.1", "--fp8=delayed"])
def test_compare_finds_cuda_graphs_equal_to_eager(run, capsys, option):
    assert run("--device", "cuda", "--compare", option) == 0
    assert "equal bit for bit" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_run_with_cuda_graphs_resumes_bit_for_bit(run, tmp_path):
    whole, half, end = (tmp_path / name for name in ("whole.pt", "half.pt", "end.pt"))
    options = ("--device", "cuda", "--graph", "--dropout", 0.1)
    with deterministic():
        assert run(*options, "--checkpoint", whole) == 0
        assert run(*options, "--checkpoint", half, "--stop-after", 3) == 0
        assert run(*options, "--checkpoint", end, "--resume", half) == 0
    assert_bitwise_equal(load(end), load(whole))
