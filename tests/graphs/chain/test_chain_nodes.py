"""chain=True: neighbours whose results cannot be reached otherwise become one autograd node and one launch, unnoticed.

The reference is eager execution of copies of the same layers on the same inputs.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chain_layers import Layer, Nets, Shift, Squash, batch, forward_and_backward, in_turn, layers_on, parameters_of
from chains import assert_same, assert_same_steps, chain, counts, eager_calls, nodes_below
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from twins import gradients_of

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


@pytest.mark.parametrize("count", [2, 3, 5, 9])
def test_a_plain_loop_over_layers_makes_two_nodes_at_most_and_is_right(device, count):
    layers = layers_on(device, *[Layer] * count)
    twins = chain(layers, batch(device))
    for _ in range(3):
        result = in_turn(layers, batch(device))
        assert len(list(nodes_below(result))) == 2
        del result
        assert_same(layers, twins, forward_and_backward, batch(device))
    assert eager_calls(layers) == [0] * count
    assert counts(layers, "in_flight") == [0] * count


def untouched(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    return y, None


def kept(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    return y, y


def used_in_another_op(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    return y, y.square()


def used_in_an_op_that_is_dropped(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    y.square()
    return y, None


def view_kept(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    return y, y[0]


def viewed(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    return y.view(6, 4).view(4, 6), None


def node_held(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    return y, y.grad_fn


def node_below_held(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    return y, y.grad_fn.next_functions[0][0]


def hooked(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    y.register_hook(lambda grad: grad * 2)
    return y, None


def gradient_retained(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    y.retain_grad()
    return y, None


def hooked_before_its_node(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    y.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
    return y, None


def hooked_after_its_node(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    y.grad_fn.register_hook(lambda results, grads: None)
    return y, None


def node_made_in_between(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    x.square()
    return y, None


def node_of_x_made_in_between(y: Tensor, x: Tensor) -> tuple[Tensor, Any]:
    return y, x.square()


# What is done with the second of five results, and how many nodes there are then.
APART = [
    (untouched, 2),
    (kept, 3),
    (used_in_another_op, 3),
    (used_in_an_op_that_is_dropped, 3),
    (view_kept, 3),
    (viewed, 4),
    (node_held, 3),
    (node_below_held, 3),
    (hooked, 3),
    (gradient_retained, 3),
    (hooked_before_its_node, 3),
    (hooked_after_its_node, 3),
    (node_made_in_between, 3),
    (node_of_x_made_in_between, 3),
]


@pytest.mark.parametrize(("touch", "nodes"), APART)
def test_a_node_that_can_be_told_apart_stays_one_of_its_own(device, touch, nodes):
    layers = layers_on(device, *[Layer] * 5)
    twins = chain(layers, batch(device))

    def forward(nets: Nets, x: Tensor) -> tuple[Tensor, Any]:
        y, held = x, None
        for number, net in enumerate(nets):
            y = net(y)
            if number == 1:
                y, held = touch(y, x)
        return y, held

    def scenario(nets: Nets, x: Tensor) -> Tensor:
        y, held = forward(nets, x)
        loss = y.square().sum() + (held.sin().sum() if isinstance(held, Tensor) else 0)
        loss.backward()
        return loss

    result, held = forward(layers, batch(device))
    assert len(list(nodes_below(result))) >= nodes  # a torch that lets Python own nodes keeps one more apart
    del result, held
    for _ in range(2):
        assert_same_steps(layers, twins, scenario, device)
        assert_same_steps(layers, twins, forward_and_backward, device)
    assert eager_calls(layers) == [0] * 5
    assert counts(layers, "in_flight") == [0] * 5


def test_forwards_through_different_slots_stay_apart(device):
    layers = layers_on(device)
    twins = chain(layers, batch(device), max_in_flight=2)

    def side_by_side(nets: Nets, x: Tensor) -> list[Tensor]:
        results = [x, x * 2]
        for net in nets:
            results = [net(y) for y in results]
        return results

    def scenario(nets: Nets, x: Tensor) -> None:
        one, other = side_by_side(nets, x)
        (one * other).sum().backward()

    assert [len(list(nodes_below(result))) for result in side_by_side(layers, batch(device))] == [3, 3]
    for _ in range(3):
        assert_same_steps(layers, twins, scenario, device, micro_batches=1)
    assert eager_calls(layers) == [0, 0, 0]


def steps_alternate(nets: Nets, x: Tensor) -> None:
    for end in (4, 2, 4, 3, 4, 4):
        in_turn(nets[:end], x).square().sum().backward()


@pytest.mark.parametrize("slots", [1, 3])
def test_chains_of_changing_length_are_right(device, slots):
    layers = layers_on(device, Layer, Squash, Shift, Layer)
    twins = chain(layers, batch(device), max_in_flight=slots)
    for _ in range(2):
        assert_same_steps(layers, twins, steps_alternate, device)
    assert eager_calls(layers) == [0] * 4


@pytest.mark.parametrize("slots", [1, 2])
def test_dropout_draws_what_eager_execution_draws_in_every_step(device, slots):
    layers = [Layer(dropout=0.5).to(device) for _ in range(4)]
    twins = chain(layers, batch(device), max_in_flight=slots)

    def scenario(nets: Nets, x: Tensor) -> list[Tensor]:
        results = [in_turn(nets, x * (1 + number)) for number in range(slots)]
        for result in results:
            result.square().sum().backward()
        return [*results, torch.rand(3, device=device)]

    for _ in range(4):
        assert_same(layers, twins, scenario, batch(device))
    assert eager_calls(layers) == [0] * 4


class Rerun(nn.Module):
    """Draws random numbers in its backward as well: [n, 6] -> [n, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def _inner(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 6]
        return nn.functional.dropout(torch.tanh(self.linear(x)), 0.5)

    def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 6]
        return torch.utils.checkpoint.checkpoint(self._inner, x, use_reentrant=False, preserve_rng_state=False)


def test_layers_that_draw_in_their_backward_draw_what_eager_execution_draws_in_every_step(device):
    """Both draw anew when the forward is computed again."""
    layers = layers_on(device, Layer, Rerun, Rerun, Layer)
    twins = chain(layers, batch(device))

    def scenario(nets: Nets, x: Tensor) -> Tensor:
        forward_and_backward(nets, x)
        return torch.rand(3, device=device)

    for _ in range(4):
        assert_same(layers, twins, scenario, batch(device))
    assert eager_calls(layers) == [0] * 4


class Fork(nn.Module):
    """Two results, of which the next layer may use one: [n, 6] or a pair of them -> ([n, 6], [n, 6])."""

    def __init__(self, uses: int = 0) -> None:
        super().__init__()
        self.left, self.right, self.uses = nn.Linear(6, 6), nn.Linear(6, 6), uses

    def forward(self, x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = x if isinstance(x, Tensor) else x[self.uses]
        return self.left(x), torch.tanh(self.right(x))


@pytest.mark.parametrize("uses", [0, 1])
@pytest.mark.parametrize("in_loss", [(0,), (1,), (0, 1)])
def test_results_that_get_no_gradient_leave_their_parameters_without_one(device, uses, in_loss):
    layers = [Fork(uses).to(device) for _ in range(4)]
    twins = chain(layers, batch(device), allow_unused_input=True)

    def scenario(nets: Nets, x: Tensor) -> None:
        pair = x
        for net in nets:
            pair = net(pair)
        sum(pair[i].square().sum() for i in in_loss).backward()

    for _ in range(2):
        for net in (*layers, *twins):
            net.zero_grad()
        for _ in range(4):
            assert_same(layers, twins, scenario, batch(device))
    assert eager_calls(layers) == [0] * 4
    assert any(parameter.grad is None for parameter in parameters_of(layers))


def test_nothing_reads_memory_that_is_dead_after_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder fills such memory with NaN, as a CUDA graph would have given it to others."""
    monkeypatch.setitem(os.environ, "TE_GRAPH_POISON", "1")
    layers = layers_on("cpu", Layer, Squash, Shift, Layer)
    twins = chain(layers, batch("cpu"), max_in_flight=2)
    layers[1].linear.weight.register_hook(lambda grad: grad * 2)
    twins[1].linear.weight.register_hook(lambda grad: grad * 2)

    def scenario(nets: Nets, x: Tensor) -> list[Tensor]:
        results = [in_turn(nets, x), in_turn(nets, x * 2)]
        for result in results:
            result.square().sum().backward()
        return results

    for _ in range(2):
        assert_same_steps(layers, twins, scenario, "cpu")


def test_an_error_in_one_of_several_layers_leaves_all_gradients_as_they_were_and_the_chain_usable(device):
    layers = layers_on(device, *[Layer] * 4)
    twins = chain(layers, batch(device))
    for _ in range(2):
        assert_same(layers, twins, forward_and_backward, batch(device))
    before = gradients_of(parameters_of(layers)[: -len(list(layers[-1].parameters()))])
    loss = in_turn(layers, batch(device)).square().sum()
    with torch.no_grad():
        layers[1].down.weight.mul_(1)
    with pytest.raises(RuntimeError, match=r"callable 1 \(Layer\): weight of down is needed for backward and has been"):
        loss.backward()
    assert_bitwise_equal(gradients_of(parameters_of(layers)[: len(before)]), before)
    del loss
    for net in (*layers, *twins):
        net.zero_grad()
    for _ in range(2):
        assert_same_steps(layers, twins, forward_and_backward, device)
    assert counts(layers, "in_flight") == [0] * 4


def test_a_long_chain_is_let_go_of_without_the_garbage_collector_and_frees_its_slots(device):
    layers = layers_on(device, *[Shift] * 40)
    chain(layers, batch(device))
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            result = in_turn(layers, batch(device))
            assert counts(layers, "in_flight") == [1] * 40
            del result
            assert counts(layers, "in_flight") == [0] * 40
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_backwards_that_came_together_before_are_two_launches(dropout):
    layers = [Layer(dropout).cuda() for _ in range(5)]
    make_graphed_callables(tuple(layers), (batch("cuda"),), chain=True)

    def launches(work: Callable[[], Any]) -> int:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            work()
            torch.cuda.synchronize()
        return sum(event.name.startswith("cudaGraphLaunch") for event in profiler.events())

    seen = []
    for _ in range(5):
        loss = in_turn(layers, batch("cuda")).square().sum()
        seen.append(launches(loss.backward))
    assert seen[-2:] == [2, 2], seen
