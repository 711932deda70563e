"""What a capture that fails has put into lists, objects and variables beside the module is gone afterwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import te_graph as tg

entries: list[Tensor] = []  # [] each
by_name: defaultdict[str, list[Tensor]] = defaultdict(list)
total: Tensor | float = 0.0
tracker = SimpleNamespace(entries=[], total=0.0)


class Router(nn.Module):
    """Leaves a loss of its own, [], with ``put``; [4, 8] to [4, 8]."""

    entries: ClassVar[list[Tensor]] = []

    def __init__(self, put: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.route, self.linear, self.put = nn.Linear(8, 4), nn.Linear(8, 8), put

    def forward(self, x: Tensor) -> Tensor:
        self.put(self.route(x).softmax(-1).mean(0).square().sum())
        return x + self.linear(x)


def add_to_variable(loss: Tensor) -> None:
    global total
    total = total + loss


def add_to_attribute(loss: Tensor) -> None:
    tracker.total = tracker.total + loss


def in_closure() -> tuple[Callable[[Tensor], None], list[Tensor]]:
    kept: list[Tensor] = []

    def put(loss: Tensor) -> None:
        kept.append(loss)

    return put, kept


def in_default(loss: Tensor, kept: list[Tensor] = []) -> None:  # noqa: B006, as people write it
    kept.append(loss)


put_in_closure, in_cell = in_closure()
PUTS: dict[str, Callable[[Tensor], None]] = {
    "global list": lambda loss: entries.append(loss),
    "global dictionary": lambda loss: by_name["aux"].append(loss),
    "global variable": add_to_variable,
    "class attribute": lambda loss: Router.entries.append(loss),
    "list of a global object": lambda loss: tracker.entries.append(loss),
    "attribute of a global object": add_to_attribute,
    "closure": put_in_closure,
    "default argument": in_default,
    "bound method": tracker.entries.append,
}


def left() -> list[float]:
    """What is in all of these places: how many entries, and sums."""
    lists = [entries, by_name.get("aux", []), Router.entries, tracker.entries, in_cell, in_default.__defaults__[0]]
    return [*map(float, map(len, lists)), *(float(torch.as_tensor(one).detach()) for one in (total, tracker.total))]


@pytest.fixture(autouse=True)
def cleared() -> None:
    clear()


def clear() -> None:
    global total
    total = tracker.total = 0.0
    for one in (entries, by_name, Router.entries, tracker.entries, in_cell, in_default.__defaults__[0]):
        one.clear()


@pytest.mark.parametrize("late", [False, True], ids=["samples", "late"])
@pytest.mark.parametrize("place", PUTS)
def test_entries_are_those_of_the_calls_alone(device: str, place: str, late: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Router(PUTS[place]), nn.Linear(8, 8), Router(PUTS[place])).to(device)
    x = torch.randn(4, 8, device=device)
    model(x)
    expected = left()
    clear()
    if late:
        tg.make_graphed_callables(tuple(model), on_mismatch="eager", show_progress=False)
    else:
        samples = tuple((torch.randn(4, 8, device=device, requires_grad=True),) for _ in model)
        with pytest.raises(RuntimeError, match="a replay would not"):
            tg.make_graphed_callables(tuple(model), samples, show_progress=False)
    model(x)
    assert left() == expected
