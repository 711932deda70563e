"""graphed(): gradients that are moved without being computed with are where eager execution has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sequences import counts
from torch import Tensor, nn

from te_graph import graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Held:
    """A parameter, another one, and places where gradients may be kept."""

    def __init__(self, device: str) -> None:
        self.weight, self.other = (nn.Parameter(torch.zeros(3, device=device)) for _ in range(2))
        self.optimizer = torch.optim.SGD([self.weight])
        self.buffers = [torch.full((3,), float(k), device=device) for k in (1, 2)]  # of gradients, filled elsewhere
        self.weight.main_grad = self.buffers[0]
        self.total = torch.zeros(3, device=device)
        self.list: list[Any] = [None]
        self.kept = self.given = None


def _in_state(t: Held, given: Tensor) -> None:
    t.optimizer.state[t.weight]["g"] = t.weight.grad


def _over_a_list(t: Held, given: Tensor) -> None:
    for parameter, grad in zip((t.weight, t.other), (given, t.buffers[0]), strict=True):
        parameter.grad = grad


PUTS = {
    "an argument": lambda t, given: setattr(t.weight, "grad", given),
    "what has its memory": lambda t, given: setattr(t.weight, "grad", given.data),
    "over a list": _over_a_list,
    "main_grad": lambda t, given: setattr(t.weight, "grad", t.weight.main_grad),
    "of another one": lambda t, given: setattr(t.other, "grad", t.weight.grad),
}
KEEPS = {
    "an attribute": (lambda t, given: setattr(t, "kept", t.weight.grad), lambda t: t.kept),
    "in a list": (lambda t, given: setattr(t, "kept", [t.weight.grad]), lambda t: t.kept[0]),
    "an item": (lambda t, given: t.list.__setitem__(0, t.weight.grad), lambda t: t.list[0]),
    "in an optimizer's state": (_in_state, lambda t: t.optimizer.state[t.weight]["g"]),
}


def _steps(t: Held, call: Callable[..., Any]) -> Iterator[None]:
    """Calls with the first buffer, then with either."""
    for k in (0, 0, 0, 1, 0, 1, 1, 1):
        t.weight.main_grad = t.buffers[k]
        call(t, t.buffers[k])
        yield


@pytest.mark.parametrize("name", PUTS)
def test_a_gradient_that_it_only_sets_is_the_one_of_this_call(name: str, device: str) -> None:
    eager, replayed = Held(device), Held(device)

    def hand_over(t: Held, given: Tensor) -> None:
        t.total.add_(1)
        if name == "of another one":
            t.weight.grad = given
        PUTS[name](t, given)

    replaying = graphed(hand_over)
    for _ in zip(_steps(eager, hand_over), _steps(replayed, replaying), strict=True):
        for one, other in ((eager.weight, replayed.weight), (eager.other, replayed.other)):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                assert_bitwise_equal(other.grad, one.grad)
                assert [other.grad.data_ptr() == b.data_ptr() for b in replayed.buffers] == [
                    one.grad.data_ptr() == b.data_ptr() for b in eager.buffers
                ]
    assert_bitwise_equal(replayed.total, eager.total)
    assert counts(replaying)[1] >= 2


@pytest.mark.parametrize("name", KEEPS)
def test_a_gradient_that_it_only_keeps_is_the_one_of_this_call(name: str, device: str) -> None:
    keep, kept = KEEPS[name]
    t = Held(device)

    def collect(t: Held, given: Any) -> None:
        t.total.add_(1)
        keep(t, given)

    collecting = graphed(collect)
    for step in range(8):
        if step < 4 and t.weight.grad is not None:
            t.weight.grad.zero_()
        else:
            t.weight.grad = None
        (t.weight * step).sum().backward()
        collecting(t, None)
        assert kept(t) is t.weight.grad
    assert_bitwise_equal(t.total, torch.full_like(t.total, 8))
    assert counts(collecting)[1] >= 2


def test_whether_there_are_gradients_does_not_depend_on_where_they_lie(device: str) -> None:
    weight, total = nn.Parameter(torch.zeros(3, device=device)), torch.zeros(3, device=device)
    owner = SimpleNamespace(flat=torch.zeros(3, device=device))
    count = graphed(lambda: total.add_(sum(p.grad is not None for p in [weight])), on_mismatch="raise")
    for _ in range(4):
        weight.grad = None
        (weight * owner.flat).sum().backward()
        count()
    assert_bitwise_equal(total, torch.full_like(total, 4))
    assert counts(count) == (1, 3, 0, 1)
