"""Objects of te_graph's own that user code leads to: no capture keeps, compares or puts back what they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import te_graph as tg
from te_graph.common.own_objects import OwnObject
from te_graph.graphs.guards.sources import TensorReader, walk
from te_graph.graphs.layers.watched_step import attributes_kept

pytestmark = pytest.mark.usefixtures("repeatable")


class Own(OwnObject):
    """With state in containers, attributes and slots."""

    __slots__ = ("slot",)

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.by_name: dict[str, list[int]] = {"calls": self.calls}
        self.last = self.slot = 0
        self.tensor, self.other = torch.zeros(1), torch.zeros(1)

    def note(self) -> None:
        self.calls.append(len(self.calls))
        self.by_name[f"call {len(self.calls)}"] = list(self.calls)
        self.last = self.slot = len(self.calls)

    def state(self) -> tuple[Any, ...]:
        return list(self.calls), dict(self.by_name), self.last, self.slot

    def captured_tensors(self) -> list[Tensor]:
        return [self.tensor]


class Holder(nn.Module):
    """Changes what te_graph's object holds, wherever that is held; calls of ``vars`` may see everything."""

    def __init__(self, is_refused: bool) -> None:
        super().__init__()
        self.own, self.is_refused, self.linear = Own(), is_refused, nn.Linear(6, 6)
        self.held = {"own": [self.own]}

    def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 6]
        self.own.note()
        y = self.linear(x) * len(vars(self)["held"]["own"])
        return y * y.sum().item() if self.is_refused else y


def capture_callable(holder: Holder, x: Tensor) -> None:
    tg.make_graphed_callables(holder, (x,))


def capture_callable_function(holder: Holder, x: Tensor) -> None:
    tg.make_graphed_callables(lambda x: holder(x), (x,))


def capture_function(holder: Holder, x: Tensor) -> None:
    call = tg.graphed(lambda x: holder(x).detach(), on_mismatch="raise")
    for _ in range(3):
        call(x)


WAYS = (capture_callable, capture_callable_function, capture_function)


@pytest.mark.parametrize("capture", WAYS)
def test_a_refused_capture_puts_nothing_back(device: str, capture: Callable) -> None:
    holder, x = Holder(is_refused=True).to(device), torch.randn(3, 6, device=device)
    with pytest.raises(RuntimeError, match="reads a tensor's value on the host"):
        capture(holder, x)
    count = holder.own.last
    assert count > 0
    expected = Own()
    for _ in range(count):
        expected.note()
    assert holder.own.state() == expected.state()


@pytest.mark.parametrize("capture", WAYS)
def test_their_changes_are_no_effects(device: str, capture: Callable) -> None:
    capture(Holder(is_refused=False).to(device), torch.randn(3, 6, device=device))


def test_a_step_that_is_undone_puts_nothing_back() -> None:
    holder = Holder(is_refused=False)
    with attributes_kept(holder):
        holder(torch.randn(3, 6))
    assert holder.own.last == len(holder.own.calls) == 1


def test_walks_find_the_tensors_that_graphs_use_alone() -> None:
    holder = Holder(is_refused=False)
    found = [id(source.obj) for source in walk(TensorReader(holder))]
    assert id(holder.own.tensor) in found
    assert not {id(one) for one in (holder.own.calls, holder.own.by_name, holder.own.other)} & set(found)
