"""What a forward asks autograd to do with the gradients of tensors that it has not made: a replay would not do it, so
it is refused by name, and leaves no trace. Hooks on what it makes run inside the graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hazards import batch
from torch import Tensor, nn

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Asking(nn.Module):
    """Calls ``ask`` with its argument, weight and result."""

    def __init__(self, device: str, ask: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.w, self.ask = nn.Parameter(torch.ones(4, device=device)), ask

    def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        result = x * self.w
        self.ask(x, self.w, result)
        return result


def halved(grad: Tensor) -> Tensor:
    return grad * 0.5


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], object], str]] = {
    "a hook on an argument": (lambda x, w, y: x.register_hook(halved), r"register_hook\(\) of an argument"),
    "a hook on a weight": (lambda x, w, y: w.register_hook(halved), r"register_hook\(\) of w"),
    "a hook after accumulation": (
        lambda x, w, y: w.register_post_accumulate_grad_hook(lambda w: None),
        r"register_post_accumulate_grad_hook\(\) of w",
    ),
    "a gradient kept of an argument": (lambda x, w, y: x.retain_grad(), r"retain_grad\(\) of an argument"),
    "a gradient kept of a result": (lambda x, w, y: y.retain_grad(), r"retain_grad\(\) was called on result 0"),
}


@pytest.mark.parametrize(("ask", "words"), REFUSED.values(), ids=REFUSED)
def test_what_a_replay_would_leave_out_is_refused_and_leaves_no_trace(device, ask, words):
    net = Asking(device, ask)
    with pytest.raises(RuntimeError, match=words):
        make_graphed_callables(net, (batch(device),))
    assert not net.w._backward_hooks and not net.w._post_accumulate_grad_hooks
    net.ask = lambda x, w, y: None
    net.w.register_hook(halved)
    x = batch(device)
    net(x).sum().backward()
    assert_bitwise_equal(net.w.grad, x.detach().sum(0) * 0.5)


def test_hooks_on_what_the_forward_makes_run(device):
    def ask(x: Tensor, w: Tensor, y: Tensor) -> None:
        y.register_hook(halved)

    net, twin = Asking(device, ask), Asking(device, ask)
    make_graphed_callables(net, (batch(device),))
    for _ in range(2):
        x = batch(device)
        net(x).sum().backward()
        twin(x).sum().backward()
    assert net.te_graph.info()["backward_replays"] == 2
    assert_bitwise_equal(net.w.grad, twin.w.grad)
