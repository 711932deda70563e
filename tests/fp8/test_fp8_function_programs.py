"""Random functions over one FP8 model, among other events, leave what eager FP8 leaves.

The first seed is printed and changes with the code (seeds.py); ``fp8_function_programs.py`` beside this file runs many.
"""

from __future__ import annotations

import pytest
from fp8_comparisons import check_programs
from fp8_function_programs import Event, Program

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")


def test_random_programs_leave_what_eager_execution_leaves(device: str) -> None:
    check_programs(Program, "functions over one FP8 model", device, count=20, most_seconds=6)


@pytest.mark.full
def test_many_random_programs_leave_what_eager_execution_leaves(device: str) -> None:
    check_programs(Program, "functions over one FP8 model", device, count=500, most_seconds=400)


def a_program(text: str, *kinds: str) -> Program:
    """Of four layers and delayed scaling."""
    events = tuple(Event(kind, 1.0 + number, number) for number, kind in enumerate(kinds))
    return Program(seed=0, model="four", recipe=0, other=3, is_fused=False, text=text, events=events)


@pytest.mark.parametrize(
    "text",
    [
        "tEt",  # evaluates averages between two micro-batches
        "tstE",  # and behind a step in the graph
        "tf",  # trains with other weights, while its own stay as they are
        "tftEf",
    ],
)
def test_casts_are_recorded_as_eagerly(device: str, text: str) -> None:
    program = a_program(text, "call", "call", "t", "call", "E", "call", "s", "call", "t", "call")
    verdict, reason, replays = program.compare(device)
    assert (verdict, reason) == ("same", "") and replays >= 3


@pytest.mark.parametrize("text", ["Et", "st", "ft"])
def test_what_comes_before_the_first_training_is_refused_by_name(device: str, text: str) -> None:
    verdict, reason, _ = a_program(text, "call", "call", "call").compare(device)
    assert verdict == "refused", reason
