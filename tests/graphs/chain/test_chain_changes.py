"""chain=True: layers that are reset, captured again or moved, other shapes, and what a chain cannot be made of.

The reference is eager execution of copies of the same layers, changed in the same way, on the same inputs.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chain_layers import Layer, Nets, Shift, Squash, batch, in_turn, layers_on
from chains import assert_same, assert_same_steps, chain, counts, eager_calls
from torch import Tensor, nn
from twins import snapshot

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def forward_and_backward(nets: Nets, x: Tensor) -> Tensor:
    result = in_turn(nets, x)
    result.square().sum().backward()
    return result


@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_a_layer_that_is_reset_leaves_the_layers_after_it_eager_and_those_before_it_graphed(device, position, caplog):
    layers = layers_on(device, Layer, Squash, Layer, Shift)
    twins = chain(layers, batch(device))
    assert_same_steps(layers, twins, forward_and_backward, device)
    layers[position].te_graph.reset()
    with caplog.at_level(logging.WARNING, logger="te_graph"):
        assert_same_steps(layers, twins, forward_and_backward, device)
    rest = [layer for layer in layers if hasattr(layer, "te_graph")]
    # Behind a layer that runs eagerly no input is in its place.
    assert counts(rest, "forward_replays") == [8] * position + [4] * (3 - position)
    assert eager_calls(rest) == [0] * position + [4] * (3 - position)
    assert len(caplog.records) == 3 - position
    new = tuple(layers[position:])
    for layer in new[1:]:
        layer.te_graph.reset()
    make_graphed_callables(new, (batch(device),), chain=True)
    assert_same_steps(layers, twins, forward_and_backward, device)
    assert eager_calls(new) == [0] * len(new)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_layer_that_is_reset_between_forward_and_backward_runs_the_backward_that_is_due(device, position):
    layers = layers_on(device)
    twins = chain(layers, batch(device))

    def scenario(nets: Nets, x: Tensor) -> Tensor:
        result = in_turn(nets, x)
        if hasattr(nets[position], "te_graph"):
            nets[position].te_graph.reset()
        result.square().sum().backward()
        return result

    for _ in range(3):
        assert_same(layers, twins, scenario, batch(device))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_layer_that_is_reset_between_two_calls_of_one_forward_leaves_a_right_backward(device, position):
    layers = layers_on(device)
    twins = chain(layers, batch(device))

    def scenario(nets: Nets, x: Tensor) -> Tensor:
        x = in_turn(nets[: position + 1], x)
        if hasattr(nets[position], "te_graph"):
            nets[position].te_graph.reset()
        x = in_turn(nets[position + 1 :], x)
        x.square().sum().backward()
        return x

    for _ in range(3):
        assert_same(layers, twins, scenario, batch(device))


def test_a_layer_in_eval_mode_runs_eagerly_and_so_do_those_after_it(device):
    layers = [Layer(dropout=0.5).to(device) for _ in range(3)]
    twins = chain(layers, batch(device))
    for nets in (layers, twins):
        nets[1].eval()
    assert_same_steps(layers, twins, forward_and_backward, device)
    assert eager_calls(layers) == [0, 4, 4]
    for nets in (layers, twins):
        nets[1].train()
    assert_same_steps(layers, twins, forward_and_backward, device)
    assert eager_calls(layers) == [0, 4, 4]


def test_a_smaller_last_batch_is_captured_beside_and_the_full_one_replays_in_place_again(device):
    layers = layers_on(device, Layer, Squash, Layer)
    twins = chain(layers, batch(device), on_mismatch="capture", max_in_flight=2)
    for rows in (4, 3, 4, 3, 4):
        for net in (*layers, *twins):
            net.zero_grad()
        for _ in range(2):
            assert_same(layers, twins, forward_and_backward, batch(device, rows))
    assert counts(layers, "signatures") == [2, 2, 2]
    assert counts(layers, "recaptures") == [1, 1, 1]
    assert counts(layers, "forward_replays") == counts(layers, "backward_replays") == [10, 10, 10]
    assert eager_calls(layers) == [0, 0, 0]


@pytest.mark.parametrize("on_mismatch", ["eager", "capture"])
def test_batches_of_several_sizes_may_wait_for_their_backward_together(device, on_mismatch):
    layers = layers_on(device)
    twins = chain(layers, batch(device), on_mismatch=on_mismatch, max_in_flight=2)

    def scenario(nets: Nets, x: Tensor) -> None:
        results = [in_turn(nets, part) for part in (x, x[:3], x * 2, x[:3] * 2)]
        for number in (2, 0, 3, 1):
            results[number].square().sum().backward()

    for _ in range(3):
        assert_same_steps(layers, twins, scenario, device, micro_batches=1)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_after_a_moved_parameter_its_layer_and_those_that_read_its_results_are_captured_again(device, position, caplog):
    layers = layers_on(device)
    twins = chain(layers, batch(device), on_mismatch="capture")
    assert_same_steps(layers, twins, forward_and_backward, device)
    for nets in (layers, twins):
        nets[position].up.weight.data = nets[position].up.weight.data * 2
    with caplog.at_level(logging.INFO, logger="te_graph"):
        assert_same_steps(layers, twins, forward_and_backward, device)
    assert counts(layers, "recaptures") == [0] * position + [1] * (3 - position)
    assert counts(layers, "signatures") == [1, 1, 1]
    assert counts(layers, "forward_replays") == counts(layers, "backward_replays") == [8, 8, 8]
    assert eager_calls(layers) == [0, 0, 0]
    again = [record.getMessage() for record in caplog.records if "captured again" in record.getMessage()]
    assert len(again) == 3 - position
    assert "weight of up moved" in again[0]


def test_a_layer_whose_predecessor_was_reset_is_captured_again_alone(device):
    layers = layers_on(device)
    twins = chain(layers, batch(device), on_mismatch="capture")
    layers[0].te_graph.reset()
    for _ in range(2):
        assert_same_steps(layers, twins, forward_and_backward, device)
    assert counts(layers[1:], "recaptures") == [1, 1]
    assert eager_calls(layers[1:]) == [0, 0]


@pytest.mark.parametrize("position", [0, 1])
def test_layers_whose_predecessor_replays_another_capture_are_captured_again(device, position):
    layers = layers_on(device)
    twins = chain(layers, batch(device).requires_grad_(False), on_mismatch="capture", max_in_flight=2)
    for needs_grad in (False, True, False, True):
        for nets in (layers, twins):
            nets[position].drop.p = 0.5 if position and needs_grad else 0.0

        def scenario(nets: Nets, x: Tensor, needs_grad: bool = needs_grad) -> None:
            for part in (x, 2 * x):
                forward_and_backward(nets, part.detach().requires_grad_(needs_grad and not position))

        assert_same_steps(layers, twins, scenario, device, micro_batches=1)
    assert counts(layers[position:], "recaptures")[1:] == [1] * (2 - position)
    assert eager_calls(layers) == [0, 0, 0]


def test_layers_whose_predecessor_cannot_be_captured_again_are_captured_alone(device):
    layers = layers_on(device)
    twins = chain(layers, batch(device), on_mismatch="capture")
    for nets in (layers, twins):
        nets[0].down.register_forward_hook(lambda module, args, result: 2 * result)
    for _ in range(2):
        assert_same_steps(layers, twins, forward_and_backward, device)
    assert counts(layers, "recaptures") == [0, 1, 1]
    assert eager_calls(layers) == [8, 0, 0]


def test_an_input_from_elsewhere_is_no_reason_to_capture_again_while_the_predecessor_is_there(device):
    layers = layers_on(device)
    twins = chain(layers, batch(device), on_mismatch="capture")
    for _ in range(2):
        assert_same_steps(layers, twins, lambda nets, x: forward_and_backward(nets[1:], x), device)
    assert counts(layers, "recaptures") == [0, 0, 0]
    assert eager_calls(layers) == [0, 8, 8]


def test_a_moved_parameter_is_refused_by_name_and_the_forwards_before_it_free_their_slots(device):
    layers = layers_on(device)
    twins = chain(layers, batch(device))
    for nets in (layers, twins):
        nets[1].up.weight.data = nets[1].up.weight.data * 2
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"callable 1 \(Layer\): weight of up moved to other memory"):
            in_turn(layers, batch(device))
        assert counts(layers, "in_flight") == [0, 0, 0]
    for layer in layers:
        layer.te_graph.reset()
    make_graphed_callables(tuple(layers), (batch(device),), chain=True)
    assert_same_steps(layers, twins, forward_and_backward, device)


def test_copies_of_a_chain_are_eager(device):
    layers = nn.Sequential(*layers_on(device))
    chain(layers, batch(device))
    other = copy.deepcopy(layers)
    assert not any(hasattr(layer, "te_graph") for layer in other)
    assert_same_steps(layers, other, forward_and_backward, device)


def shaped(*shape: int, **facts: Any) -> Callable[[str], Any]:
    return lambda device: torch.randn(*shape, device=device, **facts)


WRONG_SAMPLES = [
    (shaped(3, 6, requires_grad=True), r"args\[0\] with shape torch.Size\(\[4, 6\]\), .*, got torch.Size\(\[3, 6\]\)"),
    (shaped(4, 6, dtype=torch.float64, requires_grad=True), r"args\[0\] with dtype torch.float32, .*float64"),
    (shaped(4, 6), r"args\[0\] with requires_grad True, .*, got False"),
    (lambda device: 3, "a tensor as first argument"),
]


@pytest.mark.parametrize(("make", "words"), WRONG_SAMPLES)
@pytest.mark.parametrize("position", [1, 2])
def test_a_sample_unlike_the_result_that_feeds_it_is_refused_by_name_without_a_trace(device, make, words, position):
    layers = layers_on(device, Layer, Layer, Shift)
    samples = [(batch(device),) for _ in layers]
    samples[position] = (make(device),)
    before = snapshot(*layers)
    with pytest.raises(ValueError, match=rf"callable {position} \(\w+\): expected .*{words}"):
        make_graphed_callables(tuple(layers), tuple(samples), chain=True)
    assert_bitwise_equal(snapshot(*layers), before)
    twins = chain(layers, batch(device))
    assert_same_steps(layers, twins, forward_and_backward, device)


@pytest.mark.parametrize("result", [3, None, {"a": 1}])
def test_a_callable_that_returns_no_tensor_cannot_feed_another(device, result):
    callables = lambda x: result, Layer().to(device)
    words = r"callable 1 \(Layer\): expected .* a tensor as first result of callable 0"
    with pytest.raises(ValueError, match=words):
        make_graphed_callables(callables, ((batch(device, requires_grad=False),), (batch(device),)), chain=True)


def test_a_chain_of_callables_that_do_not_fit_raises_what_the_callable_raises(device):
    layers = [Layer().to(device), nn.Linear(7, 6).to(device)]
    x = batch(device)
    before = snapshot(*layers)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        make_graphed_callables(tuple(layers), (x,), chain=True)
    assert_bitwise_equal(snapshot(*layers), before)


@pytest.mark.parametrize("samples", [(), 4])
def test_no_sample_or_more_samples_than_callables_are_refused(device, samples):
    layers = layers_on(device)
    given = tuple((batch(device),) for _ in range(samples or 0))
    with pytest.raises(ValueError, match=rf"expected sample_args for 3 callables, got {len(given)}"):
        make_graphed_callables(tuple(layers), given, chain=True)


def test_chain_must_be_a_bool(device):
    with pytest.raises(TypeError, match="expected chain to be a bool, got int"):
        make_graphed_callables(tuple(layers_on(device)), (batch(device),), chain=1)
