"""chain=True: calls and backwards of all kinds are right, or refused with advice, or eager and told.

The reference is eager execution of copies of the same layers on the same inputs.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chain_layers import Layer, Nets, Shift, Squash, batch, in_turn, layers_on
from chains import assert_same, assert_same_steps, chain, counts, eager_calls
from torch import Tensor

from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def errors_of(scenario: Callable[[Nets, Tensor], Any], layers: Nets, twins: Nets, device: str) -> list[str]:
    """The messages of the RuntimeErrors that ``scenario`` raises on both, which are usable afterwards."""
    messages = []
    for nets in (layers, twins):
        with pytest.raises(RuntimeError) as caught:
            scenario(nets, batch(device))
        messages.append(str(caught.value))
        for net in nets:
            net.zero_grad()
    assert_same_steps(layers, twins, lambda nets, x: (2 * in_turn(nets, x)).sum().backward(), device)
    return messages


def test_editing_a_result_that_the_next_layer_saved_raises_by_name_as_in_eager_execution(device):
    layers = layers_on(device, Shift, Layer, Shift)
    twins = chain(layers, batch(device))

    def edited_after(nets: Nets, x: Tensor) -> None:
        y = nets[0](x)
        z = nets[1](y)
        y.mul_(2)
        (2 * nets[2](z)).sum().backward()

    ours, eager = errors_of(edited_after, layers, twins, device)
    assert ours.startswith("callable 1 (Layer): args[0] is needed for backward and has been modified")
    assert "modified by an inplace operation" in eager


def test_editing_a_result_that_its_own_layer_saved_raises_as_in_eager_execution(device):
    layers = layers_on(device, Squash, Shift)
    twins = chain(layers, batch(device))

    def edited_before_the_next(nets: Nets, x: Tensor) -> None:
        y = nets[0](x)
        y.mul_(2)
        (2 * nets[1](y)).sum().backward()

    ours, eager = errors_of(edited_before_the_next, layers, twins, device)
    assert ours.startswith("callable 0 (Squash): output 0 is needed for backward and has been modified")
    assert "modified by an inplace operation" in eager


def test_a_second_backward_through_a_layer_whose_backward_has_run_raises_as_in_eager_execution(device):
    layers = layers_on(device, Layer, Layer)
    twins = chain(layers, batch(device))

    def backward_twice(nets: Nets, x: Tensor) -> None:
        y = nets[0](x)
        y.square().sum().backward()
        (2 * nets[1](y)).sum().backward()

    ours, eager = errors_of(backward_twice, layers, twins, device)
    assert "callable 0 (Layer)" in ours
    assert "second time" in ours
    assert "second time" in eager


def test_a_detached_result_where_gradients_are_expected_is_refused_by_name(device):
    layers = layers_on(device)
    chain(layers, batch(device))
    with pytest.raises(ValueError, match=r"callable 1 \(Layer\): expected args\[0\] with requires_grad=True, got"):
        layers[1](layers[0](batch(device)).detach())


def twice_on_one_result(nets: Nets, x: Tensor) -> None:
    y = nets[0](x)
    (nets[1](y) * nets[1](y)).sum().backward()


def twice_on_clones(nets: Nets, x: Tensor) -> None:
    y = nets[0](x)
    (nets[1](y) * nets[1](y.clone())).sum().backward()


# Of two calls before one backward the gradients are added one after the other: equal to eager where nothing was before.
def test_a_second_call_on_a_clone_of_the_result_runs_eagerly(device):
    layers = layers_on(device)
    twins = chain(layers, batch(device))
    assert_same_steps(layers, twins, twice_on_clones, device, micro_batches=1)
    assert eager_calls(layers) == [0, 2, 0]


@pytest.mark.parametrize("slots", [1, 2])
def test_a_second_call_on_one_result_is_refused_with_advice_or_eager_as_on_exhausted_says(device, slots):
    layers = layers_on(device)
    chain(layers, batch(device), max_in_flight=slots)
    words = r"callable 1 \(Layer\): called a second time on one result of its predecessor .*clone"
    with pytest.raises(RuntimeError, match=words):
        twice_on_one_result(layers, batch(device))
    layers = layers_on(device)
    twins = chain(layers, batch(device), max_in_flight=slots, on_exhausted="eager")
    assert_same_steps(layers, twins, twice_on_one_result, device, micro_batches=1)
    assert eager_calls(layers) == [0, 2, 0]


def test_an_input_from_elsewhere_runs_eagerly_and_is_told_once_and_counted(device, caplog):
    layers = layers_on(device)
    twins = chain(layers, batch(device))
    with caplog.at_level(logging.INFO, logger="te_graph"):
        for _ in range(3):
            assert_same(layers, twins, lambda nets, x: (2 * nets[1](x)).sum().backward(), batch(device))
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("te_graph", logging.WARNING)
    assert record.getMessage().startswith("callable 1 (Layer): its input is not the result of its predecessor")
    ((reason, count),) = layers[1].te_graph.info()["eager_calls"].items()
    assert reason.startswith("its input is not the result of its predecessor")
    assert count == 3
    assert counts(layers, "forward_replays") == [0, 0, 0]


def test_without_gradients_a_chain_for_training_runs_eagerly_and_leaves_waiting_forwards_alone(device):
    layers = layers_on(device)
    twins = chain(layers, batch(device))

    def scenario(nets: Nets, x: Tensor) -> Tensor:
        y = in_turn(nets[:2], x)
        with torch.no_grad():
            looked_at = in_turn(nets, x * 3)
        nets[2](y).square().sum().backward()
        return looked_at

    assert_same_steps(layers, twins, scenario, device)
    assert eager_calls(layers) == [4, 4, 4]


@pytest.mark.parametrize("slots", [1, 2])
def test_a_chain_captured_without_gradients_replays_there(device, slots):
    layers = layers_on(device)
    with torch.no_grad():
        twins = chain(layers, batch(device, requires_grad=False), max_in_flight=slots)
        kept = []
        for _ in range(3):
            x = batch(device, requires_grad=False)
            kept.append((in_turn(layers, x), in_turn(twins, x)))
        for ours, eager in kept:
            assert_bitwise_equal(ours, eager)
    assert counts(layers, "forward_replays") == [3, 3, 3]


def all_retained(nets: Nets, x: Tensor) -> None:
    loss = in_turn(nets, x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def intermediates_retained(nets: Nets, x: Tensor) -> None:
    y = nets[0](x)
    loss = in_turn(nets[1:], y).square().sum()
    loss.backward(retain_graph=True)
    (2 * y).sum().backward(retain_graph=True)
    loss.backward()


def gradient_of_the_input(nets: Nets, x: Tensor) -> Any:
    return torch.autograd.grad(in_turn(nets, x).square().sum(), x)


def gradient_of_an_intermediate(nets: Nets, x: Tensor) -> Any:
    y = nets[0](x)
    z = nets[1](y)
    return torch.autograd.grad(nets[2](z).square().sum(), [y, z])


def gradient_of_an_intermediate_then_the_rest(nets: Nets, x: Tensor) -> Any:
    y = nets[0](x)
    (grad,) = torch.autograd.grad(in_turn(nets[1:], y).square().sum(), y)
    y.backward(grad)
    return grad


def backward_to_the_input(nets: Nets, x: Tensor) -> None:
    in_turn(nets, x).square().sum().backward(inputs=[x])


def backward_to_an_intermediate(nets: Nets, x: Tensor) -> Any:
    y = nets[0](x)
    in_turn(nets[1:], y).square().sum().backward(inputs=[y])
    return y.grad


@pytest.mark.parametrize(
    "scenario",
    [
        all_retained,
        intermediates_retained,
        gradient_of_the_input,
        gradient_of_an_intermediate,
        gradient_of_an_intermediate_then_the_rest,
        backward_to_the_input,
        backward_to_an_intermediate,
    ],
)
def test_backwards_of_all_kinds_are_right_and_free_the_slots(device, scenario):
    layers = layers_on(device, Layer, Squash, Layer)
    twins = chain(layers, batch(device))
    assert_same_steps(layers, twins, scenario, device)
    assert eager_calls(layers) == [0, 0, 0]
    assert counts(layers, "in_flight") == [0, 0, 0]


def test_the_last_references_free_a_chain_without_the_garbage_collector(device):
    gc.collect()
    gc.disable()
    try:
        layers = layers_on(device)
        chain(layers, batch(device), max_in_flight=2)
        for _ in range(3):
            result = in_turn(layers, batch(device))
            (2 * result).sum().backward()
        watched = [weakref.ref(one) for layer in layers for one in (layer, layer.te_graph, layer.up.weight)]
        expected = result.detach().clone()
        del layers
        assert [reference() for reference in watched] == [None] * 9
        assert_bitwise_equal(result.detach(), expected)
    finally:
        gc.enable()


def test_batches_without_elements_in_flight_each_have_a_slot(device):
    """They lie nowhere, so that their address tells no slot."""
    layers = layers_on(device, Shift, Shift, Shift)
    twins = chain(layers, batch(device)[:0].detach().requires_grad_(), max_in_flight=2)

    def two_in_flight(nets: Nets, _: Tensor) -> list[Tensor]:
        leaves = [batch(device)[:0].detach().requires_grad_() for _ in range(2)]
        results = [in_turn(nets, x) for x in leaves]
        for result in results:
            result.sum().backward()
        return [x.grad for x in leaves]

    assert_same_steps(layers, twins, two_in_flight, device)
    assert eager_calls(layers) == [0, 0, 0]
