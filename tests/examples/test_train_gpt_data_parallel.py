"""examples/train_gpt.py on several ranks: references are one process with as many micro-batches, and its eager run."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_runs import TINY, text_data, text_file, tiny_run, train_gpt, trainer
from ranks import Rank, ranks_of

from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("one_thread")
text, run = pytest.fixture(text_file), pytest.fixture(tiny_run)
WORLDS = [
    pytest.param(("cpu", 2), id="gloo-2"),
    pytest.param(("cuda", 2), id="nccl-2", marks=pytest.mark.multi_gpu),
]
ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)
EXAMPLE = Path(train_gpt.__file__)
LONGEST = 120  # seconds


def config_of(device: str, data: Path, **changes: Any) -> Any:
    options = [
        f"{name}={value}" for name, value in (TINY | {"--device": device.partition(":")[0], "--data": data}).items()
    ]
    return train_gpt.parse_args([*options, *(f"--{name}={value}" for name, value in changes.items())])


def train(config: Any, graph: bool, **changes: Any) -> Any:

    config = dataclasses.replace(config, **changes)
    corpus = text_data.split_text(text_data.load_text(config.data), config.seq_len)
    return train_gpt.train(config, corpus, graph)


def scenario(rank: Rank, data: Path) -> None:
    config = config_of(rank.device, data)
    results = {
        (shard, graph): train(config, graph, data_parallel=True, shard=shard)
        for shard in ("none", "optimizer")
        for graph in (False, True)
    }
    first = results["none", False]
    for (shard, graph), result in results.items():
        assert_bitwise_equal(result.losses, first.losses)
        assert_bitwise_equal(result.norms, first.norms)
        assert_bitwise_equal(result.state, first.state)
        if graph:
            assert_bitwise_equal(result.optimizer_state, results[shard, False].optimizer_state)
            assert result.update_info["forward_replays"] > 0
    alone = train(config, False, micro_batches=config.micro_batches * rank.world)
    torch.testing.assert_close(torch.tensor(first.losses), torch.tensor(alone.losses), rtol=1e-4, atol=0)
    torch.testing.assert_close(torch.tensor(first.norms), torch.tensor(alone.norms), rtol=1e-3, atol=0)


def test_ranks_train_as_one_process_with_all_micro_batches(ranks, text):
    ranks.run(scenario, 0, text)


@pytest.mark.parametrize("options", [(), ("--dtype=bfloat16", "--fp8=delayed")], ids=["fp32", "fp8"])
def test_one_rank_needs_no_torchrun(run, options):
    assert run("--data-parallel", "--shard=optimizer", "--compare", *options) == 0


def torchrun(text: Path, *more: str) -> str:
    """The line of the graphed run that one of two ranks prints."""
    options = [f"{name}={value}" for name, value in (TINY | {"--data": text}).items()]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--monitor-interval=0.1"]
    place = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    done = subprocess.run(
        [*launcher, *place, str(EXAMPLE), *options, "--data-parallel", "--shard=optimizer", *more],
        check=False,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if line.startswith("graph  ")]
    return line


def test_both_ranks_of_torchrun_end_well_and_the_first_one_prints_and_saves(text, tmp_path):
    torchrun(text, "--stop-after=3", f"--checkpoint={tmp_path / 'half.pt'}")
    assert [path.name for path in tmp_path.glob("*.pt")] == ["half.pt"]


@pytest.mark.full
def test_ranks_of_torchrun_go_on_from_what_was_saved(text, tmp_path):
    checkpoint = tmp_path / "half.pt"
    torchrun(text, "--stop-after=3", f"--checkpoint={checkpoint}")
    assert torchrun(text, f"--resume={checkpoint}").split()[:6] == torchrun(text).split()[:6]


def test_shard_without_data_parallel_is_refused(run, capsys):
    assert run("--shard=optimizer") == 2
    assert "--shard: expected --data-parallel with it" in capsys.readouterr().err
    assert trainer.Config.__dataclass_fields__["shard"]
