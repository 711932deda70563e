"""on_mismatch="capture" in the middle of training: several signatures, stale captures.

The reference is eager execution of a copy of the same module on the same inputs, from the same generator state.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable

import pytest
import torch
from mismatches import batch, compare, counts, graphed_pair, messages
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from twins import backward_of, eager_copy, gradients_of, run, train

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


# Several signatures.


@pytest.mark.parametrize("set_to_none", [True, False])
def test_micro_batches_of_alternating_shapes_train_as_in_eager_execution(device, set_to_none, seed):
    model, twin = graphed_pair(device)
    rows_of_steps = [(4, 2), (2, 4), (4, 4, 2), (3, 2, 4), (2, 2), (4, 3)]
    steps = [[(batch(device, rows),) for rows in step] for step in rows_of_steps]
    torch.manual_seed(seed)
    seen = train(model, steps, set_to_none)
    torch.manual_seed(seed)
    assert_bitwise_equal(seen, train(twin, steps, set_to_none))
    assert counts(model) == (3, 2, 0)
    assert model.te_graph.info()["backward_replays"] == 14


@pytest.mark.parametrize("rows", [(4, 2), (2, 4)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("is_captured_in_flight", [True, False])
def test_a_forward_waits_for_its_backward_while_the_other_signature_runs(device, rows, order, is_captured_in_flight):
    model, twin = graphed_pair(device)
    if not is_captured_in_flight:
        compare(model, twin, lambda net: run(net, batch(device, 2)))

    def step(net: nn.Module) -> list:
        leaves = [batch(device, count) for count in rows]
        outputs = [net(x) for x in leaves]
        for index in order:
            backward_of(outputs[index])
        return [gradients_of(leaves), [output.detach() for output in outputs]]

    for _ in range(3):
        compare(model, twin, step)
    assert counts(model) == (2, 1, 0)


def test_the_signatures_have_slots_of_their_own(device):
    model, _ = graphed_pair(device, max_in_flight=2)
    waiting = [model(batch(device, rows)) for rows in (4, 2, 4, 2)]
    assert model.te_graph.info()["in_flight"] == 4
    for rows in (4, 2):
        with pytest.raises(RuntimeError, match=r"2 earlier .*max_in_flight=3"):
            model(batch(device, rows))
    waiting.clear()
    assert model.te_graph.info()["in_flight"] == 0
    assert counts(model) == (2, 1, 0)


def test_results_of_one_signature_may_be_kept_and_fed_to_the_other(device):
    model, twin = graphed_pair(device)

    def step(net: nn.Module) -> list:
        first = net(batch(device))
        second = net(first[:2])
        logged = [first.detach(), second.detach(), first[2:].detach()]
        backward_of(second)
        logged.append(net(batch(device)).detach())
        return [*logged, net(batch(device, 2)).detach()]

    for _ in range(3):
        model.zero_grad()
        twin.zero_grad()
        compare(model, twin, step)
    assert counts(model) == (2, 1, 0)


def test_constants_of_a_function_select_its_graphs(device):
    weight = torch.randn(6, 6, device=device, requires_grad=True)
    other = weight.detach().clone().requires_grad_()

    def function_of(weight: Tensor) -> Callable:
        def function(x: Tensor, how: str, *, power: int = 1) -> Tensor:  # [n, 6] -> [n, 6]
            x = x @ weight
            return (x.tanh() if how == "tanh" else x.sin()) ** power

        return function

    graphed = make_graphed_callables(function_of(weight), (batch(device), "tanh"), on_mismatch="capture")
    eager = function_of(other)
    calls = [("tanh", {}), ("sin", {}), ("sin", {"power": 2}), ("tanh", {"power": 2}), ("tanh", {}), ("sin", {})]
    for how, kwargs in calls:
        x = batch(device)
        assert_bitwise_equal(run(graphed, x, how, **kwargs), run(eager, x, how, **kwargs))
        assert_bitwise_equal(weight.grad, other.grad)
    assert counts(graphed) == (4, 3, 0)
    graphed.te_graph.reset()
    assert graphed.te_graph.info()["graphs"] == 0


# Captures that are stale.


def test_a_capture_in_the_middle_of_a_step_leaves_what_eager_execution_leaves(device):
    """Micro-batches in flight, gradients of an earlier one there, some None, random numbers, buffers."""
    model, twin = graphed_pair(device, max_in_flight=3)

    def step(net: nn.Module) -> list:
        leaves = [batch(device, rows) for rows in (4, 4, 2, 4, 3)]
        backward_of(net(leaves[0]))
        net[4].bias.grad = None
        kept = net[0].weight.grad
        outputs = [net(x) for x in leaves[1:]]
        for index in (2, 1, 0, 3):
            backward_of(outputs[index])
        assert net[0].weight.grad is kept
        return [gradients_of(leaves), [output.detach() for output in outputs]]

    for _ in range(2):
        compare(model, twin, step)
    assert counts(model) == (3, 2, 0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_backward_that_is_due_runs_on_the_capture_that_was_replaced_and_frees_it(device, order):
    model, twin = graphed_pair(device)
    handle = model.te_graph
    compare(model, twin, lambda net: run(net, batch(device)))
    replaced, old = weakref.ref(handle._entry), StorageWeakRef(model[0].weight.untyped_storage())

    def step(net: nn.Module) -> list:
        leaves = [batch(device), batch(device)]
        first, outputs = net[0].weight, [net(leaves[0])]
        net[0].weight = nn.Parameter(first.detach() * 2)
        outputs.append(net(leaves[1]))
        for index in order:
            backward_of(outputs[index])
        return [first.grad.clone(), gradients_of(leaves), [output.detach() for output in outputs]]

    compare(model, twin, step)
    assert replaced() is None
    assert old.expired()
    assert counts(model) == (1, 1, 0)
    info = handle.info()
    assert (info["graphs"], info["forward_replays"], info["in_flight"]) == (2, 3, 0)


def test_each_stale_signature_is_replaced_when_it_is_called_and_nothing_of_it_stays(device):
    model, twin = graphed_pair(device, max_captures=100)
    compare(model, twin, lambda net: run(net, batch(device, 2)))
    graphs = model.te_graph.info()["graphs"]
    for number in range(3):
        entries = [weakref.ref(entry.graphed) for entry in model.te_graph._entries]
        old = StorageWeakRef(model[0].weight.untyped_storage())
        for net in (model, twin):
            net[0].weight.data = net[0].weight.data.clone()
        for rows in (2, 4, 4, 2):
            compare(model, twin, lambda net, rows=rows: run(net, batch(device, rows)))
        assert [entry() for entry in entries] == [None, None]
        assert old.expired()
        assert counts(model) == (2, 1 + 2 * (number + 1), 0)
        assert model.te_graph.info()["graphs"] == graphs
    assert model.te_graph.info()["forward_replays"] == 13


def test_reset_frees_all_signatures(device):
    model, twin = graphed_pair(device)
    for rows in (2, 3):
        compare(model, twin, lambda net, rows=rows: run(net, batch(device, rows)))
    entries = [weakref.ref(entry.graphed) for entry in model.te_graph._entries]
    assert len(entries) == 3
    handle = model.te_graph
    handle.reset()
    assert [entry() for entry in entries] == [None] * 3
    info = handle.info()
    assert (info["signatures"], info["graphs"], info["bytes"], info["forward_replays"]) == (0, 0, 0, 2)
    compare(model, twin, lambda net: run(net, batch(device, 2)))


# The bound.


def test_more_captures_than_max_captures_run_eagerly_with_this_reason(device, caplog):
    model, twin = graphed_pair(device, max_captures=2)
    for rows in (2, 3, 5, 5, 7, 4, 3, 2):
        compare(model, twin, lambda net, rows=rows: run(net, batch(device, rows)))
    info = model.te_graph.info()
    assert (info["signatures"], info["recaptures"], info["forward_replays"]) == (3, 2, 5)
    assert sum(info["eager_calls"].values()) == 3
    for reason, rows in zip(info["eager_calls"], (5, 7), strict=True):
        assert reason.startswith("expected args[0] of shape [") and f"got [{rows}, 6]; max_captures=2" in reason
    assert len(messages(caplog, logging.WARNING)) == 2
    # A stale one cannot be replaced any more.
    for net in (model, twin):
        net[4].bias.data = net[4].bias.data.clone()
    compare(model, twin, lambda net: run(net, batch(device)))
    assert "bias of 4 moved" in messages(caplog, logging.WARNING)[-1]
    assert counts(model) == (3, 2, 4)


def test_autocast_is_another_capture(device):
    model = nn.Linear(6, 6).to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),), on_mismatch="capture")

    def step(net: nn.Module, caches: bool) -> list:
        x = batch(device)
        with torch.autocast(device, torch.bfloat16, cache_enabled=caches):
            output = net(x)
        backward_of(output)
        return [output.detach(), x.grad]

    for caches in (True, True, False, False):
        compare(model, twin, lambda net, caches=caches: step(net, caches))
    assert counts(model)[2] == 0
    assert model.te_graph.info()["forward_replays"] == 4


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cpu")])
def test_a_tensor_on_another_device_than_the_graphs_runs_eagerly(devices):
    """A CUDA graph would hold the value that a tensor on the host had at capture."""

    def scaled(x: Tensor, factor: Tensor | float) -> Tensor:  # [n, 6], [] -> [n, 6]
        return x * factor

    graphed = make_graphed_callables(scaled, (batch("cuda"), 2.0), on_mismatch="capture")
    for value in (3.0, 5.0):
        x, factor = batch(devices[0]), torch.tensor(value, device=devices[1])
        assert_bitwise_equal(run(graphed, x, factor), run(scaled, x, factor))
    assert counts(graphed) == (1, 0, 2)


# Weights that callables share.


class Gated(nn.Module):
    """Uses ``gate`` only when it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, is_gated: bool = True) -> Tensor:  # [n, 6] -> [n, 6]
        x = self.linear(x)
        return x * self.gate(x).sigmoid() if is_gated else x


def gated_steps(device: str, nets: nn.ModuleList, calls: list[tuple[int, bool]]) -> list:
    """Both layers one after the other, in bfloat16, where the order of additions shows."""
    seen = []
    for rows, is_gated in calls:
        leaf = torch.randn(rows, 6, device=device).bfloat16().requires_grad_()
        output = nets[1](nets[0](leaf, True).relu(), is_gated)
        output.float().square().sum().backward()
        seen.append([output.detach(), leaf.grad, gradients_of(list(nets.parameters()))])
    return seen


@pytest.mark.parametrize("is_shared_at_first", [True, False])
def test_weights_shared_between_callables_are_summed_first_for_a_signature_captured_later(device, is_shared_at_first):
    layers = nn.ModuleList([Gated(), Gated()]).to(device, torch.bfloat16)
    layers[1].gate = layers[0].gate
    twins = copy.deepcopy(layers)
    x = torch.randn(4, 6, device=device).bfloat16().requires_grad_()
    samples = (x, True), (x, is_shared_at_first)
    make_graphed_callables(tuple(layers), samples, on_mismatch="capture")
    for nets in (layers, twins):
        run(nets[1], x[:2], True)  # captured while no forward of the other is in flight
        run(nets[1], x, True)
    calls = [(4, is_shared_at_first), (2, True), (4, True), (2, is_shared_at_first), (2, True)]
    compare(layers, twins, lambda nets: gated_steps(device, nets, calls))
    infos = [layer.te_graph.info() for layer in layers]
    assert [info["eager_calls"] for info in infos] == [{}, {}]
    assert [info["signatures"] for info in infos] == [2, 2 if is_shared_at_first else 4]
