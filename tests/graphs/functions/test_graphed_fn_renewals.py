"""graphed(): what a function makes anew at each call and leaves somewhere is another object after each call."""

from __future__ import annotations

import array
import collections
import functools
import queue
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sequences import counts
from torch import Tensor, nn

from te_graph import graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


@dataclass
class Row:
    rate: float
    names: list[str] = field(default_factory=lambda: ["a"])


@dataclass(slots=True)
class SlottedRow:
    rate: float


@dataclass
class Node:
    scale: float
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)

    @functools.cached_property
    def steps(self) -> list[float]:
        return [self.scale]


class Pair(NamedTuple):
    first: list[float]
    second: float


class Numbers(list):
    pass


class Slotted:
    __slots__ = ("last", "rate", "shared", "weight")


class Open:
    pass


LAST: Any = None


MAKES: dict[str, Callable[[Any], Any]] = {
    "a dictionary": lambda t: {"rate": t.rate},
    "a list": lambda t: [t.rate, "a"],
    "a set": lambda t: {t.rate},
    "a deque": lambda t: collections.deque([t.rate], maxlen=3),
    "an ordered dictionary": lambda t: collections.OrderedDict(a=t.rate, b=1),
    "a dictionary with a default": lambda t: collections.defaultdict(list, a=t.rate),
    "a dataclass": lambda t: Row(t.rate),
    "a dataclass with slots": lambda t: SlottedRow(t.rate),
    "a list in a dictionary": lambda t: {"rates": [t.rate], "shared": t.shared},
    "a list in a tuple": lambda t: ([t.rate], 1),
    "a list in a named tuple": lambda t: Pair([t.rate], 1.0),
    "an array of NumPy": lambda t: np.full(2, t.rate),
    "an array of Python's": lambda t: array.array("d", [t.rate]),
    "bytes that can be changed": lambda t: bytearray(2),
    "an array in a list": lambda t: [np.full(2, t.rate)],
    "gradients": lambda t: [t.weight.grad],
}


def _made_by(kind: type, device: str) -> Any:
    owner = kind()
    owner.rate, owner.last, owner.shared = 0.5, None, [1.0]
    owner.weight = nn.Parameter(torch.ones(3, device=device))
    owner.weight.grad = torch.ones(3, device=device)
    return owner


def _mutable(value: Any) -> list[Any]:
    """The identities that are new in each call."""
    inner = value["rates"] if isinstance(value, dict) and "rates" in value else None
    return [id(value[0]) if isinstance(value, tuple) else id(value), *([] if inner is None else [id(inner)])]


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("kind", [Open, Slotted])
def test_what_each_call_leaves_is_an_object_of_its_own(name: str, kind: type, device: str) -> None:
    owner, total = _made_by(kind, device), torch.zeros(3, device=device)

    def step() -> None:
        total.add_(owner.rate)
        owner.last = MAKES[name](owner)

    replayed, kept = graphed(step), []
    for _ in range(6):
        replayed()
        kept.append(owner.last)
    assert counts(replayed)[1] >= 3
    assert len({one for value in kept for one in _mutable(value)}) == 6 * len(_mutable(kept[0]))
    assert all(type(value) is type(kept[0]) for value in kept)
    if name not in ("gradients", "an array in a list") and not isinstance(kept[0], np.ndarray):
        assert all(value == MAKES[name](owner) for value in kept)
    if name == "a list in a dictionary":
        assert all(value["shared"] is owner.shared for value in kept)
    assert_bitwise_equal(total, torch.full_like(total, 3))


def test_in_lists_variables_and_dictionaries(device: str) -> None:
    total, places, table, last = torch.zeros(3, device=device), [None], {}, None

    def step() -> None:
        nonlocal last
        global LAST
        total.add_(1)
        places[0] = table["last"] = [1]
        last, LAST = {"a": 1}, {"b": 2}

    replayed, kept = graphed(step), []
    for _ in range(6):
        replayed()
        assert places[0] is table["last"]
        kept.append((places[0], last, LAST))
    assert counts(replayed)[1] == 5
    assert len({id(one) for row in kept for one in row}) == 18


def test_a_copy_that_it_makes_of_its_own_is_not_what_others_keep(device: str) -> None:
    owner, x = _made_by(Open, device), torch.ones(3, device=device)
    owner.options = [0.5]

    def step() -> None:
        owner.options = list(owner.options)
        x.mul_(owner.options[0])

    replayed = graphed(step)
    for _ in range(3):
        replayed()
    mine = owner.options
    replayed()
    mine[0] = 2.0
    replayed()
    assert_bitwise_equal(x, torch.full_like(x, 0.5**5))


def test_a_part_that_others_hold_stays_shared(device: str) -> None:
    owner, total = _made_by(Open, device), torch.zeros(3, device=device)
    shared, hidden = [1.0], queue.SimpleQueue()  # in which no guard looks
    hidden.put(shared)

    def step() -> None:
        total.add_(1)
        owner.last = {"shared": hidden.get(), "own": [1.0]}
        hidden.put(owner.last["shared"])

    replayed, kept = graphed(step), []
    for _ in range(6):
        replayed()
        kept.append(owner.last)
    assert all(row["shared"] is shared for row in kept)
    assert len({id(row["own"]) for row in kept}) == 6
    assert counts(replayed)[1] == 5


def test_what_nobody_keeps_stays(device: str) -> None:
    owner, total = _made_by(Open, device), torch.zeros(3, device=device)

    def step() -> None:
        total.add_(1)
        owner.last = {"rates": [owner.rate]}

    replayed = graphed(step)
    for _ in range(3):
        replayed()
    there = id(owner.last)
    for _ in range(3):
        replayed()
        assert id(owner.last) == there


def test_a_result_is_what_the_call_left(device: str) -> None:
    owner, total = _made_by(Open, device), torch.zeros(3, device=device)

    def step() -> tuple[Tensor, dict[str, Any]]:  # [3], and what it left
        total.add_(1)
        owner.last = {"rates": [owner.rate]}
        return total, owner.last

    replayed, kept = graphed(step), []
    for _ in range(6):
        same, last = replayed()
        assert same is total
        assert last is owner.last
        kept.append(last)
    assert len(set(map(id, kept))) == 6
    assert counts(replayed)[1] == 5


def test_an_argument_that_it_keeps_is_that_of_this_call(device: str) -> None:
    owner, total = _made_by(Open, device), torch.zeros(3, device=device)

    def step(t: Tensor, options: dict[str, float]) -> None:  # [3]
        t.add_(options["a"])
        owner.last = options

    replayed, one = graphed(step), {"a": 1.0}
    for options in (one, one, one, {"a": 1.0}, {"a": 1.0}, one, one):
        replayed(total, options)
        assert owner.last is options
    assert_bitwise_equal(total, torch.full_like(total, 7))
    assert counts(replayed)[1] >= 3


def _counter() -> Callable[[], int]:
    count = 0

    def count_one() -> int:
        nonlocal count
        count += 1
        return count

    return count_one


SHARES: dict[str, Callable[[Any], None]] = {
    "in a list and a dictionary": lambda o: _leave(o, lambda g: ([g], {"main": g})),
    "twice in a list": lambda o: _leave(o, lambda g: ([g, g], None)),
    "alone and in a tuple": lambda o: _leave(o, lambda g: (g, (g,))),
    "in a closure": lambda o: _leave(o, lambda g: (g, lambda: g)),
    "in a partial": lambda o: _leave(o, lambda g: (g, functools.partial(print, g))),
    "in a named tuple": lambda o: _leave(o, lambda g: (g, Pair(g, 1.0))),
    "in a proxy": lambda o: _leave(o, lambda g: (g, types.MappingProxyType({"a": g}))),
}


def _leave(owner: Any, places: Callable[[list[float]], tuple[Any, Any]]) -> None:
    owner.first, owner.second = places([1.0])


def _lists_in(value: Any) -> list[list[float]]:
    if isinstance(value, list) and value and isinstance(value[0], float):
        return [value]
    if isinstance(value, functools.partial):
        value = value.args
    elif isinstance(value, types.FunctionType):
        value = [value()]
    elif isinstance(value, dict | types.MappingProxyType):
        value = list(value.values())
    return [one for part in value or () if isinstance(part, list) for one in _lists_in(part)]


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("name", SHARES)
def test_what_is_one_object_in_several_places_is_one_after_each_replay(name: str, is_kept: bool, device: str) -> None:
    owner, total = Open(), torch.zeros(3, device=device)

    def step() -> None:
        total.add_(1)
        SHARES[name](owner)

    replayed, kept = graphed(step), []
    for number in range(6):
        replayed()
        lists = [*_lists_in(owner.first), *_lists_in(owner.second)]
        assert len(lists) == 2
        assert lists[0] is lists[1]
        assert lists[0] == [1.0]
        if is_kept:
            kept.append(lists[0])
            lists[0][0] = float(number + 2)
        del lists  # it would hold them
    assert_bitwise_equal(total, torch.full_like(total, 6))
    assert [one[0] for one in kept] == [float(number + 2) for number in range(len(kept))]
    if not is_kept:
        assert counts(replayed)[1] == 5


def test_objects_that_refer_to_each_other(device: str) -> None:
    owner, total = Open(), torch.zeros(3, device=device)

    def build() -> None:
        total.add_(1)
        owner.root = Node(1.0)
        owner.root.children.append(Node(1.0, owner.root))

    replayed, kept = graphed(build), []
    for _ in range(6):
        replayed()
        kept.append(owner.root)
        assert owner.root.children[0].parent is owner.root
    assert len({id(one.children) for one in kept}) == len(set(map(id, kept))) == 6
    assert counts(replayed)[1] == 5


def test_a_place_that_was_given_an_equal_object_gets_the_shared_one_again(device: str) -> None:
    owner, total = Open(), torch.zeros(3, device=device)

    def step() -> None:
        total.add_(1)
        SHARES["in a list and a dictionary"](owner)

    replayed = graphed(step)
    for _ in range(3):
        replayed()
    owner.second = {"main": [1.0]}
    replayed()
    assert owner.first[0] is owner.second["main"]


def test_attributes_that_the_caller_puts_there_are_not_on_the_next_one(device: str) -> None:
    owner, total = Open(), torch.zeros(3, device=device)

    def step() -> None:
        total.add_(1)
        owner.node = Node(1.0)

    replayed = graphed(step)
    for _ in range(2):  # a capture would see that they go
        replayed()
    for number in range(4):
        replayed()
        assert not hasattr(owner.node, "seen")
        assert owner.node.steps == [1.0]
        owner.node.steps.append(number)
        owner.node.seen = True
    assert counts(replayed)[1] == 5


UNCOPIED: dict[str, Callable[[], Any]] = {
    "a closure": _counter,
    "a partial": lambda: functools.partial(lambda seen: seen.append(1) or len(seen), []),
    "a derived list": lambda: Numbers([1.0]),
    "a view of a dictionary": lambda: {"a": 1.0}.keys(),
}


@pytest.mark.parametrize("on_mismatch", ["capture", "eager", "raise"])
@pytest.mark.parametrize("name", UNCOPIED)
def test_what_cannot_be_copied_and_is_kept_is_made_by_the_function(name: str, on_mismatch: str, device: str) -> None:
    owner, total = Open(), torch.zeros(3, device=device)

    def step() -> None:
        total.add_(1)
        owner.last = UNCOPIED[name]()

    replayed = graphed(step, on_mismatch=on_mismatch)
    for _ in range(4):
        replayed()
    assert counts(replayed)[1] == 3
    kept = [owner.last]
    if on_mismatch == "raise":
        with pytest.raises(RuntimeError, match=r"owner\.last gets from each call.* where others hold the last"):
            replayed()
        return
    for _ in range(3):
        replayed()
        kept.append(owner.last)
    assert len(set(map(id, kept))) == 4
    if callable(kept[0]):
        assert [one() for one in kept] == [1] * 4
    assert_bitwise_equal(total, torch.full_like(total, 7))
    kept.clear()
    replayed()
    before = counts(replayed)[1]
    replayed()
    assert counts(replayed)[1] == before + 1


KEEPS: dict[str, tuple[Callable[[Any, Any], None], Callable[[Any], Any]]] = {
    "in a list": (lambda o, one: o.history.__setitem__(0, one), lambda o: o.history[0]["rate"]),
    "in a dictionary": (lambda o, one: o.table.__setitem__("last", one), lambda o: o.table["last"]["rate"]),
    "a part": (lambda o, one: setattr(o, "last", one["groups"]), lambda o: o.last[0]),
    "in a new dictionary": (lambda o, one: setattr(o, "last", {"one": one}), lambda o: o.last["one"]["rate"]),
    "in a tuple": (lambda o, one: setattr(o, "last", (one, 1)), lambda o: o.last[0]["rate"]),
}


@pytest.mark.parametrize("name", KEEPS)
def test_an_argument_that_it_keeps_in_something_is_that_of_this_call(name: str, device: str) -> None:
    keep, get = KEEPS[name]
    owner, total = Open(), torch.zeros(3, device=device)
    owner.history, owner.table, owner.last = [None], {"last": None}, None

    def step(options: dict[str, Any]) -> None:
        total.add_(options["rate"])
        keep(owner, options)

    replayed = graphed(step)
    for number in range(6):
        options = {"rate": 1.0, "groups": [1.0]}
        replayed(options)
        if number == 3 and ("new" in name or "tuple" in name):
            assert counts(replayed)[1] == 3
        if number >= 3:
            options["rate"] = options["groups"][0] = float(number)
            assert get(owner) == number
    assert_bitwise_equal(total, torch.full_like(total, 6))


def test_lists_and_dictionaries_of_arguments(device: str) -> None:
    owner, total = Open(), torch.zeros(3, device=device)

    def step(*args: Any, **kwargs: Any) -> None:
        total.add_(kwargs["rate"])
        owner.args, owner.kwargs = args, kwargs

    replayed = graphed(step)
    for _ in range(6):
        one, other = [0], [0]
        replayed(one, rate=1.0, option=other)
        assert owner.args[0] is one
        assert owner.kwargs["option"] is other
