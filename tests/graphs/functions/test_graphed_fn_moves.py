"""graphed(): a function that puts an object where an equal one was changes something, as a replay would not."""

from __future__ import annotations

import collections
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from sequences import counts

from te_graph import CaptureError, graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def _owner() -> SimpleNamespace:
    rows = [[1.0] for _ in range(6)]
    return SimpleNamespace(a=rows[0], b=rows[1], list=rows[2:4], deque=collections.deque(rows[4:]), table={"a": [1.0]})


def _swap(o: SimpleNamespace) -> None:
    o.a, o.b = o.b, o.a


def _shift(o: SimpleNamespace) -> None:
    o.a, o.b = o.b, [1.0]


MOVES: dict[str, tuple[Callable[[SimpleNamespace], object], str]] = {
    "two attributes": (_swap, r"o\.[ab]"),
    "one that stays": (_shift, r"o\.a"),
    "in a list": (lambda o: o.list.append(o.list.pop(0)), r"o\.list"),
    "a list turned round": (lambda o: o.list.reverse(), r"o\.list"),
    "in a deque": (lambda o: o.deque.rotate(1), r"o\.deque"),
    "in a dictionary": (lambda o: o.table.update(a=o.a) or setattr(o, "a", [1.0]), r"o\.table"),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves_of_equal_objects_are_refused(name: str, device: str) -> None:
    move, place = MOVES[name]
    o, total = _owner(), torch.zeros(3, device=device)

    def step() -> None:
        total.add_(o.a[0])
        move(o)

    step = graphed(step)
    step()
    before = o.a, o.b, *o.list, *o.deque, o.table["a"]
    with pytest.raises(CaptureError, match=rf"changes the state.*{place} gets an object that was elsewhere"):
        step()
    assert all(map(lambda one, other: one is other, (o.a, o.b, *o.list, *o.deque, o.table["a"]), before))
    assert_bitwise_equal(total, torch.ones_like(total))


def test_which_of_two_equal_objects_stands_there_is_compared(device: str) -> None:
    totals, tables = [], []
    for wrap in (lambda function: function, graphed):
        o, total = SimpleNamespace(a={"s": 1.0}, b={"s": 1.0}), torch.zeros(3, device=device)
        o.current = o.a

        def use(name: str, o: SimpleNamespace = o, total: torch.Tensor = total) -> None:  # [3]
            o.current = getattr(o, name)
            total.add_(o.current["s"])

        use_a, use_b = (wrap(lambda name=name, use=use: use(name)) for name in "ab")
        for one in (use_a,) * 3 + (use_b,) * 3:
            one()
        if wrap is graphed:
            assert [counts(one)[1] for one in (use_a, use_b)] == [2, 2]
        use_a()
        o.current["s"] = 10.0
        use_b()
        use_a()
        totals.append(total)
        tables.append((o.a, o.b))
    assert_bitwise_equal(totals[1], totals[0])
    assert tables[1] == tables[0]
