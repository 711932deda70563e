"""Random models with random events in their training, and random graphs of layers: ``graph_layers`` beside eager."""

from __future__ import annotations

import time
from typing import Any

import pytest
from program_outcomes import Outcome, tally
from random_models import dag_programs, training_programs
from seeds import first_seed


def run(program: Any, count: int, most_seconds: float) -> None:
    first, started, outcomes = first_seed(program.__module__), time.monotonic(), list[Outcome]()
    for seed in range(first, first + count):
        outcomes.append(program(seed).outcome())
        assert not outcomes[-1].is_wrong, f"{seed}: {outcomes[-1].verdict}: {outcomes[-1].detail}\n{program(seed)}"
        if time.monotonic() - started > most_seconds and tally(outcomes)["replayed"]:
            break
    replayed = tally(outcomes)["replayed"]
    # On a slow machine few run, of which a chance majority may change something in each step.
    assert replayed and (len(outcomes) < 20 or replayed * 2 > len(outcomes)), dict(tally(outcomes))


PROGRAMS = pytest.mark.parametrize("program", [training_programs.Program, dag_programs.Program])


@pytest.mark.usefixtures("one_thread")
@PROGRAMS
def test_random_models_train_as_eager_ones(program: Any) -> None:
    run(program, count=8, most_seconds=6)


@pytest.mark.full
@pytest.mark.usefixtures("one_thread")
@PROGRAMS
def test_many_random_models_train_as_eager_ones(program: Any) -> None:
    run(program, count=150, most_seconds=600)
