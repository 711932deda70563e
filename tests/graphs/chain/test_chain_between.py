"""chain=True: whatever is done with the tensors between two callables of a chain is right.

The reference is eager execution of copies of the same layers on the same inputs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chain_layers import Layer, Nets, Shift, batch, in_turn, layers_on
from chains import assert_same_steps, chain, counts, eager_calls
from torch import Tensor

from te_graph import make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")


def doubled(nets: Nets, x: Tensor) -> None:
    nets[2](nets[1](nets[0](x)) * 2).square().sum().backward()


def plus_a_branch(nets: Nets, x: Tensor) -> None:
    y = nets[1](nets[0](x))
    nets[2](y + torch.sin(x)).square().sum().backward()


def used_twice(nets: Nets, x: Tensor) -> Tensor:
    y = nets[0](x)
    auxiliary = y.square().sum()
    z = nets[1](y)
    auxiliary = auxiliary + z.sin().sum() + y.sin().sum()
    (nets[2](z).square().sum() + auxiliary).backward()
    return auxiliary


def used_twice_with_a_backward_of_its_own(nets: Nets, x: Tensor) -> None:
    y = nets[0](x)
    z = nets[1](y)
    y.square().sum().backward(retain_graph=True)
    (2 * nets[2](z)).sum().backward()


def detached(nets: Nets, x: Tensor) -> Any:
    y = nets[0](x)
    cut = y.detach().requires_grad_()
    nets[2](nets[1](cut)).square().sum().backward()
    y.backward(cut.grad)
    return cut.grad


def cloned(nets: Nets, x: Tensor) -> None:
    nets[2](nets[1](nets[0](x).clone()).clone()).square().sum().backward()


def viewed(nets: Nets, x: Tensor) -> None:
    y = nets[0](x)
    nets[2](nets[1](y.view(-1).view(4, 6))[:]).square().sum().backward()


def transposed_twice(nets: Nets, x: Tensor) -> None:
    y = nets[0](x)
    y.register_hook(Tensor.contiguous)  # as a replay gets it; eager products of another layout may round otherwise
    nets[1](y.t().contiguous().t()).square().sum().backward()


def flipped(nets: Nets, x: Tensor) -> None:
    nets[1](nets[0](x).flip(0)).square().sum().backward()


def edited_before(nets: Nets, x: Tensor) -> Tensor:
    y = nets[0](x)
    y.mul_(2)
    y[0].add_(1)
    z = nets[1](y)
    nets[2](z).square().sum().backward()
    return y


def edited_without_gradient_before(nets: Nets, x: Tensor) -> None:
    y = nets[0](x)
    with torch.no_grad():
        y.add_(1)
    nets[1](y).square().sum().backward()


def filled_from_elsewhere_before(nets: Nets, x: Tensor) -> None:
    y = nets[0](x)
    y.copy_(x * 3)
    nets[1](y).square().sum().backward()


def edited_after_without_being_saved(nets: Nets, x: Tensor) -> None:
    z = nets[1](nets[0](x))
    w = nets[2](z)  # a Shift, which does not save its input
    z.mul_(3)
    (w.square().sum() + z.sum()).backward()


def hooked(nets: Nets, x: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    y = nets[0](x)
    y.register_hook(lambda grad: grad * 3)
    y.register_hook(lambda grad: seen.append(grad.clone()))
    z = nets[1](y)
    z.register_hook(lambda grad: grad.mul_(2))
    nets[2](z).square().sum().backward()
    return seen


def hooked_and_let_go(nets: Nets, x: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    for net in nets:
        x = net(x)
        x.register_hook(lambda grad: seen.append(grad.clone()))
        x.register_hook(lambda grad: grad + 1)
    x.square().sum().backward()
    return seen


def hooked_nodes(nets: Nets, x: Tensor) -> list[Tensor]:
    seen: list[Tensor] = []
    y = nets[0](x)
    y.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
    z = nets[1](y)
    z.grad_fn.register_prehook(lambda grads: seen.append(grads[0].clone()))
    del y
    nets[2](z).square().sum().backward()
    return seen


def retained(nets: Nets, x: Tensor) -> list[Tensor]:
    results = [x]
    for net in nets:
        results.append(net(results[-1]))
        results[-1].retain_grad()
    results[-1].square().sum().backward()
    return [result.grad for result in results]


def retained_and_let_go(nets: Nets, x: Tensor) -> None:
    for net in nets:
        x = net(x)
        x.retain_grad()
    x.square().sum().backward()


def gradient_kept(nets: Nets, x: Tensor) -> list[Tensor]:
    kept: list[Tensor] = []
    y = nets[0](x)
    y.register_hook(kept.append)
    z = nets[1](y)
    z.register_hook(kept.append)
    nets[2](z).square().sum().backward()
    in_turn(nets, x * 2).square().sum().backward()
    return kept


def skipped(nets: Nets, x: Tensor) -> None:
    nets[2](nets[0](x)).square().sum().backward()


def begun_late(nets: Nets, x: Tensor) -> None:
    nets[2](nets[1](x * 2)).square().sum().backward()


def ended_early(nets: Nets, x: Tensor) -> None:
    nets[1](nets[0](x)).square().sum().backward()


def reversed_order(nets: Nets, x: Tensor) -> None:
    in_turn(nets[::-1], x).square().sum().backward()


def around_in_a_circle(nets: Nets, x: Tensor) -> None:
    y = in_turn(nets[:2], x)
    (2 * y).sum().backward()
    in_turn(nets, y.detach().requires_grad_()).square().sum().backward()


def stale_result_given_again(nets: Nets, x: Tensor) -> None:
    y = nets[0](x)
    (2 * nets[1](y)).sum().backward(retain_graph=True)
    nets[1](y).square().sum().backward()


def result_of_another_forward(nets: Nets, x: Tensor) -> None:
    y = nets[0](x)
    (2 * nets[1](y)).sum().backward()
    y = y.detach().requires_grad_()
    (2 * nets[0](x * 2)).sum().backward()  # where the first result was
    nets[1](y).square().sum().backward()


def kept_and_read_late(nets: Nets, x: Tensor) -> list[Tensor]:
    kept = [x]
    for _ in range(3):
        for net in nets:
            kept.append(net(kept[-1]))
        (2 * kept[-1]).sum().backward()
        kept.append(kept[-1].detach().requires_grad_())
    return kept


def only_the_first_in_the_loss(nets: Nets, x: Tensor) -> None:
    y = nets[0](x)
    z = nets[1](y)
    y.square().sum().backward()
    assert z.requires_grad


BETWEEN: list[Callable[[Nets, Tensor], Any]] = [
    doubled,
    plus_a_branch,
    used_twice,
    used_twice_with_a_backward_of_its_own,
    detached,
    cloned,
    viewed,
    transposed_twice,
    flipped,
    edited_before,
    edited_without_gradient_before,
    filled_from_elsewhere_before,
    edited_after_without_being_saved,
    hooked,
    hooked_and_let_go,
    hooked_nodes,
    retained,
    retained_and_let_go,
    gradient_kept,
    skipped,
    begun_late,
    ended_early,
    reversed_order,
    around_in_a_circle,
    stale_result_given_again,
    result_of_another_forward,
    kept_and_read_late,
    only_the_first_in_the_loss,
]


@pytest.mark.parametrize("scenario", BETWEEN)
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.one_of(3)
def test_what_is_done_between_two_layers_is_right(device, scenario, slots):
    layers = layers_on(device, Layer, Layer, Shift)
    twins = chain(layers, batch(device), max_in_flight=slots)
    assert_same_steps(layers, twins, scenario, device)
    assert_same_steps(layers, twins, lambda nets, x: in_turn(nets, x).square().sum().backward(), device)
    assert sum(counts(layers, "forward_replays")) > sum(eager_calls(layers))
    assert counts(layers, "in_flight") == [0, 0, 0]


def test_a_forward_while_another_thread_runs_the_backward_of_the_layer_before(device: str) -> None:
    """Both use the node of the result between them, and the one may wait for the GIL that the other has."""

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            for _ in range(300):
                grad = grad + 0
            return grad * 2

    first, second, third = lambda x: x + 1, Slow.apply, lambda x: x * 3
    sample = torch.randn(256, 256, device=device, requires_grad=True)
    layers = make_graphed_callables((first, second, third), ((sample,),), chain=True)
    x = torch.randn(256, 256, device=device, requires_grad=True)
    y = layers[1](layers[0](x))
    runs = threading.Thread(target=lambda: y.sum().backward(retain_graph=True), daemon=True)
    runs.start()
    time.sleep(0.02)
    z = layers[2](y)
    runs.join(timeout=60)
    assert not runs.is_alive()
    z.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2 + 6))
