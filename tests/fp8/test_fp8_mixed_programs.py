"""Random programs of FP8 models, captured in several ways among other events, leave what eager FP8 leaves.

The first seed is printed and changes with the code (seeds.py); ``fp8_mixed_programs.py`` beside this file runs many.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fp8_mixed_programs
import pytest
from fp8_comparisons import check_programs
from fp8_mixed_programs import Program
from fp8_mixed_world import Event
from torch import Tensor, nn

import te_graph as tg

pytestmark = [
    pytest.mark.usefixtures("repeatable", "one_thread"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),  # of checkpoints in frozen blocks
]


def test_random_programs_leave_what_eager_execution_leaves(device: str) -> None:
    check_programs(Program, "mixed FP8 programs", device, count=20, most_seconds=6)


@pytest.mark.full
def test_many_random_programs_leave_what_eager_execution_leaves(device: str) -> None:
    check_programs(Program, "mixed FP8 programs", device, count=500, most_seconds=400)


def a_program(*kinds: str, mode: str = "callable") -> Program:
    """Of one model with a layer that is called twice, by delayed scaling."""
    spec = replace(
        Program.draw(0).specs[0],
        **{"blocks": ("", "conv twice recompute"), "mode": mode, "style": "", "recipe": 0, "optimizer": "sgd"},
        **{"is_bf16": False, "is_autocast": False, "options": (("max_in_flight", 2),), "rows": 16},
    )
    events = (Event(kind, "", 0, 16, 1.0 + number % 3, 0, number) for number, kind in enumerate(kinds))
    return Program(seed=0, is_whole=False, specs=(spec,), events=tuple(events))


@pytest.mark.parametrize("mode, replays", [("callable", 3), ("blocks", 6), ("layers", 6), ("function", 2)])
def test_a_program_replays_in_each_mode(device: str, mode: str, replays: int) -> None:
    program = a_program("capture", "train", "train", "train", mode=mode)
    assert program.compare(device) == ("same", "", replays)


def test_amaxes_that_replays_forget_are_found_and_the_program_made_small(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_graphed_callables = tg.make_graphed_callables

    def forget(model: nn.Module, args: tuple, result: Tensor) -> None:  # [n, WIDTH]
        for layer in model.modules():
            if getattr(layer, "fp8", None) is not None:
                layer.fp8.history(0)[0][:1].zero_()  # what of its input is recorded, and no update has taken up

    def capture(callables: tuple[nn.Module, ...], *args: Any, **options: Any) -> tuple[nn.Module, ...]:
        graphed = make_graphed_callables(callables, *args, **options)
        for model in graphed:
            model.register_forward_hook(forget)
        return graphed

    monkeypatch.setattr(tg, "make_graphed_callables", capture)
    program = a_program("evaluate", "train", "capture", "edit", "train", "step", "nested", "train")
    verdict, reason, _ = program.compare(device)
    assert verdict == "differs" and reason.startswith("event 6, nested ")
    small, _ = program.shrunk(device)
    assert [event.kind for event in small.events] == ["capture", "train"]
    assert small.specs[0].blocks == ("",)


def test_an_error_of_either_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(world: Any, event: Event) -> None:
        if world.is_graphed or event.rows == 7:
            raise RuntimeError("no")

    monkeypatch.setitem(fp8_mixed_programs.EVENTS, "train", (refuse, ("",)))
    program = a_program("train")
    assert program.compare()[0] == "raised"
    assert replace(program, events=(replace(program.events[0], rows=7),)).compare()[0] == "invalid"
