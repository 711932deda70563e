"""Functions that a forward makes and that run in its backward: hooks, what a checkpoint computes again, an
autograd.Function. What they close over is made anew by each call, and no state of the callable."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import backward_of, eager_copy, gradients_of, leaf_copy, train

from te_graph import graph_layers, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")
SCALE = 2.0


class Config:
    scale = 2.0


class Layer(nn.Module):
    """``use`` gets the layer, x and mask, [3, 4] each, and returns [3, 4]."""

    def __init__(self, device: str, use: Callable[[Layer, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.use, self.config = nn.Linear(4, 4, device=device), use, Config()
        self.w = nn.Parameter(torch.linspace(0.5, 2.0, 4, device=device))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # [3, 4], [3, 4] -> [3, 4]
        return self.use(self, x, mask)


def hooked(layer: Layer, x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:  # [3, 4] -> [3, 4]
    y = layer.inner(x)
    if y.requires_grad:
        y.register_hook(hook)
    return y.sin()


def checkpoint_over_argument(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
    return checkpoint(lambda h: layer.inner(h) * mask, x, use_reentrant=False).sin()


def checkpoint_over_computed(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
    kept = (x.detach() > 0) * mask

    def masked(h: Tensor) -> Tensor:
        return layer.inner(h) * kept

    return checkpoint(masked, x, use_reentrant=False).sin()


def checkpoint_over_weight(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
    w = layer.w * 2
    return checkpoint(lambda h: layer.inner(h) * w, x, use_reentrant=False).sin()


def hook_over_argument(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
    return hooked(layer, x, lambda grad: grad * mask * x.detach())


def hook_over_computed(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
    norm = (x.detach() * mask).norm()
    return hooked(layer, x, lambda grad: grad / norm)


def hook_over_default(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
    norm = x.detach().norm()
    return hooked(layer, x, lambda grad, norm=norm: grad / norm)


def hook_over_weight(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
    w = layer.w.detach()
    return hooked(layer, x, lambda grad: grad * w)


def hook_on_node(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
    norm, y = x.detach().norm(), layer.inner(x).sin()
    if y.requires_grad:
        y.grad_fn.register_prehook(lambda grads: (grads[0] / norm,))
    return y * 1


def local_function(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
    kept = mask * 2

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, h: Tensor) -> Tensor:
            return h * kept

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
            return grad * kept * 1.5

    return Masked.apply(layer.inner(x))


def equilibrium(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
    """A deep equilibrium layer, whose implicit gradient a hook solves for."""

    def step(z: Tensor) -> Tensor:
        return torch.tanh(0.3 * layer.inner(z) + x * mask)

    with torch.no_grad():
        z = step(step(torch.zeros_like(x)))
    z = step(z)
    if z.requires_grad:
        fixed = z.detach().clone().requires_grad_()
        again = step(fixed)

        def solve(grad: Tensor) -> Tensor:
            solution = grad
            for _ in range(3):
                solution = torch.autograd.grad(again, fixed, solution, retain_graph=True)[0] + grad
            return solution

        z.register_hook(solve)
    return z


USES = [
    checkpoint_over_argument,
    checkpoint_over_computed,
    checkpoint_over_weight,
    hook_over_argument,
    hook_over_computed,
    hook_over_default,
    hook_over_weight,
    hook_on_node,
    local_function,
    equilibrium,
]
each_use = pytest.mark.parametrize("use", USES)


def arguments(device: str) -> tuple[Tensor, Tensor]:  # [3, 4], [3, 4]
    return torch.randn(3, 4, device=device, requires_grad=True), (torch.rand(3, 4, device=device) > 0.3).float()


def graphed_of(net: nn.Module, how: str, sample: tuple[Tensor, Tensor]) -> Callable:  # [3, 4], [3, 4]
    if how == "a function":
        return make_graphed_callables(lambda x, mask: net(x, mask), sample, max_in_flight=2)
    make_graphed_callables(net, *([] if how == "a late capture" else [sample]), max_in_flight=2)
    return net


@each_use
@pytest.mark.parametrize("how", ["samples", "a late capture", "a function"])
def test_what_it_closes_over_is_that_of_the_call(device, use, how):
    net = Layer(device, use)
    twin = eager_copy(net)
    graphed = graphed_of(net, how, arguments(device))
    for _ in range(3):
        calls = [arguments(device), arguments(device)]
        seen = []
        for call, model in ((graphed, net), (twin, twin)):
            given = leaf_copy(calls)
            results = [call(*each) for each in given]
            for result in reversed(results):
                backward_of(result)
            seen.append([[one.detach() for one in results], gradients_of([given, list(model.parameters())])])
        assert_bitwise_equal(*seen)
    assert graphed.te_graph.info()["backward_replays"] >= 4


@each_use
def test_layers_are_graphed(device, use):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer(device, use) for _ in range(3))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # [3, 4], [3, 4] -> [3, 4]
            for layer in self.layers:
                x = x + layer(x, mask)
            return x

    net = Net()
    twin = copy.deepcopy(net)
    report = graph_layers(net, lambda: backward_of(net(*arguments(device))))
    assert len(report.layers) == 3
    net.zero_grad()
    steps = [[arguments(device)] for _ in range(3)]
    assert_bitwise_equal(train(net, steps), train(twin, steps))


def test_one_that_is_kept_is_state(device):
    def kept(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
        norm = (x.detach() * mask).norm()
        layer.hook = lambda grad: grad / norm
        return hooked(layer, x, layer.hook)

    with pytest.raises(RuntimeError, match="leaves a tensor that it computed in closure variable norm"):
        make_graphed_callables(Layer(device, kept), arguments(device))


def test_one_that_is_kept_of_the_first_call_is_state(device):
    def kept(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
        if not hasattr(layer, "hook"):
            norm = (x.detach() * mask).norm()
            layer.hook = lambda grad: grad / norm
        return hooked(layer, x, layer.hook)

    with pytest.raises(RuntimeError, match="the first call makes closure variable norm of its arguments"):
        make_graphed_callables(Layer(device, kept), arguments(device))


def hook_that_reads_a_global(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
    return hooked(layer, x, lambda grad: grad * SCALE)


def hook_that_reads_an_attribute(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
    return hooked(layer, x, lambda grad: grad * layer.config.scale)


def hook_over_an_object(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
    config = layer.config
    return hooked(layer, x, lambda grad: grad * config.scale)


def hook_with_an_object_as_default(layer: Layer, x: Tensor, mask: Tensor) -> Tensor:
    return hooked(layer, x, lambda grad, config=layer.config: grad * config.scale)


@pytest.mark.parametrize(
    "use",
    [
        hook_that_reads_a_global,
        hook_that_reads_an_attribute,
        hook_over_an_object,
        hook_with_an_object_as_default,
    ],
)
@pytest.mark.parametrize("is_between", [True, False])
def test_a_change_of_what_it_reads_is_seen(device, use, is_between, monkeypatch):
    net = Layer(device, use)
    make_graphed_callables(net, arguments(device))
    owner, name = (globals(), "SCALE") if use is hook_that_reads_a_global else (vars(net.config), "scale")
    result = net(*arguments(device)) if is_between else None
    monkeypatch.setitem(owner, name, 3.0)
    with pytest.raises(RuntimeError, match=name):
        backward_of(net(*arguments(device)) if result is None else result)
