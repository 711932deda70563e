"""examples/tp_mlp.py end to end: references are its own eager run, and one process that holds the whole model."""

import contextlib
import importlib
import io
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpt_runs import text_file
from ranks import Rank, ranks_of

import te_graph as tg

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
tp_mlp = importlib.import_module("tp_mlp")

pytestmark = pytest.mark.usefixtures("one_thread")
text = pytest.fixture(text_file)
WORLDS = [
    pytest.param(("cpu", 2), id="gloo-2"),
    pytest.param(("cuda", 2), id="nccl-2", marks=pytest.mark.multi_gpu),
]
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
TINY = {"--context": 4, "--embedding": 8, "--hidden": 48, "--blocks": 2, "--batch-size": 16, "--steps": 5}
LONGEST = 120  # seconds


def options_of(seed: int, text: Path, device: str, *more: object) -> list[str]:
    options = TINY | {"--seed": seed, "--data": text, "--device": device}
    return [*(f"{name}={value}" for name, value in options.items()), *map(str, more)]


@pytest.fixture
def alone(seed, text) -> Callable[..., int]:
    """Calls main() in this process, which is the only rank; returns the exit status."""

    def run(*options: object) -> int:
        try:
            return tp_mlp.main([*options_of(seed, text, "cpu"), *map(str, options)])
        except SystemExit as stop:  # argparse's way
            return stop.code

    return run


def torchrun(*options: str) -> tuple[int, str, str]:
    """Exit status, output and errors of the example on two ranks, which are ended after LONGEST."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--monitor-interval=0.1"]
    place = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command = [*launcher, *place, str(EXAMPLES / "tp_mlp.py"), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            out, errors = process.communicate(timeout=LONGEST)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, out, errors


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.multi_gpu, pytest.mark.gpus_apart])])
def test_under_torchrun_graphs_equal_eager_bit_for_bit_and_one_process_nearly(device, seed, text):
    status, out, errors = torchrun(*options_of(seed, text, device, "--compare"))
    assert status == 0, errors
    lines = out.splitlines()
    assert lines[-1].startswith("losses and parameters of graph and eager are equal bit for bit on all ranks, and ")
    table = [re.split(r"\s{2,}", line) for line in lines[-4:-1]]
    assert [row[:3] for row in table] == [["eager", "2", "5"], ["graph", "2", "5"], ["one process", "1", "5"]]
    assert table[0][3:] == table[1][3:] != table[0][3:4] * 2
    for row in table:
        assert abs(float(row[3]) - float(table[0][3])) < 0.01 and abs(float(row[3]) - math.log(256)) < 0.8


def a_group(rank: Rank) -> tg.PeerGroup:
    group = tg.PeerGroup(timeout=60)
    assert group.uses_peers == rank.device.startswith("cuda")
    return group


def corpus_and_config(options: list[str]) -> tuple[object, object]:
    config = tp_mlp.parse_args(options)
    return tp_mlp.split_text(tp_mlp.load_text(config.data), config.context), config


def scenario_shares(rank: Rank, options: list[str]) -> None:
    corpus, config = corpus_and_config(options)
    with a_group(rank) as group:
        whole, mine = (tp_mlp.build_model(config, which) for which in (None, group))
        for full, share in zip(whole.blocks, mine.blocks, strict=True):
            half = slice(24 * rank.rank, 24 * (rank.rank + 1))
            assert torch.equal(share.up.weight, full.up.weight[half])
            assert torch.equal(share.up.bias, full.up.bias[half])
            assert torch.equal(share.down.weight, full.down.weight[:, half])
            assert torch.equal(share.down.bias, full.down.bias)
        joined = mine.whole_state()
        assert all(torch.equal(joined[name], value.detach().cpu()) for name, value in whole.named_parameters())
        result = tp_mlp.train(config, corpus, group, True)
        assert len(result.losses) == 5 and result.state.keys() == joined.keys()
        assert not any(torch.equal(result.state[name], joined[name]) for name in joined)


def test_each_rank_trains_its_share_of_the_weights(ranks, seed, text):
    ranks.run(scenario_shares, seed, options_of(seed, text, "cpu" if ranks.is_cpu else "cuda"))


def scenario_disturbed(rank: Rank, options: list[str], which: str, factor: float, words: dict[int, str]) -> None:
    """Rank 1's share of a weight is another one, when `which` is built: the first or the second of two models."""
    corpus, config = corpus_and_config(options)
    built, build = [], tp_mlp.build_model

    def disturbed(*arguments: object) -> object:
        model = build(*arguments)
        built.append(model)
        if rank.rank == 1 and which in ("both", ("eager", "graph")[len(built) - 1]):
            model.blocks[1].down.weight.data[3, 5] *= factor
        return model

    errors = io.StringIO()
    tp_mlp.build_model = disturbed
    try:
        with a_group(rank) as group, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            assert tp_mlp.run(config, corpus, group) == (1 if words else 0)
    finally:
        tp_mlp.build_model = build
    assert words.get(rank.rank, "") in errors.getvalue()
    if not words:
        assert errors.getvalue() == ""


@pytest.mark.parametrize(
    ("which", "factor", "words"),
    [
        ("both", 1.0, {}),
        ("both", 2.0, {0: "ranks and one process differ: "}),
        ("graph", 1.001, {0: "graph and eager differ: ['losses'][", 1: "graph and eager differ: "}),
    ],
)
def test_a_weight_that_is_wrong_on_one_rank_fails_the_comparison_on_all(which, factor, words, ranks, seed, text):
    options = options_of(seed, text, "cpu" if ranks.is_cpu else "cuda", "--compare")
    ranks.run(scenario_disturbed, seed, options, which, factor, words)


def test_alone_the_loss_falls_and_blocks_are_replayed(alone, monkeypatch, capsys):
    models, build = [], tp_mlp.build_model

    def keep(*arguments: object) -> object:
        models.append(build(*arguments))
        return models[-1]

    monkeypatch.setattr(tp_mlp, "build_model", keep)
    assert alone("--steps", 60) == 0
    for block in models[0].blocks:
        info = block.te_graph.info()
        assert (info["forward_replays"], info["backward_replays"], info["eager_calls"]) == (60, 60, {})
    name, count, steps, first, last = capsys.readouterr().out.splitlines()[-1].split()
    assert (name, count, steps) == ("graph", "1", "60")
    assert float(last) < 4 < 5 < float(first)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("loss", "weight", "difference", "deviation"),
    [
        (0.0, 0.5, "", []),
        (-0.0, 0.5, "['losses'][1] differs: got -0.0, expected 0.0", []),
        (0.1, 0.5, "['losses'][1] differs: got 0.1, expected 0.0", ["loss of step 2 is 0.1 on ranks, 0.0 in"]),
        (math.nan, 0.5, "['losses'][1] differs: got nan, expected 0.0", ["loss of step 2 is nan on ranks"]),
        (0.0, 0.5001, "['state']['weight'] differs: 1 of 2 elements", []),
        (0.0, 0.503, "['state']['weight'] differs: 1 of 2", ["weight is off by 1.5e-03 of its largest element"]),
        (0.0, math.nan, "['state']['weight'] differs: 1 of 2 elements", ["weight is off by nan"]),
    ],
)
def test_differences_are_told(loss, weight, difference, deviation):
    def result(loss: float, weight: float) -> object:
        return tp_mlp.TrainResult([1.0, loss], {"weight": torch.tensor([2.0, weight])})

    expected, got = result(0.0, 0.5), result(loss, weight)
    told = tp_mlp.tell_differences(vars(got), vars(expected))
    assert told.startswith(difference) and bool(told) == bool(difference)
    found = tp_mlp.find_deviations(got, expected)
    assert len(found) == len(deviation) and all(map(str.startswith, found, deviation))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--hidden", 49), ("--hidden", "number of ranks 2", "got 49")),
        (("--blocks", 0), ("--blocks", "at least 1", "got 0")),
        (("--lr", "nan"), ("--lr", "positive", "got nan")),
        (("--data", "no/such/file"), ("--data", "not a file")),
        (("--device", "cuda"), ("--device", "a GPU for each rank", "got 1 for rank 1")),
    ],
)
def test_wrong_options_are_refused_before_ranks_are_joined(options, words, alone, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(tp_mlp, "start_ranks", lambda device: pytest.fail("it joined"))
    assert alone(*options) == 2
    (message,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    for word in words:
        assert word in message


def test_a_loss_that_is_no_number_ends_the_run_with_an_error(alone, capsys):
    try:
        assert alone("--lr", 1e30) == 1
    finally:
        torch.distributed.destroy_process_group()
    assert "error: rank 0: the loss of step " in capsys.readouterr().err
