"""Captures under autocast with its cache of weights on, as trainers run models: equal to eager execution."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hazards import batch
from torch import Tensor, nn
from twins import backward_of, eager_copy, gradients_of, leaf_copy

import te_graph
from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Tied(nn.Module):
    """Uses one weight several times, so that eager execution sums its gradients in bfloat16 before they are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        for _ in range(3):
            x = self.norm(F.linear(x, self.weight)).tanh()
        return F.linear(x, self.weight.t())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(4, 4), Tied(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 2]
        return self.last(self.body(F.gelu(self.first(x))) + x)


def train(net: nn.Module, device: str, steps: int, micro_batches: int = 2) -> list:
    """As trainers do: forward under autocast, backward outside, a step after several micro-batches."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(3)
    seen = []
    for _ in range(steps):
        for _ in range(micro_batches):
            x = torch.randn(8, 4, device=device)
            with torch.autocast(device, torch.bfloat16):
                output = net(x)
                loss = F.mse_loss(output.float(), x[:, :2])
            loss.backward()
            seen.append([output.detach().clone(), loss.detach()])
        seen.append(gradients_of(dict(net.named_parameters())))
        optimizer.step()
        optimizer.zero_grad()
        seen.append([p.detach().clone() for p in net.parameters()])
    return seen


def capture_whole(net: Net, device: str) -> list[nn.Module]:
    return [make_graphed_callables(net, (torch.randn(8, 4, device=device),))]


def capture_layers(net: Net, device: str) -> list[nn.Module]:
    dtypes = (torch.float32, torch.bfloat16, torch.float32)
    samples = [torch.randn(8, 4, device=device, dtype=dtype, requires_grad=i > 0) for i, dtype in enumerate(dtypes)]
    return list(make_graphed_callables((net.first, net.body, net.last), tuple((x,) for x in samples)))


@pytest.mark.parametrize("capture", [capture_whole, capture_layers])
def test_training_under_autocast_with_its_cache(device, capture):
    net = Net().to(device)
    twin = eager_copy(net)
    with torch.autocast(device, torch.bfloat16):
        graphed = capture(net, device)
    assert_bitwise_equal(train(net, device, 3), train(twin, device, 3))
    assert [one.te_graph.info()["forward_replays"] for one in graphed] == [6] * len(graphed)


def test_the_cache_matters_for_a_weight_that_is_used_twice(device):
    """What the tests here compare with is not what uncached casts would give."""
    net = Net().to(device)
    seen = []
    for caches in (True, False):
        net.zero_grad()
        with torch.autocast(device, torch.bfloat16, cache_enabled=caches):
            output = net(torch.ones(8, 4, device=device) / 3)
        output.float().square().sum().backward()
        seen.append(net.body.weight.grad.clone())
    assert not torch.equal(*seen)


def test_a_weight_that_changes_inside_a_region_is_cast_as_it_then_is(device):
    """A documented limit: eager execution would go on with the cast of its first use."""
    net = nn.Linear(4, 4).to(device)
    twin = eager_copy(net)
    with torch.autocast(device, torch.bfloat16):
        make_graphed_callables(net, (batch(device),))
    x, seen = batch(device), []
    with torch.autocast(device, torch.bfloat16):
        for factor in (1.0, 2.0):
            with torch.no_grad():
                for one in (net, twin):
                    one.weight.mul_(factor)
            torch.clear_autocast_cache()  # without which the twin's second result is its first one
            seen.append([one(x).detach().clone() for one in (net, twin)])
    assert all(torch.equal(*pair) for pair in seen)
    assert not torch.equal(seen[0][0], seen[1][0])
    assert net.te_graph.info()["forward_replays"] == 2


def test_two_calls_in_one_region_add_as_eager_calls_in_a_region_each(device):
    """A documented limit: eager execution would cast the weight once for both, and add in the lower precision."""
    net = nn.Linear(4, 4).to(device)
    twin = eager_copy(net)
    inputs = [batch(device) for _ in range(2)]
    with torch.autocast(device, torch.bfloat16):
        make_graphed_callables(net, (batch(device),), max_in_flight=2)
        results = [net(x) for x in inputs]
    torch.autograd.backward(results, [torch.full_like(result, 1 / 3) for result in results])
    for x in reversed(inputs):
        with torch.autocast(device, torch.bfloat16):
            result = twin(x)
        result.backward(torch.full_like(result, 1 / 3))
    assert_bitwise_equal(gradients_of(dict(net.named_parameters())), gradients_of(dict(twin.named_parameters())))


def test_a_forward_that_is_wrapped_in_autocast_as_accelerate_does(device):
    net = Net().to(device)
    twin = eager_copy(net)
    for one in (net, twin):
        one.forward = functools.partial(torch.autocast(device, torch.bfloat16)(type(one).forward), one)
    make_graphed_callables(net, (torch.randn(8, 4, device=device, requires_grad=True),))
    seen = []
    for one in (net, twin):
        torch.manual_seed(4)
        x = torch.randn(8, 4, device=device, requires_grad=True)
        output = one(x)
        backward_of(output)
        seen.append([output.detach(), x.grad, gradients_of(dict(one.named_parameters()))])
    assert_bitwise_equal(*seen)
    assert net.te_graph.info()["forward_replays"] == 1


def test_a_capture_in_the_middle_of_a_region_leaves_what_eager_code_has_cast(device):
    """Casts of before stay in the autograd graphs that they are in, and those of the capture in none."""
    net = nn.Linear(4, 4).to(device)
    other = nn.Linear(4, 4).to(device)
    twin, other_twin = eager_copy(net), eager_copy(other)
    x = batch(device)
    seen = []
    for one, two in ((net, other), (twin, other_twin)):
        leaf = leaf_copy(x)
        with torch.autocast(device, torch.bfloat16):
            before = one(leaf) + two(leaf)
            if one is net:
                make_graphed_callables(net, (batch(device),))
            assert before.requires_grad
        before.square().sum().backward()
        seen.append([before.detach(), leaf.grad, gradients_of([*one.parameters(), *two.parameters()])])
    assert_bitwise_equal(*seen)
    with torch.autocast(device, torch.bfloat16):
        assert_bitwise_equal(net(x).detach(), twin(x).detach())


@pytest.mark.parametrize("order", ["eager first", "graphed first"])
def test_eager_calls_of_other_layers_in_the_region_of_a_replay(device, order):
    nets = [nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]).to(device)]
    nets.append(eager_copy(nets[0]))
    with torch.autocast(device, torch.bfloat16):
        make_graphed_callables(nets[0][0], (batch(device),))
    x, seen = batch(device), []
    for net in nets:
        for _ in range(2):
            leaf = leaf_copy(x)
            layers = list(net) if order == "graphed first" else [net[1], net[0]]
            with torch.autocast(device, torch.bfloat16):
                parts = [layer(leaf) for layer in (*layers, net[1])]  # the eager one twice: its cast is cached
            sum(part.float().square().sum() for part in parts).backward()
            seen.append([[part.detach() for part in parts], gradients_of(list(net.parameters()))])
    assert_bitwise_equal(seen[:2], seen[2:])


def test_a_failing_capture_leaves_no_cast_behind(device):
    net = nn.Linear(4, 4).to(device)

    def fails(x: Tensor) -> Tensor:  # [3, 4]
        return net(x) * net(x).sum().item()

    x, seen = batch(device), []
    twin = eager_copy(net)
    with torch.autocast(device, torch.bfloat16):
        with pytest.raises(RuntimeError):
            make_graphed_callables(fails, (batch(device),))
        for one in (net, twin):
            leaf = leaf_copy(x)
            output = one(leaf)
            output.float().sum().backward()
            seen.append([output.detach(), leaf.grad, gradients_of(list(one.parameters()))])
    assert_bitwise_equal(*seen)


def test_a_sequence_under_autocast(device):
    net = nn.Linear(4, 4).to(device).requires_grad_(True)

    def predict(x: Tensor) -> Tensor:  # [3, 4]
        with torch.no_grad():
            return net(net(x).float())

    replayed: Callable[[Tensor], Tensor] = te_graph.graphed(predict)
    x = batch(device, requires_grad=False)
    with torch.autocast(device, torch.bfloat16):
        for _ in range(4):
            assert_bitwise_equal(replayed(x).clone(), predict(x))
    assert replayed.info()["forward_replays"] == 3


class Gated(nn.Module):
    """Uses its argument twice, so that the gradients of two casts are summed, or that of one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:  # [n, 8] -> [n, 8]
        return F.silu(self.gate(x)) * self.up(x)


@pytest.mark.parametrize("is_inside", [False, True], ids=["around the call", "in the forward"])
@pytest.mark.parametrize("is_leaf", [False, True])
def test_an_argument_that_is_cast_several_times(device, caplog, is_leaf, is_inside):
    """Eager execution casts a leaf once, and what was computed at each use. Samples are mostly leaves, calls not."""
    model = Gated().to(device)
    autocast = functools.partial(torch.autocast, device, torch.bfloat16)
    if is_inside:
        model.forward = autocast()(model.forward)
    twin = eager_copy(model)
    around = contextlib.nullcontext if is_inside else autocast
    with around():
        make_graphed_callables(model, (torch.randn(64, 8, device=device, requires_grad=True),))
    for _ in range(3):
        leaf, grads = torch.randn(64, 8, device=device, requires_grad=True), []
        for one in (model, twin):
            x = leaf if is_leaf else leaf * 1
            with around():
                result = one(x)
            grads.append([result.detach(), *torch.autograd.grad(result.float().square().sum(), [x])])
        assert_bitwise_equal(*grads)
    assert model.te_graph.info()["forward_replays"] == (0 if is_leaf else 3)
    assert ("a leaf as args[0], which autocast casts once" in caplog.text) is is_leaf


def test_a_leaf_that_is_cast_once_is_replayed(device):
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU()).to(device)
    with torch.autocast(device, torch.bfloat16):
        make_graphed_callables(model, (torch.randn(4, 8, device=device, requires_grad=True),))
        result = model(torch.randn(4, 8, device=device, requires_grad=True))
    result.float().sum().backward()
    assert model.te_graph.info()["forward_replays"] == 1


def test_a_backward_under_autocast_replays_without_it_and_says_so_once(device):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)
    twin, x = eager_copy(model), torch.randn(3, 4, device=device, requires_grad=True)
    make_graphed_callables(model, (x,))
    with torch.autocast(device, torch.bfloat16, enabled=True):
        with torch.autocast(device, enabled=False):
            result = model(x)
        with pytest.warns(UserWarning, match="Sequential: backward is called inside an autocast region") as warned:
            result.backward(torch.ones_like(result))
        with torch.autocast(device, enabled=False):
            again = model(x)
        again.backward(torch.ones_like(again))
    assert len(warned) == 1
    for expected in (twin(x), twin(x)):
        expected.backward(torch.ones_like(expected))
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert_bitwise_equal(one.grad, other.grad)


def test_a_backward_of_a_chain_inside_autocast_warns_of_each_callable(device):
    layers = tuple(nn.Linear(4, 4).to(device) for _ in range(2))
    x = torch.randn(3, 4, device=device, requires_grad=True)
    make_graphed_callables(layers, ((x,),), chain=True)
    with pytest.warns(UserWarning, match="backward is called inside an autocast region") as warned:
        for _ in range(2):
            result = layers[1](layers[0](x))
            with torch.autocast(device, torch.bfloat16):
                result.backward(torch.ones_like(result))
    names = {str(one.message).partition(": ")[0] for one in warned}
    assert len(warned) == 2 and names == {"callable 0 (Linear)", "callable 1 (Linear)"}
