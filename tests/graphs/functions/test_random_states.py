"""Random functions over records, histories, containers and who holds them leave what eager execution leaves.

The first seed changes with the code (seeds.py); ``python -m tests.graphs.functions.random_states`` runs thousands.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from program_outcomes import Outcome, tally
from random_states.pictures import picture
from random_states.program import Program, generate
from random_states.run import report, run
from random_states.tensors import Batch
from seeds import first_seed

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")
_PROGRAMS, _MOST_SECONDS = 60, 8.0


def test_random_functions_leave_what_eager_execution_leaves(device: str) -> None:
    first, end, outcomes = first_seed("random states"), time.monotonic() + _MOST_SECONDS, list[Outcome]()
    for seed in range(first, first + _PROGRAMS):
        outcomes.append(run(generate(seed), device))
        assert not outcomes[-1].is_wrong, report(generate(seed), outcomes[-1], device)
        if time.monotonic() > end:
            break
    found = tally(outcomes, least_replays=2)
    # By far less than what is usual, since a few dozens of draws decide.
    assert len(outcomes) < 10 or found["replayed"] > 0.3 * len(outcomes), dict(found)
    assert len(outcomes) < 10 or found["same"] > 0.4 * len(outcomes), dict(found)


# What follows shows that a defect would be seen.


def _program(body: tuple[str, ...], result: str = "pass", after: tuple[str, ...] = ()) -> Program:
    trainer = "class Trainer:\n    pass"
    state = ("tr = Trainer()", "tr.total, tr.row, x = torch.zeros(3), {'n': 0}, torch.ones(3)")
    held = "class held:\n    pass"
    batch = Batch("x", "batch", "", is_new=False)
    return Program(1, (trainer, held, *state), (), body, result, 0, False, (), after, True, False, batch, False)


RIGHT = _program(("tr.total.add_(x)", "tr.row = {'n': 0}"), "return tr.row", ("log.append(tr.row)",))


def test_a_right_program_is_the_same_and_replays() -> None:
    assert run(RIGHT) == Outcome("same", replays=7)


def test_what_is_refused_is_told() -> None:
    outcome = run(_program(("tr.total.add_(x)", "tr.row['n'] += 1")))
    assert outcome.verdict == "refused"
    assert "argument 0.row['n'] changed from 1 to 2" in outcome.detail


def _replay_by(monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Any], Any]) -> None:
    """Let ``graphed`` give what ``wrong`` makes of a function."""
    info = tg.graphed(len).info

    def graphed(step: Callable[..., Any]) -> Any:
        call = wrong(step)
        call.info = info
        return call

    monkeypatch.setattr(tg, "graphed", graphed)


def _repeats(step: Callable[..., Any]) -> Callable[..., Any]:
    kept: list[Any] = []

    def call(tr: Any, *rest: Any) -> Any:
        result = step(tr, *rest)
        kept.append(tr.row)
        tr.row = kept[0]
        return result

    return call


def _raises(step: Callable[..., Any]) -> Callable[..., Any]:
    def call(tr: Any, *rest: Any) -> Any:
        tr.row["n"] = 1
        raise tg.CaptureError("refused")

    return call


@pytest.mark.parametrize(
    "wrong, verdict",
    [
        (lambda step: lambda *args: step(*args) and None, "differs"),  # another result
        (lambda step: lambda tr, *rest: (step(tr, *rest), tr.total.add_(1))[0], "differs"),  # another tensor
        (lambda step: lambda *args: dict(step(*args)), "differs"),  # another object
        (_repeats, "differs"),  # one object at each call
        (lambda step: lambda *args: {}["missing"], "raised"),
        (_raises, "raised"),  # and leaves something behind
    ],
)
def test_a_wrong_replay_is_found(monkeypatch: pytest.MonkeyPatch, wrong: Any, verdict: str) -> None:
    _replay_by(monkeypatch, wrong)
    assert run(RIGHT).verdict == verdict


def test_a_failing_program_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    _replay_by(monkeypatch, lambda step: lambda *args: dict(step(*args)))
    program = replace(RIGHT, before=("log.append(1)",), alternates=True)
    text = report(program, run(program))
    assert text.startswith("differs: ")
    assert "def step(tr, batch, flag):\n    x = batch\n    return tr.row" in text
    assert "def before(i):\n    pass" in text


def test_pictures_tell_objects_apart_and_no_functions() -> None:
    one: list[int] = []
    assert picture([one, one]) != picture([one, []])
    assert picture([one, []]) == picture([[], []])
    assert picture((1, "a")) == picture((1, "a")) != picture((True, "a"))
    assert picture([functools.partial(max, one), one]) != picture([functools.partial(max, []), one])
