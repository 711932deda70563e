"""graphed(): a function that changes Python objects in its first call, where others change them back or give it other
objects, runs eagerly until a call finds what it needs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from sequences import counts
from torch import Tensor

from te_graph import graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


@dataclass
class Meter:
    total: Tensor  # []
    started: bool = False


def fill(state: dict[str, Any], value: Tensor) -> None:  # []
    if not state:
        state["total"] = torch.zeros_like(value)
    state["total"].add_(value)


def start(meter: Meter, value: Tensor) -> None:  # []
    meter.started = True
    meter.total.add_(value)


def mark(state: dict[str, Any], value: Tensor) -> None:  # []
    state["seen"] = True
    state["total"].add_(value)


STATES: dict[str, tuple[Callable[..., None], Callable[[Tensor], Any]]] = {
    "a tensor in a dictionary": (fill, lambda zero: {}),
    "a flag of a dataclass": (start, lambda zero: Meter(zero)),
    "a flag in a dictionary": (mark, lambda zero: {"total": zero}),
}


def _total(state: Any) -> Tensor:
    """The sum [] in a state."""
    return state.total if isinstance(state, Meter) else state["total"]


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("is_given", [True, False])
def test_what_the_first_call_of_each_state_makes(name: str, is_given: bool, device: str) -> None:
    update, make = STATES[name]
    states, one = [make(torch.zeros((), device=device)) for _ in range(6)], torch.ones((), device=device)
    present = states[0]
    replayed = graphed(update if is_given else lambda value: update(present, value))
    for _ in range(4):
        for state in states:
            present = state
            replayed(*((present, one) if is_given else (one,)))
    for state in states:
        assert_bitwise_equal(_total(state), one * 4)
    assert counts(replayed)[1] >= 6


def test_a_state_that_was_emptied_after_a_dry_run(device: str) -> None:
    state, one = {}, torch.ones((), device=device)
    replayed = graphed(lambda value: fill(state, value))
    replayed(one)
    state.clear()
    for _ in range(4):
        replayed(one)
    assert_bitwise_equal(state["total"], one * 4)
    assert counts(replayed)[1] == 3


def test_what_others_change_back_before_each_call_is_named(device: str, caplog: pytest.LogCaptureFixture) -> None:
    meter, one = Meter(torch.zeros((), device=device)), torch.ones((), device=device)
    replayed = graphed(start)
    with caplog.at_level(logging.WARNING, logger="te_graph"):
        for number in range(1, 7):
            replayed(meter, one)
            assert meter.started
            assert_bitwise_equal(meter.total, one * number)
            meter.started = False
    (message,) = [record.message for record in caplog.records]
    assert "has run eagerly 4 times in a row" in message
    assert "change Python objects, which a replay would not do: argument 0.started" in message


@dataclass
class Row:
    epoch: int = 0


@dataclass
class History:
    total: Tensor  # []
    row: Any
    best: Any


def note(history: History, value: Tensor, is_best: bool, make: Callable[[], Any]) -> None:  # []
    history.total.add_(value)
    history.row = make()
    if is_best:
        history.best = history.row


def test_a_call_that_changes_what_it_parts_and_replaces(device: str) -> None:
    def step(history: History) -> None:
        history.total.add_(1)
        history.row["epochs"] += 1
        history.row, history.best = Counter(), Counter()

    history, replayed = History(torch.zeros((), device=device), Counter(), Counter()), graphed(step)
    for number in range(1, 7):
        if number % 2 == 0:
            history.best = history.row
        replayed(history)
        assert history.best is not history.row
        assert history.best == history.row == {}
        assert history.total == number


@pytest.mark.parametrize("make", [Row, lambda: {"epoch": 0}, lambda: [[]]])
@pytest.mark.parametrize("has_best", [True, False])
def test_one_object_in_two_places_of_which_a_call_replaces_one(
    make: Callable[[], Any], has_best: bool, device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A call with another signature puts it there again before each."""
    history = History(torch.zeros((), device=device), make(), make() if has_best else None)
    replayed, one = graphed(note), torch.ones((), device=device)
    with caplog.at_level(logging.WARNING, logger="te_graph"):
        for number in range(1, 17):
            best = history.best
            replayed(history, one, number % 2 == 0, make)
            assert history.best is (history.row if number % 2 == 0 else best)
            assert number % 2 == 0 or history.row is not best
            assert_bitwise_equal(history.total, one * number)
    assert "change Python objects, which a replay would not do: argument 0.best was replaced" in caplog.text
    assert counts(replayed)[:2] == (0, 0)
    for _ in range(3):
        replayed(history, one, False, make)
    assert counts(replayed)[:2] == (1, 2)
