"""Silent hazards of graph replay in what changes between a forward and its backward: hooks and requires_grad.

The reference is eager execution of copies of the same layers on the same inputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from chain_layers import Layer, Nets, Shift, batch, in_turn, layers_on, parameters_of
from chains import assert_same, assert_same_steps, chain, counts, eager_calls
from torch import Tensor, nn
from twins import eager_copy, gradients_of

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
Note = Callable[[Tensor], None]


@pytest.fixture(params=[False, True], ids=["apart", "chain"])
def is_chain(request: pytest.FixtureRequest) -> bool:
    return request.param


def capture(layers: Nets, is_chain: bool, **options: Any) -> list[nn.Module]:
    """Capture ``layers`` as a chain or each by itself; returns their eager twins."""
    sample = batch(str(parameters_of(layers)[0].device)).to(parameters_of(layers)[0].dtype).detach().requires_grad_()
    if is_chain:
        return chain(layers, sample, **options)
    twins = list(eager_copy(nn.ModuleList(layers)))
    make_graphed_callables(tuple(layers), ((sample,),) * len(layers), **options)
    return twins


def accumulator(parameter: Tensor) -> torch.autograd.graph.Node:
    """The AccumulateGrad node of ``parameter`` [...]. It lives as long as it is referred to."""
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def tensor_hook(parameter: Tensor, note: Note) -> list[Any]:
    return [parameter.register_hook(lambda grad: note(grad) or grad * 3)]


def post_accumulate_hook(parameter: Tensor, note: Note) -> list[Any]:
    def halve(hooked: Tensor) -> None:
        note(hooked.grad)
        hooked.grad.mul_(0.5)

    return [parameter.register_post_accumulate_grad_hook(halve)]


def hook_before_the_node(parameter: Tensor, note: Note) -> list[Any]:
    node = accumulator(parameter)
    return [node.register_prehook(lambda grads: note(grads[0]) or (grads[0] * 3,)), node]


def hook_after_the_node(parameter: Tensor, note: Note) -> list[Any]:
    node = accumulator(parameter)
    return [node.register_hook(lambda *_: note(parameter.grad)), node]


def hook_like_ddp(parameter: Tensor, note: Note) -> list[Any]:
    """Gathers the gradient in a bucket, and lets ``.grad`` be a view of it."""
    node, bucket = accumulator(parameter), torch.zeros(parameter.numel() + 3, device=parameter.device)
    view = bucket[3:].view_as(parameter)

    def reduce(*_: Any) -> None:
        note(parameter.grad)
        if parameter.grad is not view:
            view.copy_(parameter.grad)
            parameter.grad = view
        bucket.div_(2)

    return [node.register_hook(reduce), node]


def several_hooks(parameter: Tensor, note: Note) -> list[Any]:
    kinds = [post_accumulate_hook, hook_after_the_node, tensor_hook, hook_before_the_node, tensor_hook]
    return [one for kind in kinds for one in kind(parameter, note)]


KINDS = [
    tensor_hook,
    post_accumulate_hook,
    hook_before_the_node,
    hook_after_the_node,
    hook_like_ddp,
    several_hooks,
]


class Hooks:
    """Hooks of one kind on some parameters, and what they have seen: (number of the parameter, gradient)."""

    def __init__(self, kind: Callable[[Tensor, Note], list[Any]], nets: Nets, which: slice) -> None:
        self.seen: list[tuple[int, Tensor]] = []
        self._held: list[Any] = []
        for number, parameter in list(enumerate(parameters_of(nets)))[which]:
            self._held += kind(parameter, lambda grad, number=number: self.seen.append((number, grad.clone())))

    def remove(self) -> None:
        for one in self._held:
            if not isinstance(one, torch.autograd.graph.Node):
                one.remove()
        self._held.clear()

    def sorted(self) -> list[tuple[int, Tensor]]:
        """By parameter: no order is promised among parameters of one callable, in eager execution neither."""
        return sorted(self.seen, key=lambda entry: entry[0])


def plain(nets: Nets, x: Tensor) -> None:
    in_turn(nets, x).square().sum().backward()


WHICH = {"one": slice(6, 7), "all": slice(None)}


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_of(5)
def test_a_hook_added_to_a_parameter_after_the_forward_runs_once_in_its_backward(device, is_chain, kind, which):
    layers = layers_on(device, Layer, Layer, Shift)
    twins = capture(layers, is_chain)
    runs = {"several_hooks": 5}.get(kind.__name__, 1)

    def hooked(nets: Nets, x: Tensor) -> list[Any]:
        result = in_turn(nets, x)
        hooks = Hooks(kind, nets, WHICH[which])
        result.square().sum().backward()
        hooks.remove()
        assert len(hooks.seen) == runs * len(parameters_of(nets)[WHICH[which]])
        seen = hooks.sorted()
        plain(nets, x * 2)
        assert len(hooks.seen) == len(seen)
        return seen

    for scenario in (hooked, plain, plain, hooked, plain):  # after replays that repeat each other, too
        assert_same_steps(layers, twins, scenario, device)
    assert eager_calls(layers) == [0] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_added_after_the_forward_and_removed_before_the_backward_does_not_run(device, is_chain, kind):
    layers = layers_on(device)
    twins = capture(layers, is_chain)

    def scenario(nets: Nets, x: Tensor) -> None:
        result = in_turn(nets, x)
        hooks = Hooks(kind, nets, slice(None))
        hooks.remove()
        result.square().sum().backward()
        assert not hooks.seen

    assert_same_steps(layers, twins, scenario, device)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_of(5)
def test_a_hook_added_after_the_forward_does_not_run_where_the_backward_is_for_inputs_alone(device, is_chain, kind):
    layers = layers_on(device)
    twins = capture(layers, is_chain)

    def scenario(nets: Nets, x: Tensor) -> list[Any]:
        before = gradients_of(parameters_of(nets))
        result = in_turn(nets, x)
        hooks = Hooks(kind, nets, slice(None))
        loss = result.square().sum()
        (seen,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward(inputs=[x], retain_graph=True)
        assert not hooks.seen
        assert_bitwise_equal(gradients_of(parameters_of(nets)), before)
        loss.backward()
        hooks.remove()
        assert hooks.seen
        return [seen, *hooks.sorted()]

    assert_same_steps(layers, twins, scenario, device)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_added_between_two_backwards_of_one_forward_runs_in_the_second(device, is_chain, kind):
    layers = layers_on(device)
    twins = capture(layers, is_chain)

    def scenario(nets: Nets, x: Tensor) -> list[Any]:
        loss = in_turn(nets, x).square().sum()
        loss.backward(retain_graph=True)
        hooks = Hooks(kind, nets, slice(None, None, 2))
        loss.backward(retain_graph=True)
        hooks.remove()
        loss.backward()
        return hooks.sorted()

    assert_same_steps(layers, twins, scenario, device)


def test_a_hook_added_with_two_forwards_in_flight_runs_in_the_backwards_that_come_before_its_removal(device, is_chain):
    layers = layers_on(device)
    twins = capture(layers, is_chain, max_in_flight=3)

    def scenario(nets: Nets, x: Tensor) -> list[Any]:
        losses = [in_turn(nets, x * factor).square().sum() for factor in (1, 2, 3)]
        losses[1].backward()
        hooks = Hooks(tensor_hook, nets, slice(None))
        losses[2].backward()
        hooks.remove()
        losses[0].backward()
        assert len(hooks.seen) == len(parameters_of(nets))
        return hooks.sorted()

    assert_same_steps(layers, twins, scenario, device)


def test_hooks_added_after_the_forward_run_from_the_last_layer_to_the_first(device, is_chain):
    layers = layers_on(device, *[Shift] * 4)
    twins = capture(layers, is_chain)

    def scenario(nets: Nets, x: Tensor) -> list[Any]:
        result = in_turn(nets, x)
        hooks = Hooks(tensor_hook, nets, slice(None))
        result.square().sum().backward()
        hooks.remove()
        assert [number for number, _ in hooks.seen] == [3, 2, 1, 0]
        return hooks.seen

    for _ in range(3):
        assert_same(layers, twins, scenario, batch(device))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [n, 6] -> [n, 6], [n, 2]
        return self.left(x), self.right(x)


def plain_with_one_head(nets: Nets, x: Tensor) -> None:
    in_turn(nets, x)[0].square().sum().backward()


def test_a_hook_added_after_the_forward_does_not_run_where_the_loss_does_not_depend_on_its_parameter(device, is_chain):
    layers = layers_on(device, Layer, TwoHeads)
    twins = capture(layers, is_chain)

    def scenario(nets: Nets, x: Tensor) -> list[Any]:
        left, _ = in_turn(nets, x)
        hooks = Hooks(tensor_hook, nets, slice(None))
        left.square().sum().backward()
        hooks.remove()
        assert {number for number, _ in hooks.seen} == {0, 1, 2, 3, 4, 5}
        return hooks.sorted()

    for _ in range(2):
        assert_same(layers, twins, plain_with_one_head, batch(device))
    assert_same(layers, twins, scenario, batch(device))


class Mine(Exception):
    """An exception of the user's own."""


def test_an_exception_of_a_hook_added_after_the_forward_reaches_the_caller_and_training_goes_on(device, is_chain):
    layers = layers_on(device)
    twins = capture(layers, is_chain)
    raised: list[bool] = []

    def scenario(nets: Nets, x: Tensor) -> None:
        def fail(grad: Tensor) -> None:
            raise Mine

        loss = in_turn(nets, x).square().sum()
        hook = nets[1].up.weight.register_hook(fail)
        try:  # pytest.raises would keep the traceback, and with it the loss
            loss.backward()
        except Mine:
            raised.append(nets is layers)
        hook.remove()
        del loss
        # The engine's thread for a GPU lets go of the nodes of a backward that raised a little after it has told so.
        deadline = time.monotonic() + 2
        while any(counts(layers, "in_flight")) and time.monotonic() < deadline:
            time.sleep(0.001)
        x.grad = None
        for net in nets:
            net.zero_grad()
        plain(nets, x)

    for _ in range(2):
        assert_same(layers, twins, plain, batch(device))
    assert_same(layers, twins, scenario, batch(device))
    assert raised == [False, True]
    assert counts(layers, "in_flight") == [0] * 3


FROZEN = {"one": slice(6, 7), "a layer": slice(4, 8), "every other": slice(0, None, 2), "all": slice(None)}


@pytest.mark.parametrize("which", FROZEN)
def test_a_parameter_frozen_after_the_forward_gets_no_gradient_in_its_backward(device, is_chain, which):
    layers = layers_on(device)
    twins = capture(layers, is_chain)

    def frozen(nets: Nets, x: Tensor) -> None:
        chosen = parameters_of(nets)[FROZEN[which]]
        for _ in range(2):  # so that the next backward would repeat the last one
            plain(nets, x)
        before = gradients_of(chosen)
        result = in_turn(nets, x)
        for parameter in chosen:
            parameter.requires_grad_(False)
        result.square().sum().backward()
        assert_bitwise_equal(gradients_of(chosen), before)
        for parameter in chosen:
            parameter.requires_grad_(True)

    for scenario in (frozen, plain):
        assert_same_steps(layers, twins, scenario, device)
    assert eager_calls(layers) == [0] * 3


def test_a_parameter_frozen_with_two_forwards_in_flight_gets_the_gradients_from_before_and_after(device, is_chain):
    layers = layers_on(device)
    twins = capture(layers, is_chain, max_in_flight=3)

    def scenario(nets: Nets, x: Tensor) -> None:
        losses = [in_turn(nets, x * factor).square().sum() for factor in (1, 2, 3)]
        losses[0].backward()
        nets[1].requires_grad_(False)
        losses[1].backward()
        nets[1].requires_grad_(True)
        losses[2].backward()

    assert_same_steps(layers, twins, scenario, device)


each_hook = pytest.mark.parametrize(
    "kind", [tensor_hook, post_accumulate_hook, hook_before_the_node, hook_after_the_node]
)


def shifts_with_gradients(device: str, is_chain: bool) -> tuple[list[nn.Module], list[nn.Module]]:
    """Two captured layers of one parameter each, and their eager twins; all have gradients."""
    layers = layers_on(device, Shift, Shift)
    twins = capture(layers, is_chain)
    for net in (*layers, *twins):
        net.shift.grad = torch.ones_like(net.shift)
    return layers, twins


def backward_while_frozen(nets: Nets, result: Tensor) -> None:  # [n, 6]
    for net in nets:
        net.requires_grad_(False)
    result.square().sum().backward()
    for net in nets:
        net.requires_grad_(True)


@each_hook
def test_a_parameter_with_a_hook_that_is_frozen_after_the_forward_is_treated_as_in_eager_execution(
    device, is_chain, kind
):
    layers, twins = shifts_with_gradients(device, is_chain)

    def scenario(nets: Nets, x: Tensor) -> list[Any]:
        hooks = Hooks(kind, nets, slice(None))
        result = in_turn(nets, x)
        backward_while_frozen(nets, result)
        hooks.remove()
        return hooks.sorted()

    for _ in range(2):
        assert_same(layers, twins, scenario, batch(device))


def test_a_parameter_that_stays_frozen_after_the_backward_is_refused_by_name_in_the_next_forward(device, is_chain):
    layers = layers_on(device)
    twins = capture(layers, is_chain)

    def scenario(nets: Nets, x: Tensor) -> None:
        result = in_turn(nets, x)
        nets[0].down.bias.requires_grad_(False)
        result.square().sum().backward()

    assert_same(layers, twins, scenario, batch(device))
    with pytest.raises(RuntimeError, match=r"bias of down changed requires_grad from True .*reset\(\)"):
        layers[0](batch(device))


def test_the_main_grad_of_a_parameter_frozen_after_the_forward_stays_as_it_is(device, is_chain):
    layers = [layer.to(torch.bfloat16) for layer in layers_on(device)]
    twins = capture(layers, is_chain, grad_dtype=torch.float32)
    expected = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters_of(layers)]
    for freezes in (False, True, False, True, False):
        x = batch(device).detach().to(torch.bfloat16).requires_grad_()
        for nets in (layers, twins):
            result = in_turn(nets, x)
            nets[1].requires_grad_(not freezes)
            result.square().sum().backward()
            nets[1].requires_grad_(True)
        for total, parameter in zip(expected, parameters_of(twins), strict=True):
            if parameter.grad is not None:
                total += parameter.grad.float()
            parameter.grad = None
        assert_bitwise_equal([parameter.main_grad for parameter in parameters_of(layers)], expected)
    assert all(parameter.grad is None for parameter in parameters_of(layers))


@each_hook
def test_a_parameter_that_gets_a_hook_and_is_frozen_after_the_forward_is_treated_as_in_eager_execution(
    device, is_chain, kind
):
    layers, twins = shifts_with_gradients(device, is_chain)

    def scenario(nets: Nets, x: Tensor) -> list[Any]:
        result = in_turn(nets, x)
        hooks = Hooks(kind, nets, slice(None))
        backward_while_frozen(nets, result)
        hooks.remove()
        return hooks.sorted()

    for _ in range(2):
        assert_same(layers, twins, scenario, batch(device))
