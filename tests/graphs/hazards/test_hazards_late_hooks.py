"""Hooks put on a parameter after the forward, where several of its gradients meet in one backward.

Eager execution runs them once, on the sum, which no single replay knows: refused by name. With one gradient they run as
in eager execution.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from twins import eager_copy

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

REFUSED = "Linear: a hook was put on weight since the forward, and several gradients of it meet in this backward"


def normalised(weight: Tensor, seen: list[Tensor]) -> None:  # weight [4, 4]; a hook that is not linear
    weight.register_hook(lambda grad: seen.append(grad.clone()) or grad / grad.norm())


def noted(weight: Tensor, seen: list[Tensor]) -> None:  # weight [4, 4]
    weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))


KINDS = [normalised, noted]

# Each makes the losses of one backward, all of which use the weight.
SEVERAL: dict[str, Callable[[nn.Module, Tensor], list[Tensor]]] = {
    "calls": lambda net, x: [net(x).sum(), net(2 * x).square().sum()],
    "three calls": lambda net, x: [net(x).sum(), net(2 * x).square().sum(), net(x.sin()).sum()],
    "one after the other": lambda net, x: [net(net(x)).square().sum()],
    "a use outside": lambda net, x: [net(x).square().sum(), (x @ net.weight.t()).sum()],
    "the weight itself": lambda net, x: [net(x).square().sum(), net.weight.square().sum()],
}


def nets(device: str) -> tuple[nn.Module, nn.Module]:
    model = nn.Linear(4, 4).to(device)
    twin = eager_copy(model)
    x = torch.randn(3, 4, device=device, requires_grad=True)
    return make_graphed_callables(model, (x,), max_in_flight=3), twin


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("losses", SEVERAL.values(), ids=SEVERAL)
def test_a_hook_after_the_forward_is_refused_where_several_gradients_meet(device, losses, kind) -> None:
    model, twin = nets(device)
    x = torch.randn(3, 4, device=device, requires_grad=True)
    expected = []
    total = sum(losses(twin, x))
    kind(twin.weight, expected)
    total.backward()
    assert len(expected) == 1
    total = sum(losses(model, x))
    seen = []
    kind(model.weight, seen)
    with pytest.raises(RuntimeError, match=REFUSED):
        total.backward()
    assert len(seen) <= 1  # the gradient of a use outside, where autograd came to it before the replay


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("losses", SEVERAL.values(), ids=SEVERAL)
def test_a_hook_before_the_forward_sees_the_sum_of_several_gradients(device, losses, kind) -> None:
    model, twin = nets(device)
    seen = [[], []]
    for net, noted_by in zip((model, twin), seen, strict=True):
        kind(net.weight, noted_by)
    for _ in range(2):
        x = torch.randn(3, 4, device=device)
        for net in (model, twin):
            sum(losses(net, x.clone().requires_grad_())).backward()
    assert [len(noted_by) for noted_by in seen] == [2, 2]
    torch.testing.assert_close(*seen)  # the order of two gradients may differ
    torch.testing.assert_close(model.weight.grad, twin.weight.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_after_the_forward_run_where_the_other_gradients_belong_to_other_backwards(device, kind) -> None:
    model, twin = nets(device)
    x = torch.randn(3, 4, device=device, requires_grad=True)

    def step(net: nn.Module) -> list[Tensor]:
        losses = [net(x).square().sum(), net(2 * x).sum()]
        seen = []
        kind(net.weight, seen)
        for loss in losses:
            loss.backward()
        return [*seen, net.weight.grad, net.bias.grad]

    assert_bitwise_equal(step(model), step(twin))
