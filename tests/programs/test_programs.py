"""Random programs of graphed and eager pieces leave what eager execution leaves, or are refused by name.

The first seed is printed and changes with the code (seeds.py); ``python -m tests.programs`` runs thousands.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from seeds import first_seed

import te_graph as tg
from programs import isolate
from programs.campaign import Failure, campaign
from programs.generate import SETTINGS, generate
from programs.isolate import run_alone, run_apart
from programs.program import Group, Piece, Program, Step
from programs.regressions import MAY_BE_REFUSED, REGRESSIONS, regression
from programs.run import Outcome, run
from programs.shrink import shrink

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")
_PROGRAMS, _MOST_SECONDS = 30, 10.0


@pytest.fixture(params=["0", "1"], ids=["plain", "poison"])
def poison(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TE_GRAPH_POISON", request.param)
    return request.param


@pytest.fixture(autouse=True)
def garbage_is_frozen_for_the_test_only() -> Iterator[None]:
    """``campaign`` freezes it, which makes collections cheap."""
    yield
    gc.unfreeze()


def test_random_programs_leave_what_eager_execution_leaves(device: str, poison: str) -> None:
    first = first_seed(f"programs, poison {poison}")
    seeds = range(first, first + _PROGRAMS)
    tally = campaign(seeds, device, _MOST_SECONDS, shrinks_per_kind=1, most_failures=1)
    print(tally)
    sources = "\n\n".join(failure.source() for failure in tally.failures.values())
    assert not tally.failures, f"TE_GRAPH_PROGRAM_SEED={first}\n{tally}\n\n{sources}"
    assert tally.ran >= _PROGRAMS / 3
    # By far less than what is usual, since a few dozens of draws decide.
    assert tally.replayed >= 0.3 * tally.ran, tally
    assert tally.verdicts["same"] >= 0.3 * tally.ran, tally


@functools.cache
def _outcomes_of_regressions() -> dict[str, Outcome]:
    """On the CPU, of all in one child process, which imports torch once; where one kills it another goes on."""
    programs = {name: regression(name, "cpu") for name in REGRESSIONS}
    outcomes = {id(program): outcome for program, outcome in run_apart(programs.values(), "cpu")}
    return {name: outcomes[id(program)] for name, program in programs.items()}


@pytest.mark.parametrize("name", REGRESSIONS)
def test_programs_that_once_failed(device: str, name: str) -> None:
    program = regression(name, device)
    outcome = _outcomes_of_regressions()[name] if device == "cpu" else run(program)
    right = ("same", "refused") if name in MAY_BE_REFUSED else ("same",)
    assert outcome.verdict in right, f"{outcome.verdict}: {outcome.detail}\n\n{program.source(name)}"


# What follows shows that a defect would be seen.


def _program(*lines: str) -> Program:
    pieces = (Piece(0, "twice", 1, is_exact=True), Piece(1, "Line", 2, is_exact=True))
    steps = tuple(Step(line, "line") for line in lines)
    return Program(1, "cpu", True, pieces, (Group((0,)), Group((1,))), steps)


LINES = (
    "x1 = leaf(1, DEV)",
    "y2 = m0(x1)",
    "y3 = m1(y2)",
    "see('y3', y3)",
    "y3.sum().backward()",
    "see('x1.grad', x1.grad)",
    "grads('o1', o1)",
)


def _capture_by(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Any, Any], Any]) -> None:
    """Let captured functions return ``wrong(function, x)``; modules stay as they are."""

    def make(callables: tuple, samples: tuple, **options: Any) -> tuple:
        return tuple(
            target if isinstance(target, torch.nn.Module) else (lambda x, target=target: wrong(target, x))
            for target in callables
        )

    monkeypatch.setattr(tg, "make_graphed_callables", make)


def test_a_right_program_is_the_same_and_replays() -> None:
    outcome = run(_program(*LINES))
    assert outcome == Outcome("same", replays=(2, 2))


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    "wrong, verdict, detail",
    [
        (lambda f, x: f(x) + 1, "failed", "y3"),
        (lambda f, x: f(x) + (x - x.detach()), "failed", "x1.grad"),
        (lambda f, x: f(x).detach(), "failed", "requires_grad"),
        (lambda f, x: f(x.float()), "failed", "dtype"),
        (lambda f, x: _raise(KeyError("training")), "failed", "KeyError"),
        (lambda f, x: _raise(RuntimeError("expected scalar type Float")), "failed", "RuntimeError"),
        (lambda f, x: _raise(RuntimeError("callable 0 (twice): refused")), "refused", "refused"),
        (lambda f, x: (torch.rand(()), f(x))[1], "failed", "random state"),
    ],
)
def test_a_wrong_replay_is_found(monkeypatch: pytest.MonkeyPatch, wrong: Any, verdict: str, detail: str) -> None:
    _capture_by(monkeypatch, wrong)
    outcome = run(_program(*LINES))
    assert outcome.verdict == verdict, outcome
    assert detail in outcome.detail or detail in outcome.kind


@pytest.mark.parametrize("scale, verdict", [("1", "failed"), ("2.0**50", "rounded")])
def test_whole_numbers_are_exact_until_they_are_large(
    monkeypatch: pytest.MonkeyPatch, scale: str, verdict: str
) -> None:
    _capture_by(monkeypatch, lambda f, x: f(x) * (1 + 2.0**-52))
    outcome = run(_program(f"y2 = m0(leaf(1, DEV) * {scale})", "keep('y2', y2.detach().numpy())"))
    assert (outcome.verdict, outcome.kind) == (verdict, "value")


@pytest.mark.parametrize("name, verdict", [("y hook", "same"), ("y.grad", "failed")])
def test_a_hook_may_be_called_without_a_gradient_in_a_replay_only(name: str, verdict: str) -> None:
    assert run(_program(f"if graph: keep({name!r}, None)")).verdict == verdict


def test_an_error_that_only_eager_execution_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _capture_by(monkeypatch, lambda f, x: f(x))
    outcome = run(_program(*LINES, "if not graph: raise ValueError('eager')"))
    assert (outcome.verdict, outcome.kind) == ("failed", "no error (line)")


def test_a_value_that_changes_under_its_holder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.zeros(4, 4, dtype=torch.float64)
    _capture_by(monkeypatch, lambda f, x: memory.copy_(f(x).detach()))
    program = _program("with torch.no_grad(): y2 = m0(data(1, DEV))", "keep('y2', y2)", "m0(data(2, DEV))")
    assert "y2, at the end" in run(program).detail


def test_a_failing_program_is_made_small_and_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _capture_by(monkeypatch, lambda f, x: f(x) + 1)
    program = next(
        p
        for p in (generate(seed, "cpu") for seed in itertools.count())
        if "call twice" in {s.kind for s in p.steps}
        and {p.pieces[n].name for g in p.groups for n in g.pieces} == {"twice"}
        and run(p).verdict == "failed"
    )
    small, outcome = shrink(program, run(program), run)
    assert [piece.name for piece in small.pieces] == ["twice"]
    assert len(small.steps) <= 4
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(small.source("Wrong."), "alone", "exec"), {"__name__": "alone"})
    assert "eager" in printed.getvalue() and "graphed" in printed.getvalue()
    assert Failure(small, outcome).signature.startswith("value | twice")


def test_a_printed_program_needs_nothing_but_te_graph() -> None:
    source = _program(*LINES).source("A program.")
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


@pytest.mark.full
def test_crashes_and_hangs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    good = _program(*LINES)
    assert run_alone(good).verdict == "same"  # the server has imported torch by now
    monkeypatch.setattr(isolate, "_SECONDS", 2.0)
    monkeypatch.setattr(isolate, "_START_SECONDS", 3.0)
    crash = _program("if graph: import os; os.abort()")
    hang = _program("if graph: import time; time.sleep(60)")
    outcomes = isolate.run_apart([good, crash, good, hang, good], "cpu")
    told = [(program, outcome.verdict) for program, outcome in outcomes]
    assert told == [(good, "same"), (crash, "crashed"), (good, "same"), (hang, "crashed"), (good, "same")]


def test_settings_are_as_before() -> None:
    def settings() -> tuple:
        modes = torch.are_deterministic_algorithms_enabled(), torch.is_grad_enabled()
        return torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled(), *modes

    before = settings()
    program = _program(*SETTINGS, "torch.set_grad_enabled(False)")
    assert run(program).verdict == "same"
    assert settings() == before
