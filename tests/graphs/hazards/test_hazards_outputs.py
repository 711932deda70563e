"""Silent hazards of graph replay in what comes out: aliases, overwritten activations, edited outputs.

The reference is eager execution of a copy of the same module, or of the same function, on the same inputs.
"""

import warnings

import pytest
import torch
from hazards import batch, mlp
from torch import Tensor, nn
from twins import backward_of, eager_copy, gradients_of, leaf_copy, run

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def test_kept_outputs_keep_their_values_while_replays_overwrite_the_graphs_memory(device):
    model = mlp(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    inputs = [batch(device) for _ in range(4)]
    kept, views = [], []
    for x in inputs:
        output = model(x)
        kept.append(output)
        views.append(output.detach()[1:])
        backward_of(output)
    expected = [twin(x) for x in inputs]
    assert_bitwise_equal([t.detach() for t in kept], [t.detach() for t in expected])
    assert_bitwise_equal(views, [t.detach()[1:] for t in expected])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_eager_op_that_saved_an_output_gets_right_gradients_with_two_in_flight(device, order):
    model, head = mlp(device), nn.Linear(4, 2).to(device)
    twin, twin_head = eager_copy(model), eager_copy(head)
    make_graphed_callables(model, (batch(device),), max_in_flight=2)
    inputs = [batch(device) for _ in range(2)]

    def step(body: nn.Module, top: nn.Module) -> list:
        leaves = leaf_copy(inputs)
        losses = [(top(body(x)) * body.training).square().sum() for x in leaves]
        for index in order:
            losses[index].backward()
        return [gradients_of(leaves), *(p.grad for p in (*body.parameters(), *top.parameters()))]

    assert_bitwise_equal(step(model, head), step(twin, twin_head))


def test_kept_gradients_of_intermediate_inputs_keep_their_values(device):
    model = mlp(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    inputs = [batch(device) for _ in range(3)]

    def gradients(call: nn.Module) -> list[Tensor]:
        kept = []
        for x in inputs:
            hidden = x * 2
            hidden.retain_grad()
            backward_of(call(hidden))
            kept.append(hidden.grad)
        return kept

    assert_bitwise_equal(gradients(model), gradients(twin))


def test_results_that_share_memory_with_an_argument_or_with_each_other_are_right(device):
    def views(x: Tensor) -> tuple[Tensor, ...]:  # [3, 4] -> [2, 4], [3, 4], [4, 3], [3, 4]
        doubled = x * 2
        return x[1:], doubled, doubled.t(), x

    graphed = make_graphed_callables(views, (batch(device),))
    kept, expected = [], []
    for _ in range(3):
        x = batch(device)
        kept.append(run(graphed, x))
        expected.append(run(views, x))
    assert_bitwise_equal(kept, expected)


def test_an_output_can_be_fed_back_as_the_next_input(device):
    weight = torch.randn(4, 4, device=device)

    def advance(x: Tensor) -> Tensor:  # [4, 4] -> [4, 4]
        return torch.tanh(x @ weight)

    graphed = make_graphed_callables(advance, (torch.zeros(4, 4, device=device).t(),))
    state = expected = torch.randn(4, 4, device=device)
    for _ in range(4):
        state, expected = graphed(state.t()), advance(expected.t())
    assert_bitwise_equal(state, expected)


def test_an_input_of_another_layout_is_copied_into_the_layout_of_the_sample(device):
    """Not bit for bit: a matrix product may choose its kernel, hence its rounding, by the layout."""
    model = mlp(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    x = batch(device)
    permuted = x.t().contiguous().t()
    with pytest.warns(UserWarning, match=r"Sequential: args\[0\] has strides .*Capture with samples that lie"):
        torch.testing.assert_close(model(permuted).detach(), twin(permuted).detach())
    with warnings.catch_warnings():  # told once, and not of what is not dense
        warnings.simplefilter("error")
        for layout in (permuted, torch.cat([x, x], dim=1)[:, : x.shape[1]], x[:1].expand_as(x)):
            torch.testing.assert_close(model(layout).detach(), twin(layout).detach())


def test_a_second_forward_before_the_backward_is_refused_and_the_first_backward_stays_right(device):
    model = mlp(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    x, other = batch(device), batch(device)
    output, expected = model(x), twin(x.detach())
    with pytest.raises(RuntimeError, match=r"Sequential: .*max_in_flight=2"):
        model(other)
    backward_of(output)
    backward_of(expected)
    assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))


def test_dropping_the_outputs_of_a_forward_lets_the_next_one_run(device):
    model = mlp(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    output = model(batch(device))
    assert model.te_graph.info()["in_flight"] == 1
    del output
    assert model.te_graph.info()["in_flight"] == 0
    x = batch(device)
    assert_bitwise_equal(run(model, x), run(twin, x))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_as_many_forwards_as_max_in_flight_may_wait_for_their_backward(device, order):
    model = mlp(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),), max_in_flight=3)
    inputs = [batch(device) for _ in range(3)]

    def step(call: nn.Module) -> list:
        leaves = leaf_copy(inputs)
        outputs = [call(x) for x in leaves]
        for index in order:
            backward_of(outputs[index])
        return [gradients_of(leaves), gradients_of(list(call.parameters())), [t.detach() for t in outputs]]

    for _ in range(2):
        assert_bitwise_equal(step(model), step(twin))
    waiting = [model(x) for x in inputs]
    with pytest.raises(RuntimeError, match=r"Sequential: .*max_in_flight=4"):
        model(inputs[0])
    assert len(waiting) == 3


@pytest.mark.parametrize("edit", [lambda t: t.mul_(2), lambda t: t[0].zero_(), lambda t: t.detach().add_(1)])
def test_editing_an_output_that_the_backward_reads_raises_as_in_eager_execution(device, edit):
    weight = torch.randn(4, device=device, requires_grad=True)

    def activation(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4], saves its result
        return torch.tanh(x * weight)

    graphed = make_graphed_callables(activation, (batch(device),))
    for call in (activation, graphed):
        output = call(batch(device))
        edit(output)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward_of(output)
    assert weight.grad is None


def test_editing_a_result_without_gradient_that_the_backward_reads_raises_as_in_eager_execution(device):
    weight = torch.randn(4, device=device, requires_grad=True)

    def gate(x: Tensor) -> tuple[Tensor, Tensor]:  # [3, 4] -> [3, 4], bool [3, 4], which the backward reads
        mask = x > 0
        return torch.where(mask, x * weight, -x), mask

    graphed = make_graphed_callables(gate, (batch(device),))
    for call in (gate, graphed):
        output, mask = call(batch(device))
        mask.logical_not_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward_of(output)


def test_editing_an_output_that_the_backward_does_not_read_is_right(device):
    model = nn.Linear(4, 4).to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),))
    for x in (batch(device), batch(device)):
        results = [run(lambda x, call=call: call(x).relu_(), x) for call in (model, twin)]
        assert_bitwise_equal(*results)
    assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))


def test_editing_a_weight_between_forward_and_backward_raises_as_in_eager_execution(device):
    model = mlp(device)
    make_graphed_callables(model, (batch(device),))
    output = model(batch(device))
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"weight of 2 .*modified by an inplace operation"):
        backward_of(output)
    assert model[2].weight.grad is None


def test_a_callable_that_edits_its_argument_behind_autograds_back_is_refused(device):
    with pytest.raises(RuntimeError, match=r"scale: aten.mul_.* modifies args\[0\] in place"):

        def scale(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            return x.data.mul_(2) + 1

        make_graphed_callables(scale, (batch(device, requires_grad=False),))


def test_changing_a_retained_result_that_another_one_is_computed_from_raises_a_documented_limit(device):
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y * 3, y

    _, y = make_graphed_callables(function, (leaf_copy(batch(device)),))(leaf_copy(batch(device)))
    y.retain_grad()
    with pytest.raises(RuntimeError):
        y.mul_(2)


class ChangesItsGradient(torch.autograd.Function):
    """Two results; its backward changes in place what it is given for the second."""

    @staticmethod
    def forward(ctx, x: Tensor) -> tuple[Tensor, Tensor]:  # [...]
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first: Tensor, second: Tensor) -> Tensor:
        return first * 2 + second.add_(1) * 3


def test_a_backward_that_changes_the_gradient_of_an_unused_result_is_given_none_each_time(device):
    """The next callable reads its own at the same address."""
    changes, reads = make_graphed_callables(
        (lambda x: ChangesItsGradient.apply(x), lambda x: (x * 2, x * 3)), ((batch(device),), (batch(device),))
    )
    for _ in range(3):
        x, y, grad = batch(device), batch(device), batch(device).detach()
        changes(x)[0].backward(grad)
        reads(y)[0].backward(grad)
        assert torch.equal(x.grad, grad * 2 + 3)
        assert torch.equal(y.grad, grad * 2)


def test_an_fp8_result_that_gets_no_gradient(device):
    graphed = make_graphed_callables(lambda x: (x * 2, (x * 3).to(torch.float8_e4m3fn)), (batch(device),))
    for _ in range(2):
        x, grad = batch(device), batch(device).detach()
        y, _ = graphed(x)
        y.backward(grad)
        assert torch.equal(x.grad, grad * 2)
