"""Backwards in which some results get no gradient. What these alone lead to is passed by in eager execution, and run
with zeros by a replay: that is the same where zeros become zeros, and an error where they do not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import backward_of, eager_copy, gradients_of, leaf_copy

import te_graph
from te_graph import graph_layers, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class AuxiliaryLoss(torch.autograd.Function):
    """Adds the gradient of a loss that is in no result, as routers of mixtures of experts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:  # [n, 4], [] -> [n, 4]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # [n, 4] -> [n, 4], []
        return grad, torch.ones((), device=grad.device)


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        return grad * torch.rand_like(grad)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        return grad * 0.5


class Net(nn.Module):
    """A trunk with heads; ``head`` gets the net and [n, 4], and returns [n, 4]."""

    def __init__(self, device: str, head: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.trunk, self.router, *self.lasts = (nn.Linear(4, 4, device=device) for _ in range(5))
        self.lasts, self.norm = nn.ModuleList(self.lasts), nn.BatchNorm1d(4, device=device)
        self.dropout, self.head = nn.Dropout(0.3), head
        self.register_buffer("largest", torch.zeros((), device=device))

    def hooked(self, h: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:  # [n, 4] -> [n, 4]
        h = self.router(h)
        if h.requires_grad:
            h.register_hook(hook)
        return h.sin()

    def note(self, grad: Tensor) -> None:  # [n, 4]
        self.largest.copy_(torch.maximum(self.largest * 0.9, grad.abs().max()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [n, 4] -> [n, 4], [n, 4]
        h = self.dropout(self.trunk(x)).tanh()
        return self.lasts[0](h), self.lasts[1](self.head(self, h))


class ThreeHeads(Net):
    """The last two have ``head`` in common."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [n, 4] -> [n, 4] each
        h = self.trunk(x).tanh()
        inner = self.head(self, h)
        return self.lasts[0](h), self.lasts[1](inner), self.lasts[2](inner)


class HeadsOfOneTrunk(Net):
    """Both have ``head`` in common."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [n, 4] -> [n, 4], [n, 4]
        h = self.head(self, self.trunk(x).tanh())
        return self.lasts[0](h), self.lasts[1](h)


def with_loss(net: Net, h: Tensor) -> Tensor:
    return AuxiliaryLoss.apply(h, net.router(h).softmax(-1).square().mean())


def on_node(net: Net, h: Tensor) -> Tensor:
    h = net.router(h).sin()
    if h.requires_grad:
        h.grad_fn.register_hook(lambda grads, given: (grads[0] + 1,))
    return h


NONLINEAR: dict[str, tuple[Callable[[Net, Tensor], Tensor], str]] = {
    "an auxiliary loss": (with_loss, r"makes other gradients than zeros of zeros \(AuxiliaryLossBackward\)"),
    "noise": (lambda net, h: Noise.apply(h), r"draws random numbers \(NoiseBackward\)"),
    "dropout in a hook": (lambda net, h: net.hooked(h, net.dropout), r"draws random numbers \(a hook before Addmm"),
    "a buffer": (lambda net, h: net.hooked(h, net.note), r"writes a tensor outside \(a hook before Addmm"),
    "a sum in a hook": (
        lambda net, h: net.hooked(h, lambda grad: grad + 1),
        r"makes other gradients than zeros of zeros \(a hook before Addmm",
    ),
    "a norm": (
        lambda net, h: net.hooked(h, lambda grad: grad / grad.norm()),
        r"makes other gradients than zeros of zeros \(a hook before Addmm",
    ),
    "a sum in a hook on a node": (on_node, r"makes other gradients than zeros of zeros \(SinBackward"),
    "statistics of a checkpoint": (
        lambda net, h: checkpoint(lambda h: net.norm(h).sin(), h, use_reentrant=False),
        r"writes a tensor outside \(",
    ),
}
LINEAR: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "torch's own": lambda net, h: net.router(h).softmax(-1),
    "a function": lambda net, h: Scaled.apply(h),
    "a hook": lambda net, h: net.hooked(h, lambda grad: grad * 0.5),
    "a checkpoint that draws": lambda net, h: checkpoint(net.dropout, h, use_reentrant=False),
}
each_nonlinear = pytest.mark.parametrize(("head", "does"), NONLINEAR.values(), ids=NONLINEAR)


def batch(device: str) -> Tensor:  # [5, 4]
    return torch.randn(5, 4, device=device, requires_grad=True)


def pair(kind: type[Net], head: Callable[[Net, Tensor], Tensor], device: str, **options: Any) -> tuple[Net, Net]:
    """A graphed net and one that is not."""
    net = kind(device, head)
    twin = eager_copy(net)
    make_graphed_callables(net, (batch(device),), **options)
    return net, twin


def state_of(net: nn.Module, x: Tensor) -> list[Any]:  # [5, 4]
    return [gradients_of([x, *net.parameters()]), [b.clone() for b in net.buffers()], torch.get_rng_state()]


def seen(net: nn.Module, x: Tensor, used: list[int]) -> list[Any]:  # [5, 4]
    """What a step with the results ``used`` leaves."""
    torch.manual_seed(7)
    x = leaf_copy(x)
    results = net(x)
    backward_of([results[number] for number in used])
    return [[result.detach().clone() for result in results], state_of(net, x)]


@each_nonlinear
def test_a_replay_would_not_be_right_without_the_gradient(device, head, does):
    net, twin = pair(Net, head, device)
    assert_bitwise_equal(seen(net, x := batch(device), [0, 1]), seen(twin, x, [0, 1]))
    torch.manual_seed(7)
    x = batch(device)
    results = net(x)
    before = state_of(net, x)
    with pytest.raises(RuntimeError, match=f"no gradient comes for result 1, and the backward of that alone {does}"):
        backward_of(results[0], retain_graph=True)
    assert_bitwise_equal(state_of(net, x), before)
    backward_of(results)
    torch.manual_seed(7)
    again = leaf_copy(x)
    torch.manual_seed(7)
    batch(device)
    backward_of(twin(again))
    assert_bitwise_equal(state_of(net, x), state_of(twin, again))
    assert_bitwise_equal(seen(net, x, [1]), seen(twin, x, [1]))


@pytest.mark.parametrize("head", LINEAR.values(), ids=LINEAR)
def test_what_makes_zeros_of_zeros_runs(device, head):
    net, twin = pair(Net, head, device)
    for used in ([0], [0, 1], [1], [0]):
        x = batch(device)
        assert_bitwise_equal(seen(net, x, used), seen(twin, x, used))


@each_nonlinear
def test_one_of_the_results_that_lead_there_is_enough(device, head, does):
    net, twin = pair(ThreeHeads, head, device)
    for used in ([0, 2], [1], [0, 1, 2]):
        x = batch(device)
        assert_bitwise_equal(seen(net, x, used), seen(twin, x, used))
    with pytest.raises(
        RuntimeError, match=f"no gradient comes for results \\[1, 2\\], and the backward of these alone {does}"
    ):
        backward_of(net(batch(device))[0])


@each_nonlinear
def test_what_all_results_lead_to_always_runs(device, head, does):
    net, twin = pair(HeadsOfOneTrunk, head, device)
    for used in ([0], [1], [0, 1]):
        x = batch(device)
        assert_bitwise_equal(seen(net, x, used), seen(twin, x, used))


def test_a_layer_of_a_chain_is_looked_at(device):
    layers = [Net(device, with_loss), nn.Linear(4, 4, device=device)]
    twins = [eager_copy(layer) for layer in layers]
    make_graphed_callables(tuple(layers), ((batch(device),), (batch(device),)), chain=True)

    def gradients(each: list[nn.Module]) -> list[Any]:
        return [gradients_of(list(layer.parameters())) for layer in each]

    for _ in range(3):
        x = batch(device)
        for first, second in (layers, twins):
            torch.manual_seed(7)
            y, other = first(x)
            backward_of([second(y), other])
        assert_bitwise_equal(gradients(layers), gradients(twins))
    before = gradients(layers[:1])
    with pytest.raises(RuntimeError, match=r"\(Net\): no gradient comes for result 1"):
        backward_of(layers[1](layers[0](batch(device))[0]))
    assert_bitwise_equal(gradients(layers[:1]), before)


class Fp8Heads(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        make = functools.partial(te_graph.Linear, 32, 32, device=device, params_dtype=torch.bfloat16)
        self.trunk, self.first, self.second = make(), make(), make()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [32, 32] -> [32, 32], [32, 32]
        h = self.trunk(x).tanh()
        return self.first(h), self.second(h)


def test_amaxes_of_fp8_stay_what_they_are(device):
    net, recipe = Fp8Heads(device), te_graph.DelayedScaling(amax_history_len=3)
    twin = eager_copy(net)

    def x() -> Tensor:  # [32, 32]
        return torch.randn(32, 32, device=device, dtype=torch.bfloat16, requires_grad=True)

    with te_graph.fp8_autocast(recipe=recipe):
        make_graphed_callables(net, (x(),))
    for used in ([0], [0, 1], [0], [0], [1], [0, 1], [0, 1]):
        given = x()
        for model in (net, twin):
            model.zero_grad()
            with te_graph.fp8_autocast(recipe=recipe):
                results = model(leaf_copy(given))
            backward_of([results[number] for number in used])
        assert_bitwise_equal(*(gradients_of(list(model.parameters())) for model in (net, twin)))


class Model(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Net(device, with_loss), Net(device, LINEAR["a function"])])

    def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        for layer in self.layers:
            x = layer(x)[0]
        return x


def test_a_layer_whose_step_shows_that_no_gradient_comes_is_left_out(device):
    model = Model(device)
    twin = eager_copy(model)
    report = graph_layers(model, lambda: backward_of(model(batch(device))))
    assert report.layers == ("layers.1",)
    assert "no gradient comes for result 1" in str(report)
    for _ in range(2):
        x = batch(device)
        for one in (model, twin):
            torch.manual_seed(7)
            backward_of(one(x))
        assert_bitwise_equal(gradients_of(list(model.parameters())), gradients_of(list(twin.parameters())))
