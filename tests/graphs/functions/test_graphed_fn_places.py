"""graphed(): wherever a function leaves what it makes anew, that is another object after each call."""

from __future__ import annotations

import contextvars
import gc
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from sequences import counts
from torch import Tensor, nn

from te_graph import CaptureError, graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


@dataclass
class Trainer:
    total: Tensor  # [3]
    last: Any = None
    nested: dict[str, Any] = field(default_factory=lambda: {"a": {"b": None}})


@dataclass(slots=True)
class Slotted:
    total: Tensor  # [3]
    last: Any = None


# What is given, how the function leaves something there, and how that is read.
ARGUMENTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "a dictionary": (
        lambda total: {"total": total, "last": None},
        lambda given, one: given.__setitem__("last", one),
        lambda given: given["last"],
    ),
    "a dictionary without tensors": (
        lambda total: {"last": None},
        lambda given, one: given.__setitem__("last", one),
        lambda given: given["last"],
    ),
    "a list": (
        lambda total: [total, None],
        lambda given, one: given.__setitem__(1, one),
        lambda given: given[1],
    ),
    "a deque": (
        lambda total: deque([total, None]),
        lambda given, one: given.__setitem__(1, one),
        lambda given: given[1],
    ),
    "a dataclass": (Trainer, lambda given, one: setattr(given, "last", one), lambda given: given.last),
    "a dataclass with slots": (Slotted, lambda given, one: setattr(given, "last", one), lambda given: given.last),
    "a dictionary in a dataclass": (
        Trainer,
        lambda given, one: given.nested["a"].__setitem__("b", one),
        lambda given: given.nested["a"]["b"],
    ),
    "a dictionary in a tuple": (
        lambda total: (total, {"last": None}),
        lambda given, one: given[1].__setitem__("last", one),
        lambda given: given[1]["last"],
    ),
}
MAKES: dict[str, Callable[[], Any]] = {
    "a dictionary": lambda: {"rate": 0.5},
    "a list in a list": lambda: [[0.5]],
    "a dataclass": lambda: Row(0.5),
}


@dataclass
class Row:
    rate: float


@pytest.mark.parametrize("makes", MAKES)
@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_each_call_leaves_in_an_argument(name: str, by_keyword: bool, makes: str, device: str) -> None:
    make, leave, read = ARGUMENTS[name]
    total = torch.zeros(3, device=device)
    given, kept = make(total), []

    def step(given: Any, total: Tensor) -> None:  # [3]
        total.add_(1)
        leave(given, MAKES[makes]())

    replayed = graphed(step)
    for _ in range(6):
        replayed(**{"given": given, "total": total}) if by_keyword else replayed(given, total)
        kept.append(read(given))
    assert len(set(map(id, kept))) == 6
    assert all(one == MAKES[makes]() for one in kept)
    assert counts(replayed)[1] >= 4
    assert_bitwise_equal(total, torch.full_like(total, 6))


def test_an_object_that_is_another_in_each_call_gets_what_the_call_made(device: str) -> None:
    total, mine = torch.zeros(3, device=device), [0.5]

    def step(given: dict[str, Any]) -> None:
        given["total"].add_(1)
        given["last"] = [0.5]

    replayed = graphed(step)
    for _ in range(6):
        given = {"total": total, "last": mine}
        replayed(given)
        assert given["last"] == [0.5]
        assert given["last"] is not mine
    assert counts(replayed)[1] == 5


def test_what_nobody_keeps_stays_in_an_argument(device: str) -> None:
    given = {"total": torch.zeros(3, device=device), "last": None}

    def step(given: dict[str, Any]) -> None:
        given["total"].add_(1)
        given["last"] = {"rate": 0.5}

    replayed = graphed(step)
    for _ in range(3):
        replayed(given)
    there = id(given["last"])
    for _ in range(3):
        replayed(given)
        assert id(given["last"]) == there


def test_moves_within_an_argument_are_refused(device: str) -> None:
    total, given = torch.zeros(3, device=device), {"previous": [1.0], "current": [1.0]}

    def step(given: dict[str, Any]) -> None:
        total.add_(1)
        given["previous"], given["current"] = given["current"], [1.0]

    replayed = graphed(step)
    replayed(given)
    before = dict(given)
    with pytest.raises(CaptureError, match="argument 0 gets an object that was elsewhere"):
        replayed(given)
    assert all(given[key] is value for key, value in before.items())


class Settings:
    last: Any = None


_VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("_VARIABLE", default=None)
_WEIGHT, _MODULE = nn.Parameter(torch.ones(3)), nn.Linear(2, 2)
_TABLE: dict[Any, Any] = {}
_QUEUE = deque([[1.0], None])
_NESTED = {"a": {"b": [None]}}


def _with_default(last: Any = None) -> Any:
    return last


PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[], Any]]] = {
    "below a parameter": (lambda one: _TABLE.__setitem__(_WEIGHT, one), lambda: _TABLE[_WEIGHT]),
    "below a module": (lambda one: _TABLE.__setitem__(_MODULE, one), lambda: _TABLE[_MODULE]),
    "in a deque": (lambda one: _QUEUE.__setitem__(1, one), lambda: _QUEUE[1]),
    "in a class": (lambda one: setattr(Settings, "last", one), lambda: Settings.last),
    "in a context variable": (lambda one: _VARIABLE.set(one), lambda: _VARIABLE.get()),
    "below containers without tensors": (
        lambda one: _NESTED["a"]["b"].__setitem__(0, one),
        lambda: _NESTED["a"]["b"][0],
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_what_each_call_leaves_elsewhere(name: str, device: str) -> None:
    leave, read = PLACES[name]
    total, kept = torch.zeros(3, device=device), []

    def step() -> None:
        total.add_(1)
        leave({"rate": 0.5, "clipped": [False]})

    replayed = graphed(step)
    for _ in range(6):
        replayed()
        kept.append(read())
    assert len(set(map(id, kept))) == len({id(one["clipped"]) for one in kept}) == 6
    assert counts(replayed)[1] >= 4
    assert_bitwise_equal(total, torch.full_like(total, 6))


def test_where_nothing_can_be_put_the_function_runs(device: str) -> None:
    total, kept = torch.zeros(3, device=device), []

    def step() -> None:
        total.add_(1)
        _with_default.__defaults__ = ([0.5],)

    replayed = graphed(step)
    for _ in range(6):
        replayed()
        kept.append(_with_default())
    assert len(set(map(id, kept))) == 6
    assert counts(replayed)[1] <= 1
    assert_bitwise_equal(total, torch.full_like(total, 6))
    kept.clear()
    replayed()
    before = counts(replayed)[1]
    replayed()
    assert counts(replayed)[1] == before + 1


def test_keys_that_are_objects_are_not_kept(device: str) -> None:
    weight, table = nn.Parameter(torch.ones(3, device=device)), {}
    total = torch.zeros(3, device=device)

    def step() -> None:
        total.add_(1)
        for one in table:
            table[one] = {"rate": 0.5}

    table[weight] = None
    replayed, gone = graphed(step), weakref.ref(weight)
    for _ in range(3):
        replayed()
    assert counts(replayed)[1] == 2
    table.clear()
    del weight
    gc.collect()
    assert gone() is None
