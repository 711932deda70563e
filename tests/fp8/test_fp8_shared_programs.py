"""Random programs of functions over FP8 networks that share layers leave what eager FP8 leaves.

The first seed is printed and changes with the code (seeds.py); ``fp8_shared_programs.py`` beside this file runs many.
"""

from __future__ import annotations

from typing import Any

import fp8_shared_world
import pytest
import torch
from fp8_comparisons import check_programs
from fp8_shared_programs import Program
from fp8_shared_world import Event, Step

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")


def test_random_programs_leave_what_eager_execution_leaves(device: str) -> None:
    check_programs(Program, "shared FP8 networks", device, count=20, most_seconds=6)


@pytest.mark.full
def test_many_random_programs_leave_what_eager_execution_leaves(device: str) -> None:
    check_programs(Program, "shared FP8 networks", device, count=500, most_seconds=400)


def a_program(*kinds: str) -> Program:
    """Of two networks with a common block and a function that trains both and updates one."""
    steps = (Step("train", 0, 0, 1.0), Step("train inside", 1, 0, 4.0), Step("step", 0, None, 1.0))
    events = (
        Event(kind, "eager", 0, 0, 16, 1.0 + number, number, on_thread=number == 3, outer=None)
        for number, kind in enumerate(kinds)
    )
    return Program(seed=0, nets=((0, 1), (1,)), functions=(steps,), events=tuple(events))


def test_functions_replay_between_steps_of_other_kinds(device: str) -> None:
    program = a_program("function", "train", "function", "function", "evaluate", "function")
    verdict, reason, replays = program.compare(device)
    assert (verdict, reason) == ("same", "") and replays >= 2


def test_a_step_that_replays_leave_out_is_found_and_the_program_made_small(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = fp8_shared_world.World.evaluate

    def evaluate_wrongly(world: Any, event: Event) -> list[torch.Tensor]:
        if world.is_graphed:
            with torch.no_grad():
                world.nets[1][0].up.weight[0, 0] += 1
        return evaluate(world, event)

    monkeypatch.setitem(fp8_shared_world.EVENTS, "evaluate", (evaluate_wrongly, ("",)))
    program = a_program("train", "function", "evaluate", "step", "function")
    assert program.compare(device)[:2] == ("differs", "event 2, evaluate eager: result")
    small, _ = program.shrunk(device)
    assert [event.kind for event in small.events] == ["evaluate"] and small.functions == ((),)
