"""Callables that change their arguments in place: the caller's tensor has the values and the history of eager ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hazards import batch
from torch import Tensor, nn
from twins import eager_copy, gradients_of

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def convolutional(device: str) -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.LeakyReLU(0.1, inplace=True)).to(device)


def steps(net: Callable[[Tensor], Tensor], device: str, use: Callable[[Tensor, Tensor], Tensor]) -> list:
    """What ``use`` makes of the argument and the result, in several steps of training; an argument is computed."""
    torch.manual_seed(2)
    seen: list[Any] = []
    for _ in range(3):
        x = batch(device)
        hidden = x * 1.5
        version = hidden._version
        result = net(hidden)
        assert hidden._version > version
        seen.append([hidden.detach().clone(), result.detach().clone(), hidden.requires_grad])
        use(hidden, result).backward()
        seen += [x.grad, gradients_of(list(net.parameters()) if isinstance(net, nn.Module) else [])]
        del hidden, result
    return seen


USES = {
    "result alone": lambda hidden, result: result.square().sum(),
    "both, as a skip connection": lambda hidden, result: (hidden * 3).square().sum() - result.exp().sum(),
    "argument twice": lambda hidden, result: (hidden * hidden * 3).sum() + result.square().sum(),
    "argument alone": lambda hidden, result: hidden.square().sum(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_an_in_place_activation_first(device, use):
    net = convolutional(device)
    twin = eager_copy(net)
    make_graphed_callables(net, (batch(device),))
    assert_bitwise_equal(steps(net, device, use), steps(twin, device, use))
    assert net.te_graph.info()["forward_replays"] == 3


def itself(x: Tensor) -> Tensor:  # [3, 4]
    return x.mul_(2).sigmoid_()


def a_view(x: Tensor) -> Tensor:  # [3, 4] -> [4, 3]
    return x.exp_().t()


def a_part(x: Tensor) -> Tensor:  # [3, 4] -> [3]
    x[1:].mul_(3)
    return x.sum(1)


def silently(x: Tensor) -> Tensor:  # [3, 4]
    y = x * 2
    with torch.no_grad():
        x.add_(1)
    return y


@pytest.mark.parametrize("function", [itself, a_view, a_part, silently])
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_functions(device, function, use):
    graphed = make_graphed_callables(function, (batch(device),))
    assert_bitwise_equal(steps(graphed, device, use), steps(function, device, use))
    assert graphed.te_graph.info()["forward_replays"] == 3


def test_what_is_returned_is_the_argument_itself(device):
    graphed = make_graphed_callables(lambda x, y: {"x": x.mul_(y), "z": y * 2}, (batch(device), batch(device)))
    hidden = batch(device) * 2
    assert graphed(hidden, batch(device))["x"] is hidden


def test_without_gradients(device):
    def step(x: Tensor, state: Tensor) -> Tensor:  # [3, 4], [3, 4]
        state.mul_(0.9).add_(x)
        return state * 2

    for context in (torch.no_grad, torch.enable_grad):
        with context():
            graphed = make_graphed_callables(step, tuple(batch(device, requires_grad=False) for _ in range(2)))
            states = [torch.zeros(3, 4, device=device) for _ in range(2)]
            for _ in range(3):
                x = batch(device, requires_grad=False)
                results = [call(x, state) for call, state in zip((graphed, step), states, strict=True)]
                assert_bitwise_equal([results[0], states[0]], [results[1], states[1]])
        assert graphed.te_graph.info()["forward_replays"] == 3


def test_an_argument_without_gradient_that_gets_one(device):
    weight = torch.randn(4, device=device, requires_grad=True)

    def scale(x: Tensor) -> Tensor:  # [3, 4]
        return x.mul_(weight) + 1

    graphed, seen = make_graphed_callables(scale, (batch(device, requires_grad=False),)), []
    x = batch(device, requires_grad=False)
    for call in (graphed, scale):
        weight.grad, changed = None, x.clone()
        result = call(changed)
        assert changed.requires_grad and not changed.is_leaf
        (result * changed).sum().backward()
        seen.append([result.detach(), changed.detach(), weight.grad])
    assert_bitwise_equal(*seen)


def test_a_view_of_a_computed_tensor(device):
    net = convolutional(device)
    twin = eager_copy(net)
    make_graphed_callables(net, (batch(device),))
    x, seen = torch.randn(2, 3, 4, device=device), []
    for one in (net, twin):
        leaf = x.clone().requires_grad_()
        base = leaf * 2
        result = one(base[1])
        (result.sum() + base.square().sum()).backward()
        seen.append([base.detach(), result.detach(), leaf.grad + 0.0, gradients_of(list(one.parameters()))])
    assert_bitwise_equal(*seen)
    assert net.te_graph.info()["forward_replays"] == 1


def test_an_argument_that_gets_no_gradient_adds_none(device):
    """Not even a zero: 0.0 and -0.0 are 0.0."""
    net, seen = lambda x: x.mul_(2) + 1, []
    graphed = make_graphed_callables(net, (batch(device),))
    for call in (graphed, net):
        x = batch(device)
        call(x * 3).backward(torch.full((3, 4), -0.0, device=device))
        seen.append(x.grad)
    assert_bitwise_equal(*seen)


@pytest.mark.parametrize("retains", [False, True])
def test_hooks_and_retained_gradients_of_the_argument(device, retains):
    net = convolutional(device)
    twin = eager_copy(net)
    make_graphed_callables(net, (batch(device),))
    x, seen = batch(device), []
    for one in (net, twin):
        x.grad, hooked = None, []
        hidden = x * 1.5
        if retains:
            hidden.retain_grad()
        hidden.register_hook(lambda grad, hooked=hooked: hooked.append(grad.clone()))
        result = one(hidden)
        (result + hidden).square().sum().backward()
        seen.append([hooked, hidden.grad if retains else None, x.grad])
    assert_bitwise_equal(*seen)
    assert net.te_graph.info()["forward_replays"] == (0 if retains else 1)


LOOKS = {
    "hook": lambda looked_at, loss: (looked_at.register_hook(lambda grad: grad * 2), loss.backward()),
    "retained": lambda looked_at, loss: (looked_at.retain_grad(), loss.backward()),
    "asked for": lambda looked_at, loss: torch.autograd.grad(loss, looked_at),
    "only input": lambda looked_at, loss: loss.backward(inputs=[looked_at]),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("place", ["argument", "view", "what it is a view of"])
def test_who_looks_at_the_argument_since_the_call_is_refused_where_part_of_its_gradient_is_inside(device, look, place):
    graphed = make_graphed_callables(lambda x: x.mul_(2) * 3, (batch(device),))
    base = torch.randn(4, 4, device=device, requires_grad=True) * 1.5
    hidden = base[1:] if place != "argument" else batch(device) * 1.5
    result = graphed(hidden)
    loss = (result + hidden * 5).sum()
    with pytest.raises(RuntimeError, match=r"args\[0\], which the call changed in place, has a hook .* pass a clone"):
        look(base if place == "what it is a view of" else hidden, loss)
    assert graphed.te_graph.info()["forward_replays"] == 1


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("function", [lambda x: x.mul_(2), lambda x: (x.mul_(2), x.detach() * 3)])
def test_who_looks_at_the_argument_since_the_call_sees_all_where_nothing_is_computed_from_it(device, look, function):
    graphed, seen = make_graphed_callables(function, (batch(device),)), []
    torch.manual_seed(2)
    values = torch.randn(3, 4, device=device)
    for one in (graphed, function):
        x = values.clone().requires_grad_()
        hidden = x * 1.5
        one(hidden)
        seen.append([look(hidden, (hidden * 5).sum()) is None, x.grad, hidden.grad if hidden.retains_grad else None])
    assert_bitwise_equal(*seen)
    assert graphed.te_graph.info()["forward_replays"] == 1


def test_later_changes_of_the_argument_may_be_looked_at(device):
    function, seen = lambda x: x.mul_(2) * 3, []
    graphed = make_graphed_callables(function, (batch(device),))
    values = torch.randn(3, 4, device=device)
    for one in (graphed, function):
        x, hooked = values.clone().requires_grad_(), []
        hidden = x * 1.5
        result = one(hidden)
        hidden.mul_(7)
        hidden.register_hook(hooked.append)
        hidden.retain_grad()
        (result + hidden * 5).sum().backward()
        seen.append([hooked, hidden.grad, x.grad])
    assert_bitwise_equal(*seen)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x[:]], ids=["leaf", "view"])
def test_a_leaf_is_refused_as_in_eager_execution_before_anything_runs(device, make):
    net = convolutional(device)
    twin = eager_copy(net)
    make_graphed_callables(net, (batch(device),))
    x = batch(device)
    before = x.detach().clone()
    words = "leaf Variable that requires grad is being used in an in-place operation"
    for one in (net, twin):
        with pytest.raises(RuntimeError, match=words):
            one(make(x))
    assert_bitwise_equal(x.detach(), before)
    assert net.te_graph.info()["forward_replays"] == 0


@pytest.mark.parametrize("on_mismatch", ["raise", "eager", "capture"])
def test_an_argument_that_is_part_of_another_runs_eagerly(device, caplog, on_mismatch):
    def update(x: Tensor, y: Tensor) -> Tensor:  # [3, 4], [3, 4]
        x.mul_(2)
        return x + y

    samples = tuple(batch(device, requires_grad=False) for _ in range(2))
    graphed = make_graphed_callables(update, samples, on_mismatch=on_mismatch)
    values, seen = torch.randn(4, 4, device=device), []
    with caplog.at_level(logging.WARNING, "te_graph"):
        for call in (graphed, update):
            base = values.clone()
            seen.append([call(base[:3], base[1:]), base])
    assert_bitwise_equal(*seen)
    (told,) = caplog.records
    assert "args[0], which the call changes in place, shares memory with something else" in told.getMessage()
    assert graphed.te_graph.info()["recaptures"] == 0


OVERLAPPING = {
    "expanded": lambda values: values[:1].expand(3, 4),
    "expanded to three dimensions": lambda values: values[0].expand(2, 3, 4)[1],
    "windows": lambda values: values.view(-1)[:6].unfold(0, 4, 1),
}


@pytest.mark.parametrize("on_mismatch", ["raise", "eager", "capture"])
@pytest.mark.parametrize("argument_of", OVERLAPPING.values(), ids=OVERLAPPING)
def test_an_argument_whose_elements_share_memory_runs_eagerly(device, caplog, argument_of, on_mismatch):
    def update(x: Tensor, y: Tensor) -> Tensor:  # [3, 4], [3, 4]
        y[1].zero_()
        return x + y

    samples = tuple(batch(device, requires_grad=False) for _ in range(2))
    graphed = make_graphed_callables(update, samples, on_mismatch=on_mismatch)
    values, seen = torch.randn(4, 4, device=device), []
    with caplog.at_level(logging.WARNING, "te_graph"):
        for call in (graphed, update):
            base = values.clone()
            seen.append([call(samples[0], argument_of(base)), base])
    assert_bitwise_equal(*seen)
    (told,) = caplog.records
    assert "update: args[1], which the call changes in place, has elements that share memory" in told.getMessage()
    info = graphed.te_graph.info()
    assert (info["forward_replays"], info["recaptures"]) == (0, 0)


APART = {
    "gaps": lambda values: values[:, ::2].t()[:2],
    "transposed": lambda values: values[:3, :].t()[:2, :3],
    "of size 1": lambda values: values[:1, :1].expand(1, 1),
    "empty": lambda values: values[:0].expand(3, 0, 4),
}


@pytest.mark.parametrize("argument_of", APART.values(), ids=APART)
def test_an_argument_with_gaps_is_changed_by_a_replay(device, argument_of):
    def update(y: Tensor) -> Tensor:  # [...]
        y.view_as(y).mul_(2)
        return y + 1

    values = torch.randn(4, 4, device=device)
    graphed, seen = make_graphed_callables(update, (argument_of(values),)), []
    for call in (graphed, update):
        base = values.clone()
        seen.append([call(argument_of(base)), base])
    assert_bitwise_equal(*seen)
    assert graphed.te_graph.info()["forward_replays"] == 1


def test_an_argument_without_memory_is_refused(device):
    net = nn.ReLU(inplace=True)
    make_graphed_callables(net, (torch.randn(3, 4, device=device),))
    with pytest.raises(ValueError, match="layout Strided, got Sparse"):
        net(torch.eye(3, 4, device=device).to_sparse())


def test_an_argument_that_is_a_buffer_of_the_callable_runs_eagerly(device):
    table = torch.randn(3, 4, device=device)

    def update(x: Tensor) -> Tensor:  # [3, 4]
        x.mul_(2)
        return x + table

    graphed = make_graphed_callables(update, (batch(device, requires_grad=False),))
    before = table.clone()
    result = graphed(table)
    assert_bitwise_equal([result, table], [before * 2 + before * 2, before * 2])
    assert graphed.te_graph.info()["forward_replays"] == 0


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("uses_between", [False, True])
def test_in_a_chain(device, everything, uses_between):
    layers = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)).to(device) for _ in range(3)]
    twins = [eager_copy(layer) for layer in layers]
    samples = ((batch(device),),) if everything else tuple((batch(device),) for _ in layers)
    make_graphed_callables(tuple(layers), samples, chain=True)
    seen = []
    for chain in (layers, twins):
        torch.manual_seed(2)
        for _ in range(3):
            x = batch(device)
            hidden = [x * 1.5]
            for layer in chain:
                hidden.append(layer(hidden[-1]))
            seen.append([one.detach().clone() for one in hidden])
            loss = sum(one.square().sum() for one in hidden) if uses_between else hidden[-1].square().sum()
            loss.backward()
            seen += [x.grad, gradients_of([p for layer in chain for p in layer.parameters()])]
            del hidden, loss
    assert_bitwise_equal(seen[:9], seen[9:])
    assert [layer.te_graph.info()["forward_replays"] for layer in layers] == [3, 3, 3]


def test_another_capture_for_another_shape(device):
    net = convolutional(device)
    twin = eager_copy(net)
    make_graphed_callables(net, (batch(device),), on_mismatch="capture")
    for rows in (3, 5, 3, 5):
        x, seen = torch.randn(rows, 4, device=device), []
        for one in (net, twin):
            leaf = x.clone().requires_grad_()
            hidden = leaf * 2
            result = one(hidden)
            (result + hidden).sum().backward()
            seen.append([hidden.detach(), result.detach(), leaf.grad])
        assert_bitwise_equal(*seen)
    assert net.te_graph.info()["forward_replays"] == 4
