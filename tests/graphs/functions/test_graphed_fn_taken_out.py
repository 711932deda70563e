"""graphed(): what a call changes or returns of what stood somewhere before, and then puts another object in its place.

The reference is the function itself, called as often by a caller that keeps the same objects.
"""

from __future__ import annotations

import array
import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from sequences import counts
from torch import Tensor, nn

import te_graph as tg
from te_graph import graphed

pytestmark = pytest.mark.usefixtures("repeatable")
CALLS = 6


@dataclass
class Row:
    is_done: bool = False


@dataclass(slots=True)
class Slotted:
    count: int = 0


@dataclass
class Trainer:
    total: Tensor  # [3]
    record: Any
    records: Any = field(default_factory=lambda: [[0.0]])


def close_dictionary(trainer: Trainer) -> None:
    trainer.record["end"] = 1.0
    trainer.record = {"start": 0.0}


def close_row(trainer: Trainer) -> None:
    trainer.record.is_done = True
    trainer.record = Row()


def close_slots(trainer: Trainer) -> None:
    trainer.record.count += 1
    trainer.record = Slotted()


def close_array(trainer: Trainer) -> None:
    trainer.record[0] += 1
    trainer.record = array.array("d", [0.0])


def close_nested(trainer: Trainer) -> None:
    trainer.record["in"]["end"] = 1.0
    trainer.record = {"in": {"start": 0.0}}


def close_popped(trainer: Trainer) -> None:
    last = trainer.record.pop("last")
    last.append(1.0)
    trainer.record["last"] = [0.0]


def close_first(trainer: Trainer) -> None:
    trainer.record.popleft().append(1.0)
    trainer.record.append([0.0])


def close_behind(trainer: Trainer) -> None:
    """Changed when it is no longer there."""
    before, trainer.record = trainer.record, [0.0]
    before[0] = 5.0


def close_with_tensors(trainer: Trainer) -> None:
    trainer.record["count"] += 1
    trainer.record = {"total": trainer.total, "count": 0}


def close_and_return(trainer: Trainer) -> Any:
    closed = trainer.record
    closed.is_done = True
    trainer.record = Row()
    return closed


CASES: dict[str, tuple[Callable[[Trainer], Any], Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "a dictionary": (close_dictionary, lambda _: {"start": 0.0}, lambda record: record),
    "a dataclass": (close_row, lambda _: Row(), lambda record: record),
    "slots": (close_slots, lambda _: Slotted(), lambda record: record),
    "an array": (close_array, lambda _: array.array("d", [0.0]), lambda record: record),
    "below what is replaced": (close_nested, lambda _: {"in": {"start": 0.0}}, lambda record: record["in"]),
    "popped": (close_popped, lambda _: {"last": [0.0]}, lambda record: record["last"]),
    "first of a deque": (close_first, lambda _: deque([[0.0]]), lambda record: record[0]),
    "behind the replacement": (close_behind, lambda _: [0.0], lambda record: record),
    "beside tensors": (
        close_with_tensors,
        lambda total: {"total": total, "count": 0},
        lambda record: record,
    ),
    "a result": (close_and_return, lambda _: Row(), lambda record: record),
}


def counting(close: Callable[[Trainer], Any]) -> Callable[[Trainer], Any]:
    """What counts its calls on the device, and does ``close``."""

    def step(trainer: Trainer) -> Any:
        trainer.total.add_(1)
        return close(trainer)

    return step


@pytest.mark.parametrize("name", CASES)
def test_who_keeps_it_sees_the_change_of_each_call(name: str, device: str) -> None:
    close, make, read = CASES[name]
    step = counting(close)
    kept: dict[Any, list[Any]] = {}
    for function in (step, graphed(step)):
        trainer = Trainer(total := torch.zeros(3, device=device), make(total))
        kept[function] = []
        for _ in range(CALLS):
            kept[function].append(read(trainer.record))
            function(trainer)
        assert total.eq(CALLS).all()
    eager, replayed = (map(shown, of_calls) for of_calls in kept.values())
    assert list(eager) == list(replayed)
    assert counts(function)[1] == 1  # the one behind the capture


def shown(record: Any) -> str:
    return repr({key: value for key, value in record.items() if key != "total"} if isinstance(record, dict) else record)


@pytest.mark.parametrize("name", CASES)
def test_what_nobody_keeps_is_replayed(name: str, device: str) -> None:
    close, make, _ = CASES[name]
    function = graphed(counting(close))
    trainer = Trainer(total := torch.zeros(3, device=device), make(total))
    for _ in range(CALLS):
        function(trainer)
    assert counts(function)[1] == CALLS - 1
    assert total.eq(CALLS).all() and shown(trainer.record) == shown(make(total))


def test_a_result_that_stood_there_is_that_object(device: str) -> None:
    """But of the call that captures."""

    def step(trainer: Trainer) -> Any:
        last, trainer.record = trainer.record, {"start": 0.0}
        trainer.total.add_(1)
        return last

    function = graphed(step)
    trainer = Trainer(torch.zeros(3, device=device), {"start": 0.0})
    for number in range(CALLS):
        held = trainer.record
        result = function(trainer)
        assert result == held and (number == 1 or result is held)
        assert trainer.record is not held


def test_all_places_of_one_object_are_given_another(device: str) -> None:
    """Where one has an equal one by now, the result is the new one, too."""
    places: dict[str, Any] = {"last": None}

    def step(trainer: Trainer) -> Any:
        trainer.total.add_(1)
        places["last"] = trainer.record = [0.5]
        return places["last"]

    function = graphed(step)
    trainer = Trainer(torch.zeros(3, device=device), None)
    for _ in range(4):
        function(trainer)
    best = trainer.record
    places["last"] = copy.deepcopy(best)
    result = function(trainer)
    assert result is places["last"] is trainer.record is not best
    assert counts(function)[1] == 4


class Recording(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.record = {"start": 0.0}

    def forward(self, x: Tensor) -> Tensor:  # [n, 2]
        self.record["end"] = 1.0
        self.record = {"start": 0.0}
        return self.linear(x)


def test_a_forward_that_does_so_is_refused(device: str) -> None:
    model = Recording().to(device)
    with pytest.raises(RuntimeError, match=r"changes record \(changed, and replaced by another object\)"):
        tg.make_graphed_callables(model, (torch.randn(3, 2, device=device),))
