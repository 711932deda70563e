"""graphed(): what others hold of objects that a call changes, replaces, moves or returns.

The reference is the function itself, called by a caller that does the same. What cannot be replayed right is refused.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from sequences import counts

from te_graph import CaptureError, graphed

pytestmark = pytest.mark.usefixtures("repeatable")
CALLS = 5


class Trainer:
    """total: [3]."""

    def __init__(self, device: str, **members: Any) -> None:
        self.total = torch.zeros(3, device=device)
        vars(self).update(members)


@dataclass
class Row:
    count: int = 0
    is_done: bool = False


@dataclass
class Metrics:
    losses: list[float] = field(default_factory=list)


def log_end(events: dict[str, Any] = {"open": []}) -> None:  # noqa: B006
    """As some logs keep what they have."""
    events["open"].append("end")
    events["open"] = []


def of_tuples(tr: Trainer) -> None:
    tr.histories[0].append("end")
    tr.histories = ([], [])


def of_partials(tr: Trainer) -> None:
    tr.partial.args[0].append("end")
    tr.partial = functools.partial(log_end, [])


def of_defaults(tr: Trainer) -> None:
    log_end()


def of_proxies(tr: Trainer) -> None:
    tr.events["open"].append("end")
    tr.events = MappingProxyType({"open": []})


def of_new_proxies(tr: Trainer) -> None:
    tr.events = MappingProxyType({"open": []})


def of_views(tr: Trainer) -> None:
    tr.events = {"open": []}.values()


def of_attributes(tr: Trainer) -> None:
    tr.row.is_done = True
    tr.row = Row()


def of_arrays(tr: Trainer) -> None:
    tr.table[0, 0] = 1
    tr.table = np.zeros(4).reshape(2, 2)


def of_signs(tr: Trainer) -> None:
    tr.row.count = -0.0
    tr.row = Row(0.0)


# How the function changes what it replaces, what the trainer has, and what the caller holds of that.
CHANGES: dict[str, tuple[Callable[[Trainer], Any], Callable[[], dict[str, Any]], Callable[[Trainer], Any]]] = {
    "a list in a tuple": (of_tuples, lambda: {"histories": ([], [])}, lambda tr: tr.histories[0]),
    "an argument of a partial": (
        of_partials,
        lambda: {"partial": functools.partial(log_end, [])},
        lambda tr: tr.partial.args[0],
    ),
    "in a default": (of_defaults, dict, lambda tr: log_end.__defaults__[0]["open"]),
    "behind a read-only mapping": (
        of_proxies,
        lambda: {"events": MappingProxyType({"open": []})},
        lambda tr: tr.events["open"],
    ),
    "behind a mapping that is new alone": (
        of_new_proxies,
        lambda: {"events": MappingProxyType({"open": []})},
        lambda tr: tr.events["open"],
    ),
    "behind a view": (of_views, lambda: {"events": {"open": []}.values()}, lambda tr: next(iter(tr.events))),
    "the dictionary of an object": (of_attributes, lambda: {"row": Row()}, lambda tr: vars(tr.row)),
    "a row of an array": (of_arrays, lambda: {"table": np.zeros(4).reshape(2, 2)}, lambda tr: tr.table[0]),
    "the sign of zero": (of_signs, lambda: {"row": Row(0.0)}, lambda tr: tr.row),
}


@pytest.mark.parametrize("name", CHANGES)
def test_who_holds_a_part_sees_the_change_of_each_call(name: str, device: str) -> None:
    change, members, hold = CHANGES[name]

    def step(tr: Trainer) -> None:
        tr.total.add_(1)
        change(tr)

    found = []
    for function in (step, graphed(step)):
        tr, held = Trainer(device, **members()), []
        for _ in range(CALLS):
            held.append(hold(tr))
            function(tr)
        assert tr.total.eq(CALLS).all()
        found.append(([repr(one) for one in held], len(set(map(id, held)))))
    assert found[0] == found[1]


@pytest.mark.parametrize("make", [lambda: ([], []), lambda: functools.partial(log_end, []), lambda: [([],)]])
def test_a_refused_call_takes_back_what_it_did_below_a_tuple(make: Callable[[], Any], device: str) -> None:
    tr = Trainer(device, held=make())

    def rows() -> list[Any]:
        held = tr.held.args if isinstance(tr.held, functools.partial) else tr.held
        return held[0][0] if isinstance(held[0], tuple) else held[0]

    @graphed
    def grow(tr: Trainer) -> None:
        tr.total.add_(1)
        rows().append(1.0)

    for _ in range(4):
        before = tr.total[0].item(), len(rows())
        try:
            grow(tr)
        except CaptureError:
            assert (tr.total[0].item(), len(rows())) == before
        else:
            assert (tr.total[0].item(), len(rows())) == (before[0] + 1, before[1] + 1)


def swap(tr: Trainer) -> None:
    tr.now, tr.next = tr.next, tr.now


def rotate(tr: Trainer) -> None:
    tr.slots.append(tr.slots.popleft())


def shift(tr: Trainer) -> None:
    tr.previous, tr.row = tr.row, {"epoch": 0}


def swapped(device: str) -> Trainer:
    rows = [{"rows": 0}, {"rows": 0}]
    return Trainer(device, records=rows, now=rows[0], next=rows[1])


def rotated(device: str) -> Trainer:
    slots = [[0.0], [0.0], [0.0]]
    return Trainer(device, slots=deque(slots), by_name=dict(zip("abc", slots, strict=True)))


def shifted(device: str) -> Trainer:
    row: dict[str, Any] = {"epoch": 0}
    return Trainer(device, row=row, previous=None, state={"last": row})


@pytest.mark.parametrize("move, make", [(swap, swapped), (rotate, rotated), (shift, shifted)])
def test_moves_are_refused_wherever_else_the_object_is(
    move: Callable[[Trainer], None], make: Callable[[str], Trainer], device: str
) -> None:
    """Where code that runs does not name it, guards do not look."""

    @graphed
    def step(tr: Trainer) -> None:
        tr.total.add_(1)
        move(tr)

    tr = make(device)
    step(tr)
    with pytest.raises(CaptureError, match=r"gets an object that was elsewhere|was replaced by another object"):
        for _ in range(3):
            step(tr)


def test_a_result_that_another_place_has_is_that_object(device: str) -> None:
    def step(tr: Trainer) -> Any:
        tr.total.add_(1)
        done, tr.row = tr.row, {"loss": None}
        return done

    function = graphed(step)
    tr = Trainer(device, row={"loss": None}, table={"last": None})
    for number in range(CALLS):
        tr.table["last"] = tr.row
        result = function(tr)
        assert number == 1 or result is tr.table["last"]


def test_a_result_in_attributes_is_that_of_this_call(device: str) -> None:
    def step(tr: Trainer) -> Any:
        tr.total.add_(1)
        tr.config = copy.deepcopy(tr.config)
        tr.metrics = Metrics()
        return tr.metrics.losses

    function = graphed(step)
    tr, rows = Trainer(device, metrics=Metrics(), config={"a": 1}), []
    for _ in range(CALLS):
        rows.append(function(tr))
        assert rows[-1] is tr.metrics.losses
    assert len(set(map(id, rows))) == CALLS
    assert counts(function)[1] == CALLS - 1


def test_a_result_is_that_of_its_place_where_one_object_was_in_two(device: str) -> None:
    def step(tr: Trainer) -> Any:
        tr.total.add_(1)
        tr.last, tr.best = {"loss": None}, {"loss": None}
        return tr.last

    function = graphed(step)
    tr = Trainer(device, last={"loss": None}, best={"loss": None})
    for number in range(CALLS):
        if number == 3:
            tr.best = tr.last  # the best one so far
        assert function(tr) is tr.last is not tr.best
