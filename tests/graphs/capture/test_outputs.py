"""Results, input gradients and slots: values stay with their holder; memory without a holder is used again (G7, G8)."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from twins import run

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def layer(device: str) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(device)


def data(device: str, requires_grad: bool = True) -> Tensor:
    return torch.randn(5, 6, device=device, requires_grad=requires_grad)


def graphed_layer(device: str, **options) -> tuple[nn.Module, nn.Module]:
    module = layer(device)
    return copy.deepcopy(module), tg.make_graphed_callables(module, (data(device),), **options)


def test_logged_outputs_keep_their_values(device: str) -> None:
    eager, graphed = graphed_layer(device)
    logged, expected = [], []
    for _ in range(4):
        x = data(device)
        y = graphed(x)
        y.sum().backward()
        logged.append(y.detach())
        expected.append(eager(x).detach())
    assert_bitwise_equal(logged, expected)


def test_views_and_saved_tensors_of_an_output_keep_their_values(device: str) -> None:
    eager, graphed = graphed_layer(device)
    batches = [data(device) for _ in range(3)]
    results = []
    for module in (eager, graphed):
        inputs = [x.detach().clone().requires_grad_() for x in batches]
        first = module(inputs[0])
        view = first.t()[1:3]
        first.sum().backward(retain_graph=True)
        outside = first.detach().requires_grad_()
        loss = outside.exp().sum() + (outside * outside).sum()  # its nodes save what lies in the memory of `first`
        first = first.detach()
        del inputs[0]
        view = view.detach()
        for x in inputs:
            module(x).sum().backward()
        loss.backward()
        results.append([outside.grad, view.clone(), first.clone()])
    assert_bitwise_equal(*results)


def test_output_kept_by_another_graph_of_autograd_is_right_after_the_next_forward(device: str) -> None:
    eager, graphed = graphed_layer(device)
    weights = [torch.randn(6, device=device, requires_grad=True)]
    weights.append(weights[0].detach().clone().requires_grad_())
    for module, weight in zip((eager, graphed), weights, strict=True):
        torch.manual_seed(5)
        losses = []
        for _ in range(3):
            y = module(data(device))
            y.sum().backward()
            losses.append((y.detach() * weight).sum())  # saves y for a backward that comes after later forwards
        torch.stack(losses).sum().backward()
    assert torch.equal(weights[0].grad, weights[1].grad)


def test_output_memory_is_not_copied_when_nobody_holds_it(device: str) -> None:
    _, graphed = graphed_layer(device)
    addresses = set()
    for _ in range(4):
        y = graphed(data(device))
        y.sum().backward()
        addresses.add(y.data_ptr())
        del y
    assert len(addresses) == 1


def test_kept_input_gradients_keep_their_values(device: str) -> None:
    module = nn.ModuleList([layer(device), layer(device)])
    eager = copy.deepcopy(module)
    graphed = tg.make_graphed_callables(tuple(module), ((data(device),), (data(device),)))
    kept: list[list[Tensor]] = [[], []]
    for i, (first, second) in enumerate((tuple(eager), graphed)):
        torch.manual_seed(7)
        for _ in range(3):
            hidden = first(data(device))
            hidden.retain_grad()
            x = hidden * 1.5
            x.retain_grad()
            second(x).square().sum().backward()
            kept[i] += [x.grad, hidden.grad]
    assert_bitwise_equal(*kept)


def test_outputs_outlive_the_callable(device: str) -> None:
    eager, graphed = graphed_layer(device)
    x = data(device)
    y, expected = graphed(x), eager(x)
    del graphed
    gc.collect()
    torch.randn(1000, device=device)
    assert_bitwise_equal(y.detach(), expected.detach())


def test_backward_runs_after_the_callable_is_gone(device: str) -> None:
    eager, graphed = graphed_layer(device)
    x = data(device)
    x2 = x.detach().clone().requires_grad_()
    loss = graphed(x).square().sum()
    weight = graphed[0].weight
    del graphed
    loss.backward()
    eager(x2).square().sum().backward()
    assert_bitwise_equal([x.grad, weight.grad], [x2.grad, eager[0].weight.grad])


def test_one_forward_too_many_is_refused_with_advice_and_costs_nothing(device: str) -> None:
    eager, graphed = graphed_layer(device)
    x = data(device)
    first = graphed(x)
    with pytest.raises(RuntimeError, match=r"Sequential: .*1 earlier .*max_in_flight=2"):
        graphed(data(device))
    first.square().sum().backward()
    x2 = x.detach().clone().requires_grad_()
    eager(x2).square().sum().backward()
    assert_bitwise_equal([x.grad, graphed[0].weight.grad], [x2.grad, eager[0].weight.grad])


def test_slot_is_free_again_when_the_output_is_dropped(device: str) -> None:
    _, graphed = graphed_layer(device)
    y = graphed(data(device))
    assert graphed.te_graph.info()["in_flight"] == 1
    del y
    assert graphed.te_graph.info()["in_flight"] == 0
    graphed(data(device)).sum().backward()
    assert graphed.te_graph.info()["in_flight"] == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_forwards_in_flight_run_backward_in_any_order(device: str, order: tuple[int, ...]) -> None:
    eager, graphed = graphed_layer(device, max_in_flight=3)
    for _ in range(2):
        inputs = [data(device) for _ in range(3)]
        copies = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = [graphed(x) for x in inputs], [eager(x) for x in copies]
        for number in order:
            for results in outputs:
                results[number].square().sum().backward()
        assert_bitwise_equal([x.grad for x in inputs], [x.grad for x in copies])
    assert_bitwise_equal([p.grad for p in graphed.parameters()], [p.grad for p in eager.parameters()])


def test_second_callable_in_flight_survives_replays_of_the_first(device: str) -> None:
    """Graphs share memory for what is dead between them, so any order of replays has to be right."""
    module = nn.ModuleList([layer(device), layer(device)])
    eager = copy.deepcopy(module)
    first, second = tg.make_graphed_callables(tuple(module), ((data(device),), (data(device),)))
    x, again = data(device), data(device)
    copy_of_x = x.detach().clone().requires_grad_()
    pending = second(x).square().sum()
    for _ in range(3):
        first(again).square().sum().backward()
    pending.backward()
    eager[1](copy_of_x).square().sum().backward()
    assert_bitwise_equal([x.grad, second[0].weight.grad], [copy_of_x.grad, eager[1][0].weight.grad])


def test_retain_graph_keeps_the_slot_and_runs_backward_again(device: str) -> None:
    eager, graphed = graphed_layer(device)
    x = data(device)
    x2 = x.detach().clone().requires_grad_()
    losses = graphed(x).square().sum(), eager(x2).square().sum()
    for retain in (True, True, False):
        for loss in losses:
            loss.backward(retain_graph=retain)
        assert graphed.te_graph.info()["in_flight"] == int(retain)
    assert_bitwise_equal([x.grad, graphed[0].weight.grad], [x2.grad, eager[0].weight.grad])


def test_second_backward_without_retain_graph_is_refused(device: str) -> None:
    _, graphed = graphed_layer(device)
    y = graphed(data(device))
    y.sum().backward()
    with pytest.raises(RuntimeError, match=r"Sequential: backward a second time.*retain_graph=True"):
        y.sum().backward()


def test_results_that_are_an_input_or_a_parameter_are_these(device: str) -> None:
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [n, 4]
            return x, self.weight, x * self.weight

    module = Passes().to(device)
    eager = copy.deepcopy(module)
    graphed = tg.make_graphed_callables(module, (torch.randn(3, 4, device=device, requires_grad=True),))
    for _ in range(2):
        x = torch.randn(3, 4, device=device, requires_grad=True)
        assert_bitwise_equal(run(graphed, x), run(eager, x))
    assert_bitwise_equal(graphed.weight.grad, eager.weight.grad)


def test_results_that_are_views_of_each_other_share_memory_as_in_eager(device: str) -> None:
    class Splits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # [n, 6]
            y = self.linear(x)
            return (y, *y.chunk(2, dim=1), y[0:0])

    module = Splits().to(device)
    eager = copy.deepcopy(module)
    graphed = tg.make_graphed_callables(module, (data(device),))
    for _ in range(2):
        x = data(device)
        assert_bitwise_equal(run(graphed, x), run(eager, x))
    whole, left, *_ = graphed(data(device))
    assert whole.untyped_storage().data_ptr() == left.untyped_storage().data_ptr()


def test_dropping_the_last_reference_frees_everything_without_the_garbage_collector(device: str) -> None:
    gc.collect()
    gc.disable()
    try:
        _, graphed = graphed_layer(device)
        graphed(data(device)).sum().backward()
        handle, weight = weakref.ref(graphed.te_graph), weakref.ref(graphed[0].weight)
        module = weakref.ref(graphed)
        del graphed
        assert module() is None
        assert handle() is None
        assert weight() is None
    finally:
        gc.enable()


@pytest.mark.gpu
def test_replays_on_alternating_streams_are_ordered() -> None:
    eager, graphed = graphed_layer("cuda")
    side = torch.cuda.Stream()
    x = data("cuda")
    copy_of_x = x.detach().clone().requires_grad_()
    for number in range(6):
        stream = side if number % 2 else torch.cuda.default_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # the next replay is enqueued while this one has not begun
            graphed(x).square().sum().backward()
        torch.cuda.current_stream().wait_stream(stream)
        eager(copy_of_x).square().sum().backward()
    assert_bitwise_equal([x.grad, graphed[0].weight.grad], [copy_of_x.grad, eager[0].weight.grad])


@pytest.mark.gpu
def test_gradients_are_visible_on_the_stream_that_called_backward() -> None:
    """The forward ran on another stream; a node that writes .grad by itself has to be waited for."""
    eager, graphed = graphed_layer("cuda")
    x = data("cuda").detach().requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        output = graphed(x)
        torch.cuda._sleep(50_000_000)  # the backward runs here, behind this
    output.backward(torch.ones_like(output))
    seen = graphed[0].weight.grad.clone()
    eager(x.detach()).backward(torch.ones_like(output))
    torch.cuda.synchronize()
    assert_bitwise_equal(seen, eager[0].weight.grad)


@pytest.mark.multi_gpu
@pytest.mark.gpus_apart
def test_callable_on_another_device_than_the_current_one() -> None:
    eager, graphed = graphed_layer("cuda:1")
    with torch.cuda.device(0):
        for _ in range(3):
            x = data("cuda:1")
            kept = graphed(x)
            kept.square().sum().backward()
            copy_of_x = x.detach().clone().requires_grad_()
            eager(copy_of_x).square().sum().backward()
            assert_bitwise_equal(x.grad, copy_of_x.grad)
    assert_bitwise_equal([p.grad for p in graphed.parameters()], [p.grad for p in eager.parameters()])


def test_a_result_that_is_held_stays_where_it_is_while_another_slot_is_free(device):
    """Another thread or stream may be reading it."""
    graphed = tg.make_graphed_callables(lambda x: x * 2, (torch.randn(3, 4, device=device),), max_in_flight=2)
    inputs = [torch.randn(3, 4, device=device) for _ in range(4)]
    held = graphed(inputs[0])
    address = held.data_ptr()
    for x in inputs[1:]:
        assert torch.equal(graphed(x), x * 2)
    assert held.data_ptr() == address
    other = graphed(inputs[1])
    assert torch.equal(graphed(inputs[2]), inputs[2] * 2)
    assert torch.equal(held, inputs[0] * 2)
    assert torch.equal(other, inputs[1] * 2)
