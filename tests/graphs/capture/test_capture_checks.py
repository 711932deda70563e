"""What a forward does that a replay could not do is refused at capture, by name, and leaves no trace."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from calls import replays
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import eager_copy, run, snapshot

from te_graph import make_graphed_callables
from te_graph.common import capture_lock
from te_graph.testing import assert_bitwise_equal


def batch(device: str, requires_grad: bool = True) -> Tensor:  # [3, 4]
    return torch.randn(3, 4, device=device, requires_grad=requires_grad)


class Before(nn.Module):
    """Does something before its forward: [3, 4] -> [3, 4]."""

    def __init__(self, device: str, action: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.action = nn.Linear(4, 4, device=device), action

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        self.action(self, x)
        return self.layer(x)


def drop_grad(module: nn.Module, x: Tensor) -> None:
    module.layer.weight.grad = None


def delete_grad(module: nn.Module, x: Tensor) -> None:
    del module.layer.weight.grad


def drop_grad_of_argument(module: nn.Module, x: Tensor) -> None:
    x.grad = None


GRADS: dict[str, tuple[Callable[[nn.Module, Tensor], Any], str]] = {
    "zero_grad": (lambda module, x: module.zero_grad(), "weight of layer"),
    "zero_grad in place": (lambda module, x: module.zero_grad(set_to_none=False), "weight of layer"),
    "set to None": (drop_grad, "weight of layer"),
    "deleted": (delete_grad, "weight of layer"),
    "zeroed": (lambda module, x: module.layer.weight.grad.zero_(), "weight of layer"),
    "read": (lambda module, x: module.layer.bias.grad, "bias of layer"),
    "set of an argument": (drop_grad_of_argument, "an argument"),
}


@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize("case", GRADS)
def test_gradients_that_a_forward_uses_are_refused(device, case, has_grad):
    action, name = GRADS[case]
    module = Before(device, action)
    if has_grad:
        run(module.layer, batch(device))
    sample, before = batch(device), snapshot(module)
    with pytest.raises(RuntimeError, match=rf"Before: the forward uses \.grad of {name}"):
        make_graphed_callables(module, (sample,))
    assert_bitwise_equal(snapshot(module), before)


def test_zero_grad_of_an_optimizer_in_a_forward_is_refused(device):
    module = Before(device, lambda module, x: optimizer.zero_grad())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"Before: the forward uses \.grad of"):
        make_graphed_callables(module, (batch(device),))


def test_the_gradient_of_what_a_forward_made_may_be_read(device):
    module = Before(device, lambda module, x: torch.zeros(2, device=device, requires_grad=True).grad)
    twin = eager_copy(module)
    make_graphed_callables(module, (batch(device),))
    x = batch(device)
    assert_bitwise_equal(run(module, x), run(twin, x))
    assert replays(module) == 1


FORMS: dict[str, tuple[Callable[[nn.Module, Tensor], Any], str]] = {
    "unsqueeze_": (lambda module, x: x.unsqueeze_(0), "shape"),
    "transpose_": (lambda module, x: x.t_(), "shape"),
    "transpose_ of a square": (lambda module, x: x.t_(), "strides"),
    "requires_grad_": (lambda module, x: x.requires_grad_(), "requires_grad"),
}


@pytest.mark.parametrize("case", FORMS)
def test_another_form_given_to_an_argument_is_refused(device, case):
    action, what = FORMS[case]
    sample = torch.randn(4, 4, device=device) if "square" in case else batch(device, False)

    def call(x: Tensor) -> Tensor:  # [n, 4] -> []
        action(module, x)
        return x.sum()

    module = nn.Identity()
    with pytest.raises(RuntimeError, match=rf"call: changes the {what} of args\[0\] in place"):
        make_graphed_callables(call, (sample,))


def test_an_argument_detached_in_place_is_refused(device):
    with pytest.raises(RuntimeError, match=r"changes the requires_grad of args\[0\] in place"):
        make_graphed_callables(lambda x: x.detach_() * 2, (batch(device),))


def test_an_attribute_put_on_a_sample_is_refused_if_the_code_names_it(device):
    sample, other = batch(device), batch(device)
    sample.tag, other.note = 3, 3
    with pytest.raises(RuntimeError, match=r"sample args\[0\] has an attribute 'tag', which the callable may read"):
        make_graphed_callables(lambda x: x * getattr(x, "tag", 1), (sample,))
    graphed = make_graphed_callables(lambda x: x * getattr(x, "tag", 1), (other,))
    assert torch.equal(graphed(other), other)


def test_the_form_of_what_a_forward_made_may_change(device):
    def call(x: Tensor) -> Tensor:  # [3, 4] -> [4, 1, 3]
        return (x * 2).t_().unsqueeze_(1)

    graphed, x = make_graphed_callables(call, (batch(device),)), batch(device)
    assert_bitwise_equal(run(graphed, x), run(call, x))
    assert replays(graphed) == 1


def test_a_view_without_history_of_something_with_a_gradient_is_refused_as_a_result(device):
    layer = nn.Linear(4, 4, device=device)

    def call(x: Tensor) -> tuple[Tensor, Tensor]:  # [3, 4] -> [3, 4], [4]
        with torch.no_grad():
            row = layer.weight[0]
        return layer(x), row

    with pytest.raises(
        RuntimeError, match=r"call: result 1 is a view, made under torch.no_grad\(\).*return it detached"
    ):
        make_graphed_callables(call, (batch(device),))
    graphed = make_graphed_callables(lambda x: (layer(x), layer.weight[0].detach()), (batch(device),))
    assert torch.equal(graphed(batch(device))[1], layer.weight[0])


def test_reentrant_checkpointing_is_refused_by_name(device):
    layer = nn.Linear(4, 4, device=device)
    with pytest.raises(RuntimeError, match=r"reentrant activation checkpointing .*use_reentrant=False"):
        make_graphed_callables(lambda x: checkpoint(layer, x, use_reentrant=True), (batch(device),))


def test_a_capture_that_waits_in_vain_for_another_one_says_so(device, monkeypatch):
    monkeypatch.setattr(capture_lock, "_TIMEOUT", 0.2)
    has_begun, may_go_on = threading.Event(), threading.Event()

    def waits(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        has_begun.set()
        assert may_go_on.wait(60)
        return x * 2

    made = []
    other = threading.Thread(target=lambda: made.append(make_graphed_callables(waits, (batch(device),))))
    other.start()
    try:
        assert has_begun.wait(60)
        with pytest.raises(RuntimeError, match=r"another thread has been capturing for .* release the lock"):
            make_graphed_callables(nn.Linear(4, 4, device=device), (batch(device),))
    finally:
        may_go_on.set()
        other.join()
    graphed, x = make_graphed_callables(nn.Linear(4, 4, device=device), (batch(device),)), batch(device)
    graphed(x)
    assert replays(graphed) == 1
    assert torch.equal(made[0](x), x * 2)
