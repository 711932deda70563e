"""The optimizer side of examples/train_gpt.py: clipped to what --clip says, and with graphs one replayed sequence.

References: norms taken in float64 of the gradients that the optimizer meets, and the eager run of the same options.
"""

import math
import re
from collections.abc import Iterator

import pytest
import torch
from gpt_runs import load, text_file, tiny_run, train_gpt, trainer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import te_graph
from te_graph.testing import assert_bitwise_equal, deterministic

pytestmark = pytest.mark.usefixtures("one_thread")
text, run = pytest.fixture(text_file), pytest.fixture(tiny_run)

STEPS = 6
CLIP = 0.7  # well below the norms that an untrained model has


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> list:
    """The TrainResult of each training that main() makes."""
    kept, train = [], train_gpt.train

    def keep(*args: object, **kwargs: object) -> object:
        kept.append(train(*args, **kwargs))
        return kept[-1]

    monkeypatch.setattr(train_gpt, "train", keep)
    return kept


@pytest.fixture
def met_norms() -> Iterator[list[float]]:
    """The 2-norm, in float64, of the gradients that each eager optimizer step meets."""
    norms: list[float] = []

    def measure(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        gradients = [p.grad.double().flatten() for p in optimizer.param_groups[0]["params"]]
        norms.append(torch.cat(gradients).norm().item())

    hook = register_optimizer_step_pre_hook(measure)
    yield norms
    hook.remove()


def log_lines(output: str, name: str) -> list[str]:
    """The lines of the steps, without the speed, which is another in every run."""
    lines = [line.removeprefix(f"{name} ") for line in output.splitlines() if line.startswith(f"{name} step ")]
    return [re.sub(r", [\d,]+ tokens/s$", "", line) for line in lines]


@pytest.mark.parametrize("options", [("--clip", CLIP), ("--clip", CLIP, "--dtype", "bfloat16"), ("--clip", 0)])
def test_the_optimizer_side_replays_in_all_but_the_first_step_and_equals_eager(run, results, capsys, device, options):
    assert run("--compare", "--device", device, *options) == 0
    eager, graph = results
    info = graph.update_info
    assert eager.update_info is None
    assert (info["signatures"], info["recaptures"], info["forward_replays"]) == (1, 0, STEPS - 1)
    assert info["eager_calls"] == {"not captured yet": 1}
    assert_bitwise_equal((graph.losses, graph.norms), (eager.losses, eager.norms))
    assert_bitwise_equal(graph.optimizer_state, eager.optimizer_state)
    assert len(graph.optimizer_state) == 3 * len(graph.state) + 1  # of each parameter two moments and the step; lr
    output = capsys.readouterr().out
    assert f"graph: optimizer side: {STEPS - 1} replays, 1 eager calls" in output
    assert log_lines(output, "graph") == log_lines(output, "eager") != []


@pytest.mark.parametrize("clip", [CLIP, 0, "inf"])
def test_the_log_tells_the_norm_of_each_step_where_it_is_known(run, results, capsys, clip):
    assert run("--no-graph", "--clip", clip) == 0
    (eager,) = results
    lines = log_lines(capsys.readouterr().out, "eager")
    shown = [f", norm {norm:.3f}" for norm in eager.norms] if clip else [""] * STEPS
    assert len(lines) == len(shown) == STEPS
    for line, loss, norm in zip(lines, eager.losses, shown, strict=True):
        assert line.endswith(f": loss {loss:.3f}{norm}")


def test_gradients_are_clipped_to_the_norm_that_is_asked_for(run, results, device, met_norms):
    assert run("--no-graph", "--device", device, "--clip", CLIP) == 0
    (result,) = results
    assert len(met_norms) == len(result.norms) == STEPS
    assert max(result.norms) > 1.5 * CLIP
    for norm, met in zip(result.norms, met_norms, strict=True):
        assert met <= CLIP * (1 + 1e-6)
        assert math.isclose(met, min(norm, CLIP), rel_tol=1e-5)


@pytest.mark.parametrize("clip", [1e6, "inf"])
def test_a_limit_that_is_not_reached_changes_nothing_and_shows_the_norm(run, results, met_norms, clip):
    assert run("--no-graph", "--clip", clip) == 0
    clipped = met_norms[:]
    assert run("--no-graph", "--clip", 0) == 0
    limited, free = results
    assert clipped == met_norms[STEPS:]
    assert [math.isclose(a, b, rel_tol=1e-5) for a, b in zip(limited.norms, clipped, strict=True)] == [True] * STEPS
    assert free.norms == []
    assert_bitwise_equal((limited.state, limited.losses), (free.state, free.losses))


def test_the_learning_rate_follows_the_schedule_in_replays(run, results):
    assert run("--graph") == 0
    assert run("--graph", "--stop-after", 3) == 0
    peak, floor = 1e-3, 1e-4  # of a cosine over the steps that follow the only step of warm-up
    for result, step in zip(results, (STEPS, 3), strict=True):
        expected = floor + (peak - floor) * (1 + math.cos(math.pi * (step - 1) / (STEPS - 1))) / 2
        assert math.isclose(result.optimizer_state["lr"].item(), expected, rel_tol=1e-5)
    assert results[0].losses[:3] == results[1].losses


def test_a_resumed_sequence_is_captured_and_ends_with_the_bits_of_an_uninterrupted_one(run, results, device, tmp_path):
    whole, half, end = (tmp_path / name for name in ("whole.pt", "half.pt", "end.pt"))
    options = ("--graph", "--clip", CLIP, "--device", device)
    with deterministic():
        assert run(*options, "--checkpoint", whole) == 0
        assert run(*options, "--checkpoint", half, "--stop-after", 3) == 0
        assert run(*options, "--checkpoint", end, "--resume", half) == 0
    assert_bitwise_equal(load(end), load(whole))
    assert [result.update_info["forward_replays"] for result in results] == [STEPS - 1, 2, 2]
    assert [len(result.norms) for result in results] == [STEPS, 3, STEPS]


def test_a_norm_that_is_no_number_ends_the_run_with_an_error(run, monkeypatch, capsys, tmp_path):
    checkpoint, clip = tmp_path / "a.pt", te_graph.clip_grad_norm_

    def clip_infinite(parameters: list[torch.Tensor], max_norm: float) -> torch.Tensor:
        parameters[0].grad.view(-1)[0] = math.inf
        return clip(parameters, max_norm)

    monkeypatch.setattr(te_graph, "clip_grad_norm_", clip_infinite)
    assert run("--no-graph", "--checkpoint", checkpoint) == 1
    assert "error: the gradient norm of step 1 is inf" in capsys.readouterr().err
    assert not checkpoint.exists()


def test_an_update_without_a_limit_needs_no_clip(monkeypatch):
    monkeypatch.setattr(te_graph, "clip_grad_norm_", lambda *args: pytest.fail("it clipped"))
    parameter = torch.nn.Parameter(torch.randn(5))
    parameter.grad = gradient = torch.randn(5)
    expected = parameter.detach() - 0.1 * gradient
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    assert trainer.update(optimizer, 0.0) is None
    torch.testing.assert_close(parameter.detach(), expected)
    assert parameter.grad is gradient and not gradient.any()
