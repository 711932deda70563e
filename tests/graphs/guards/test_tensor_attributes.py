"""Attributes that are put on tensors: those of parameters are seen, those that calls put there refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import replays
from mutations import assert_not_seen, assert_seen, batch
from torch import Tensor, nn

from te_graph import make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")


class Scaled(nn.Module):
    """[3, 4] -> [3, 4]: by what its tensors have attributes for."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, device=device))
        self.weight.factor = 2.0
        self.weight.mask = torch.ones(4, device=device)
        self.weight.steps = 0
        self.register_buffer("shift", torch.ones(4, device=device))
        self.shift.sign = -1

    def forward(self, x: Tensor) -> Tensor:
        x = x * getattr(self.weight, "gain", 1.0)
        return x * (self.weight * self.weight.mask) * self.weight.factor + self.shift * self.shift.sign


CHANGES: dict[str, tuple[Callable[[Scaled], Any], str]] = {
    "number": (lambda net: setattr(net.weight, "factor", 3.0), "factor of weight changed from 2.0 to 3.0"),
    "that was not there": (lambda net: setattr(net.weight, "gain", 3.0), "gain of weight changed"),
    "of a buffer": (lambda net: setattr(net.shift, "sign", 1), "sign of shift changed from -1 to 1"),
    "tensor": (
        lambda net: setattr(net.weight, "mask", torch.zeros_like(net.weight)),
        "mask of weight (was replaced|moved)",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_an_attribute_of_a_tensor_that_the_code_names_is_compared(device: str, what: str) -> None:
    def build() -> tuple[nn.Module, nn.Module]:
        net = Scaled(device)
        return net, net

    change, words = CHANGES[what]
    assert_seen(build, change, words, device)


def test_other_attributes_of_tensors_may_change(device: str) -> None:
    def build() -> tuple[nn.Module, nn.Module]:
        net = Scaled(device)
        return net, net

    assert_not_seen(build, lambda net: setattr(net.weight, "steps", net.weight.steps + 1), device)
    assert_not_seen(build, lambda net: net.weight.mask.mul_(0.5), device)


def count_on_weight(net: Scaled, x: Tensor) -> Tensor:
    net.weight.steps += 1
    return x * net.weight


def leave_on_weight(net: Scaled, x: Tensor) -> Tensor:
    net.weight.mask = net.weight * 2
    return x * net.weight


def count_on_argument(net: Scaled, x: Tensor) -> Tensor:
    x.steps = getattr(x, "steps", 0) + 1
    return x * net.weight


def mark_argument(net: Scaled, x: Tensor) -> Tensor:
    x.mark = True
    return x * net.weight


def mark_result(net: Scaled, x: Tensor) -> Tensor:
    y = x * net.weight
    y.mark = True
    return y


def mark_view_of_argument(net: Scaled, x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.t()
    y.mark = True
    return y, x * net.weight


LEFT: dict[str, tuple[Callable[[Scaled, Tensor], Any], str]] = {
    "counter of a parameter": (count_on_weight, r"changes steps of weight of closure variable net \(from \d to \d\)"),
    "tensor on a parameter": (leave_on_weight, "leaves a tensor that it computed in .*mask"),
    "counter of an argument": (count_on_argument, r"changes the attributes of args\[0\] in place"),
    "mark of an argument": (mark_argument, r"changes the attributes of args\[0\] in place"),
    "mark of a result": (mark_result, "result 0 has an attribute 'mark'.*ignore_attributes"),
    "mark of a view": (mark_view_of_argument, "result 0 has an attribute 'mark'"),
}


@pytest.mark.parametrize("what", LEFT)
def test_what_a_callable_puts_on_tensors_is_refused(device: str, what: str) -> None:
    function, words = LEFT[what]
    net = Scaled(device)
    with pytest.raises(RuntimeError, match=words):
        make_graphed_callables(lambda x: function(net, x), (batch(device),))


def test_an_ignored_attribute_of_a_result_is_left_out(device: str) -> None:
    net = Scaled(device)
    graphed = make_graphed_callables(lambda x: mark_result(net, x), (batch(device),), ignore_attributes=("mark",))
    x = batch(device)
    y = graphed(x)
    assert torch.equal(y, x * net.weight)
    assert not hasattr(y, "mark")
    assert replays(graphed) == 1


def test_a_parameter_that_is_a_result_keeps_its_attributes(device: str) -> None:
    net = Scaled(device)
    graphed = make_graphed_callables(lambda x: (x * net.weight, net.weight), (batch(device),))
    assert graphed(batch(device))[1] is net.weight


MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "requires_grad": lambda x: torch.zeros(3, device=x.device, requires_grad=True),
    "requires_grad_": lambda x: (x * 3).detach().requires_grad_(),
    "part of an argument": lambda x: x.detach().requires_grad_(),
    "Parameter": lambda x: nn.Parameter(x.detach() * 3),
}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_leaf_that_a_callable_makes_is_refused_as_a_result(device: str, kind: str, grad_mode: bool) -> None:
    with (
        torch.set_grad_enabled(grad_mode),
        pytest.raises(RuntimeError, match=r"result 1 is a leaf .* return it detached"),
    ):
        make_graphed_callables(lambda x: (x * 2, MAKERS[kind](x)), (batch(device),))
