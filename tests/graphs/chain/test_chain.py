"""chain=True: callables that feed each other copy nothing in between, in every order of micro-batches.

The reference is eager execution of copies of the same layers on the same inputs. What users may do in between is in
test_chain_between.py, changes after the capture are in test_chain_changes.py, the autograd graph in
test_chain_nodes.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from chain_layers import Layer, Shift, Squash, batch, in_turn, layers_on
from chains import assert_same, assert_same_steps, chain, counts, eager_calls, watched_slots
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from twins import eager_copy, gradients_of, leaf_copy, train

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


@pytest.mark.parametrize("samples", ["all", "two", "first", "bare"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_three_steps_of_two_micro_batches_train_a_chain_as_eager_execution_does(device, samples, set_to_none):
    layers = layers_on(device, Layer, Squash, Shift)
    x = batch(device)
    given = {"all": [(x,)] * 3, "two": [(x,)] * 2, "first": [(x,)], "bare": [x]}[samples]
    twins = chain(layers, *given)
    steps = [[(batch(device),) for _ in range(2)] for _ in range(3)]
    results = [train(nn.Sequential(*nets), steps, set_to_none) for nets in (layers, twins)]
    assert_bitwise_equal(*results)
    assert counts(layers, "forward_replays") == counts(layers, "backward_replays") == [6, 6, 6]
    assert eager_calls(layers) == [0, 0, 0]


@pytest.mark.parametrize("is_tuple", [True, False])
def test_a_chain_of_one_replays_as_without_chain(device, is_tuple):
    layer = Layer().to(device)
    twin = eager_copy(layer)
    given = ((layer,), ((batch(device),),)) if is_tuple else (layer, (batch(device),))
    make_graphed_callables(*given, chain=True)
    assert_same_steps([layer], [twin], lambda nets, x: (2 * in_turn(nets, x)).sum().backward(), device)
    assert eager_calls([layer]) == [0]


class Pair(nn.Module):
    """Two results from a tuple of two: ([n, 6], [n, 6]) -> ([n, 6], [n, 6])."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # ([n, 6], [n, 6]) -> the same
        return pair[0] * torch.sigmoid(self.one(pair[1])), pair[1] + self.other(pair[0])


@pytest.mark.parametrize("given", [1, 3])
@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)])
def test_tuples_feed_tuples(device, given, used):
    """Left out, later samples link both tensors; given, the first is linked and the second is copied."""
    layers = layers_on(device, Pair, Pair, Pair)
    twins = chain(layers, *[((batch(device), batch(device)),)] * given)

    def scenario(nets: Sequence[nn.Module], x: Tensor) -> Any:
        pair = (x, x * 2)
        for net in nets:
            pair = net(pair)
        sum(pair[i].square().sum() for i in used).backward()
        return pair

    assert_same_steps(layers, twins, scenario, device)
    assert eager_calls(layers) == [0, 0, 0]


class Scaled(nn.Module):
    """An argument beside the chained one: [n, 6], [6] -> [n, 6]."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor, twice: bool = False) -> Tensor:  # [n, 6], [6] -> [n, 6]
        return torch.tanh(self.linear(x)) * scale * (2 if twice else 1)


@pytest.mark.parametrize("given", [1, 3])
def test_keyword_arguments_beside_the_chained_one_are_read_anew_and_get_gradients(device, given):
    layers = layers_on(device, Scaled, Scaled, Scaled)
    scale = torch.randn(6, device=device, requires_grad=True)
    kwargs = tuple({"scale": scale, "twice": twice} for twice in (False, True, False))
    twins = chain(layers, *[(batch(device),)] * given, sample_kwargs=kwargs)

    def scenario(nets: Sequence[nn.Module], x: Tensor) -> Any:
        leaves = leaf_copy(scales)
        for net, leaf, twice in zip(nets, leaves, (False, True, False), strict=True):
            x = net(x, scale=leaf, twice=twice)
        x.square().sum().backward()
        return gradients_of(leaves)

    for _ in range(3):
        scales = [torch.randn(6, device=device, requires_grad=True) for _ in layers]
        assert_same(layers, twins, scenario, batch(device))
    assert eager_calls(layers) == [0, 0, 0]


def test_a_computed_second_argument_that_every_layer_gets_sums_its_gradients(device):
    layers = layers_on(device, Scaled, Scaled, Scaled)
    twins = chain(layers, *[(batch(device), torch.randn(6, device=device, requires_grad=True))] * 3)

    def scenario(nets: Sequence[nn.Module], x: Tensor) -> Any:
        scale, y = x.square().sum(0), x
        for net in nets:
            y = net(y, scale)
        (2 * y).sum().backward()
        return y

    assert_same_steps(layers, twins, scenario, device)
    assert eager_calls(layers) == [0, 0, 0]


def test_functions_and_modules_feed_each_other(device):
    layers = layers_on(device, Layer, Layer)
    twins = [eager_copy(layer) for layer in layers]

    def gate(x: Tensor) -> Tensor:  # [n, 6] -> [n, 6]
        return x * torch.sigmoid(x)

    graphed = make_graphed_callables((layers[0], gate, layers[1]), (batch(device),), chain=True)
    for _ in range(3):
        x = batch(device)
        seen = []
        for nets in (graphed, (twins[0], gate, twins[1])):
            leaf = leaf_copy(x)
            in_turn(nets, leaf).square().sum().backward()
            seen.append(gradients_of([leaf, *nets[0].parameters(), *nets[2].parameters()]))
        assert_bitwise_equal(*seen)
    assert counts(graphed, "forward_replays") == [3, 3, 3]


# F, B and D: forwards, the backward, and the dropping of micro-batches.
SCHEDULES = [
    (1, "F0 B0 F1 B1"),
    (2, "F01 B0 B1"),
    (2, "F01 B1 B0"),
    (2, "F01 B0 F2 B1 F3 B2 B3"),
    (2, "F01 B1 F2 B2 F3 B0 B3"),
    (3, "F012 B0 B1 B2"),
    (3, "F012 B2 B1 B0"),
    (3, "F012 B1 F3 B0 B3 F45 B5 B2 B4"),
    (3, "F01 D0 F23 B2 B1 B3"),
]


@pytest.mark.parametrize(("slots", "schedule"), SCHEDULES)
@pytest.mark.parametrize("layerwise", [False, True])
def test_every_order_with_at_most_max_in_flight_is_right(device, slots, schedule, layerwise):
    """Layerwise, the forwards of several micro-batches go through the chain side by side."""
    layers = layers_on(device, Layer, Squash, Shift)
    twins = chain(layers, batch(device), max_in_flight=slots)

    def scenario(nets: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
        waiting: dict[str, Tensor] = {}
        seen = []
        for kind, *numbers in schedule.split():
            if kind == "F":
                new = {number: x * (1 + int(number)) for number in numbers}
                for net in nets if layerwise else ():
                    new = {number: net(y) for number, y in new.items()}
                waiting |= new if layerwise else {number: in_turn(nets, y) for number, y in new.items()}
                continue
            result = waiting.pop(numbers[0])
            seen.append(result.detach().clone())
            if kind == "B":
                result.square().sum().backward()
            del result
        return seen

    for _ in range(2):
        assert_same(layers, twins, scenario, batch(device))
    assert eager_calls(layers) == [0, 0, 0]
    assert counts(layers, "in_flight") == [0, 0, 0]


def test_one_forward_too_many_is_refused_by_the_first_of_the_chain_with_advice(device):
    layers = layers_on(device)
    twins = chain(layers, batch(device), max_in_flight=2)

    def scenario(nets: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
        results = [in_turn(nets, x), in_turn(nets, x * 2)]
        if nets is layers:
            with pytest.raises(RuntimeError, match=r"callable 0 \(Layer\): .*max_in_flight=3"):
                layers[0](x)
        for result in results:
            (2 * result).sum().backward()
        return results

    for _ in range(2):
        assert_same(layers, twins, scenario, batch(device))
    assert counts(layers, "in_flight") == [0, 0, 0]


def _turned(x: Tensor) -> Tensor:  # [n, n] -> [n, n], transposed in memory
    return (x * 2).t()


def _with_gaps(x: Tensor) -> Tensor:  # [n, n] -> [n, n], every other column of a matrix
    return torch.cat([x, x * 3], 1)[:, ::2]


def _expanded(x: Tensor) -> Tensor:  # [n, n] -> [n, n], each row the same memory
    return x.sum(0).expand(*x.shape)


@pytest.mark.parametrize("first", [_turned, _with_gaps, _expanded])
def test_a_layer_sees_the_layout_of_the_result_that_it_reads_whatever_its_sample_has(device, first):
    def second(x: Tensor) -> Tensor:  # a view only where the argument is contiguous
        return x.reshape(2, -1).view_as(x) * (2 if x.is_contiguous() else 3)

    def leaf() -> Tensor:
        return torch.arange(16.0, device=device).reshape(4, 4).requires_grad_()

    graphed = make_graphed_callables((first, second), ((leaf(),), (leaf(),)), chain=True)
    got, expected = [
        (y := g(hidden := f(x := leaf())), y.backward(torch.ones_like(y)), hidden.stride(), x.grad)
        for f, g in (graphed, (first, second))
    ]
    assert_bitwise_equal(got[0], expected[0])
    assert_bitwise_equal(got[3], expected[3])
    assert got[2] == expected[2]
    assert [one.te_graph.info()["forward_replays"] for one in graphed] == [1, 1]


@pytest.mark.parametrize("frozen", [1, 2, 3])
@pytest.mark.parametrize("slots", [1, 2])
def test_frozen_layers_at_the_beginning_have_no_backward_and_use_all_slots(device, frozen, slots):
    layers = layers_on(device, Layer, Squash, Layer, Layer)
    for layer in layers[:frozen]:
        layer.requires_grad_(False)
    twins = chain(layers, batch(device, requires_grad=False), max_in_flight=slots)

    def scenario(nets: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
        results = [in_turn(nets, x * (1 + number)) for number in range(slots)]
        for result in results:
            result.square().sum().backward()
        return results

    for _ in range(3):
        assert_same(layers, twins, scenario, batch(device, requires_grad=False))
    assert eager_calls(layers) == [0] * 4
    assert counts(layers, "backward_replays") == [0] * frozen + [3 * slots] * (4 - frozen)


class Detached(Layer):
    def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 6]
        return super().forward(x).detach()


class Activation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 6]
        return torch.relu(x)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("kind", ["frozen", "without parameters", "detached"])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_layer_that_is_frozen_or_has_no_parameters_or_no_gradient_may_stand_anywhere(device, kind, position, slots):
    layers = layers_on(device)
    if kind == "frozen":
        layers[position].requires_grad_(False)
    else:
        layers[position] = (Activation() if kind == "without parameters" else Detached()).to(device)
    twins = chain(layers, batch(device), max_in_flight=slots, allow_unused_input=True)

    def scenario(nets: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
        results = [in_turn(nets, x * (1 + number)) for number in range(slots)]
        for result in results:
            if result.requires_grad:
                result.square().sum().backward()
        return results

    for _ in range(3):
        assert_same(layers, twins, scenario, batch(device))
    assert eager_calls(layers) == [0, 0, 0]


@pytest.mark.parametrize("slots", [1, 2])
def test_results_and_gradients_are_read_where_the_neighbour_writes_them(device, slots, monkeypatch):
    watched = watched_slots(monkeypatch)
    layers = layers_on(device, Layer, Squash, Layer)
    chain(layers, batch(device), max_in_flight=slots)
    places = [watched[i * slots : (i + 1) * slots] for i in range(3)]  # [layers][slots]
    for lower, upper in itertools.pairwise(places):
        for below, above in zip(lower, upper, strict=True):
            assert above["inputs"] == below["outputs"]
            assert below["grad_outputs"] == above["grad_inputs"]
    assert len({slot["outputs"][0] for layer in places for slot in layer}) == 3 * slots

    results: list[tuple[int, int]] = []
    gradients: list[tuple[int, int]] = []
    for _ in range(3):
        last = []
        for number in range(slots):
            y = batch(device)
            for layer, place in zip(layers, places, strict=True):
                y = layer(y)
                results.append((y.data_ptr(), place[number]["outputs"][0]))
                if layer is not layers[-1]:
                    expected = place[number]["grad_outputs"][0]
                    y.register_hook(lambda grad, expected=expected: gradients.append((grad.data_ptr(), expected)))
            last.append(y.square().sum())
        for loss in last:
            loss.backward()
    assert (len(results), len(gradients)) == (9 * slots, 6 * slots)
    assert all(got == expected for got, expected in results + gradients)
    assert eager_calls(layers) == [0, 0, 0]


def test_a_chained_layer_reads_its_input_in_place_like_eager_execution_whatever_its_version_says(device):
    """Without a chain the layer has a copy, and sees nothing of what happens to the tensor later."""
    layers = layers_on(device, Layer, Layer)
    twins = chain(layers, batch(device))

    def scenario(nets: Sequence[nn.Module], x: Tensor) -> None:
        y = nets[0](x)
        z = nets[1](y)
        y.data.mul_(2)
        (2 * z).sum().backward()

    assert_same_steps(layers, twins, scenario, device)


@pytest.mark.gpu
def test_a_step_copies_as_much_whatever_the_number_of_layers():
    def copies(count: int) -> int:
        layers = layers_on("cuda", *[Layer] * count)
        chain(layers, batch("cuda"))
        for _ in range(3):
            in_turn(layers, batch("cuda")).backward(torch.ones(4, 6, device="cuda"))
        x, grad = batch("cuda"), torch.ones(4, 6, device="cuda")
        for _ in range(2):  # the first profile of a process may miss calls
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
                in_turn(layers, x).backward(grad)
                torch.cuda.synchronize()
        return sum(event.name.startswith("cudaMemcpy") for event in profiler.events())

    few = copies(2)
    assert few > 0
    assert copies(6) == few
