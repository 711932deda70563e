"""FlattenParamsWrapper with and without its concat: the same bits, which are those of the module without a wrapper."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from flat_models import Model, trained
from seeds import first_seed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import te_graph as tg
from te_graph.testing import same_bits

BF16 = torch.bfloat16
aten = torch.ops.aten


def reference_gradient(module: nn.Module, losses: list[Callable[[nn.Module], Tensor]]) -> Tensor:
    """[n]: for each loss all gradients behind each other, zeros for those that are not used; one added to the other."""
    total = None
    for loss in losses:
        parameters = list(module.parameters())
        grads = torch.autograd.grad(loss(module), parameters, allow_unused=True, materialize_grads=True)
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        total = flat if total is None else total + flat
    return total


class Tied(nn.Module):
    """With tied weights, one that is used twice, one that is unused, a scalar, an empty one, a buffer and a list."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.factors = nn.ParameterList([torch.rand(width) for _ in range(2)])
        self.scalar, self.unused = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.rand(3))
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:  # [batch, width]
        x = self.norm(self.first(x) * self.factors[0])
        return self.second(F.gelu(x)) * self.factors[1] + self.first(x) * self.scalar


def square(module: nn.Module, x: Tensor) -> Tensor:  # [...] -> []
    return module(x).float().square().sum()


def wrapped(module: nn.Module, optimized: bool = True, **arguments: Any) -> tg.FlattenParamsWrapper:
    """A copy of ``module``, flat."""
    return tg.FlattenParamsWrapper(copy.deepcopy(module), optimize_backward_concat=optimized, **arguments)


def micro_batches(
    wrapper: tg.FlattenParamsWrapper, losses: list[Callable[[nn.Module], Tensor]]
) -> Iterator[tuple[int, Tensor]]:
    for number, loss in enumerate(losses):
        with wrapper.no_sync() if number + 1 < len(losses) else contextlib.nullcontext():
            value = loss(wrapper)
            value.backward()
        yield number, value.detach()


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("optimized", [False, True], ids=["off", "on"])
def test_gradients_are_those_of_the_module(optimized, dtype):
    torch.manual_seed(1)
    module = Tied().to(dtype)
    wrapper = wrapped(module, optimized)
    for _ in range(2):
        losses = [functools.partial(square, x=x) for x in torch.randn(3, 4, 6, dtype=dtype)]
        for number, _ in micro_batches(wrapper, losses):
            assert (wrapper.flat_param.grad is None) == (optimized and number < 2)
        assert same_bits(wrapper.flat_param.grad, reference_gradient(module, losses))
        wrapper.zero_grad()
    assert same_bits(wrapper.norm.running_mean, module.norm.running_mean)


class Count(TorchDispatchMode):
    """Counts how often the overloads of ``packets`` run."""

    def __init__(self, *packets: Any) -> None:
        super().__init__()
        self.packets, self.count = packets, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket in self.packets
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimized", [False, True], ids=["off", "on"])
def test_no_concat_and_no_memset(optimized):
    wrapper = wrapped(Tied(), optimized)
    x = torch.randn(4, 6)
    with Count(aten.cat, aten.zero_, aten.zeros, aten.fill_) as seen:
        for _ in range(2):
            for _ in micro_batches(wrapper, [lambda one: square(one, x)] * 3):
                pass
            wrapper.zero_grad()
    assert (seen.count == 0) == optimized


def test_the_buffer_is_handed_over_and_freed():
    wrapper = wrapped(Tied())
    x = torch.randn(4, 6)
    seen: list[Tensor] = []
    wrapper.flat_param.register_hook(lambda grad: seen.append(grad.clone()))
    after: list[int] = []
    wrapper.flat_param.register_post_accumulate_grad_hook(lambda one: after.append(one.grad.data_ptr()))
    (gradients,) = wrapper._gradients
    for step in range(1, 3):
        places = []
        for number, _ in micro_batches(wrapper, [lambda one: square(one, x)] * 3):
            assert gradients.is_pending == (number < 2)
            places += [gradients._memory.data_ptr()] if number < 2 else []
        assert places == [wrapper.flat_param.grad.data_ptr()] * 2 == [after[-1]] * 2
        assert len(seen) == len(after) == step
        assert same_bits(seen[-1], wrapper.flat_param.grad)
        assert gradients._memory is None and not gradients._parts
        assert all(view.grad is None for view in wrapper._views[0])
        wrapper.zero_grad()


# How a micro-batch gets its gradients.
WAYS = ["plain", "plain", "plain", "twice", "checkpoint", "reentrant", "inner", "scaled", "retained", "evaluated"]


def loss_of(model: nn.Module, way: str, uses_all: bool, inputs: list[Tensor]) -> Tensor:
    """inputs: [batch, length] each."""
    if way in ("checkpoint", "reentrant"):
        dummy = torch.ones((), requires_grad=True)
        run = lambda x, one: model(x, uses_all) * one  # noqa: E731
        return checkpoint(run, inputs[0], dummy, use_reentrant=way == "reentrant").square().sum()
    loss = model(inputs[0], uses_all).square().sum()
    if way == "twice":
        loss = loss + model(inputs[1]).sum()
    if way == "evaluated":
        with torch.no_grad():
            model(inputs[1])
    if way == "inner":
        loss = model.blocks[0](torch.ones(2, 12, dtype=model.embedding.weight.dtype)).sum()
    return loss * 0.25 if way == "scaled" else loss


def random_training(wrapper: tg.FlattenParamsWrapper, seed: int, steps: int) -> Iterator[tuple[str, list[Tensor]]]:
    """Says what it has done, with the losses, after each step: micro-batches one by one, or several in flight whose
    backwards come in any order, as in pipelines."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(wrapper.parameters(), lr=1e-2, foreach=False)
    for step in range(steps):
        ways = [draw.choice(WAYS) for _ in range(draw.randint(1, 4))]
        forwards = [
            (way, draw.random() < 0.6, [torch.randint(7, (2, 3), generator=generator) for _ in range(2)])
            for way in ways
        ]
        in_flight = draw.random() < 0.4
        losses = [loss_of(wrapper, *forward) for forward in forwards] if in_flight else [None] * len(ways)
        order = list(range(len(ways)))
        if in_flight:
            draw.shuffle(order)
        for place, number in enumerate(order):
            if losses[number] is None:
                losses[number] = loss_of(wrapper, *forwards[number])
            with wrapper.no_sync() if place + 1 < len(order) else contextlib.nullcontext():
                losses[number].backward(retain_graph=ways[number] == "retained")
        yield f"step {step}: {ways}, in flight: {in_flight}", losses
        if draw.random() < 0.8:
            optimizer.step()
        wrapper.zero_grad(set_to_none=draw.random() < 0.7)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_random_trainings(dtype):
    first = first_seed("flattened trainings")
    for seed in range(first, first + 8):
        torch.manual_seed(seed)
        model = Model().to(dtype)
        wrappers = []
        for optimized in (False, True):
            one = copy.deepcopy(model)
            frozen = [parameter for parameter in one.parameters() if not parameter.requires_grad]
            groups = [trained(one)[::2], trained(one)[1::2], frozen]
            wrappers.append(tg.FlattenParamsWrapper(one, groups, optimize_backward_concat=optimized))
        off, on = wrappers
        runs = (random_training(one, seed, 8) for one in wrappers)
        for (what, losses), (_, other) in zip(*runs, strict=True):
            what = f"seed {seed}, {what}"
            assert all(same_bits(a.detach(), b.detach()) for a, b in zip(losses, other, strict=True)), what
            for a, b in zip(off.flat_params, on.flat_params, strict=True):
                assert same_bits(a.detach(), b.detach()), what
                assert (a.grad is None) == (b.grad is None), what
                assert a.grad is None or same_bits(a.grad, b.grad), what


def test_negative_zeros_where_a_view_is_not_always_used():
    """The concat has zeros for it, which make 0.0 of -0.0."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:  # [2]
            return (self.one * x).sum() + (self.other * x).sum() if x[1] > 0 else (self.other * x).sum()

    used, unused = torch.tensor([-0.0, 1.0]), torch.tensor([-0.0, -1.0])
    for batches in ([used, used], [used, unused], [unused, used], [unused, unused], [unused, used, used]):
        grads = []
        for optimized in (False, True):
            wrapper = wrapped(Sometimes(), optimized)
            for _ in micro_batches(wrapper, [lambda one, x=x: one(x) for x in batches]):
                pass
            grads.append(wrapper.flat_param.grad)
        assert same_bits(*grads), batches


def test_where_no_backward_is_the_last():
    wrapper = wrapped(Tied())
    optimizer = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    x = torch.randn(4, 6)
    with wrapper.no_sync():
        square(wrapper, x).backward()
    with pytest.raises(RuntimeError, match=r"SGD\.step: a FlattenParamsWrapper has gradients .* hand_over_gradients"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="expected no conversion while gradients are kept back"):
        wrapper.double()
    wrapper.hand_over_gradients()
    expected = wrapper.flat_param.grad.clone()
    wrapper.hand_over_gradients()  # nothing more
    assert same_bits(wrapper.flat_param.grad, expected)
    optimizer.step()
    with wrapper.no_sync():
        square(wrapper, x).backward()
    wrapper.zero_grad()
    optimizer.step()
    square(wrapper, x).backward()
    assert not same_bits(wrapper.flat_param.grad, expected)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_of_gradients():
    """A penalty on the gradient of the input is right; a graph for the sum is refused."""
    torch.manual_seed(2)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def penalty(one: nn.Module) -> Tensor:
        x = torch.linspace(0, 1, 12).reshape(2, 6).requires_grad_()
        (grad,) = torch.autograd.grad(one(x).sum(), x, create_graph=True)
        return grad.square().sum()

    for optimized in (False, True):
        wrapper = wrapped(module, optimized)
        penalty(wrapper).backward()
        assert same_bits(wrapper.flat_param.grad, reference_gradient(module, [penalty]))
    with pytest.raises(RuntimeError, match=r"the gradient of \d\.\w+ has a graph of its own \(create_graph=True\)"):
        square(wrapper, torch.randn(2, 6)).backward(create_graph=True)
    wrapper.zero_grad()


def test_sparse_gradients_are_refused():
    wrapper = wrapped(nn.Embedding(5, 2, sparse=True))
    with pytest.raises(TypeError, match=r"expected a dense gradient of weight, got one of layout torch\.sparse_coo"):
        wrapper(torch.tensor([1, 2])).sum().backward()


def test_a_backward_that_fails_can_be_dropped():
    module = Tied()
    wrapper = wrapped(module)
    x = torch.randn(4, 6)
    handle = wrapper.first.bias.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError), wrapper.no_sync():
        square(wrapper, x).backward()
    handle.remove()
    wrapper.zero_grad()
    square(wrapper, x).backward()
    assert same_bits(wrapper.flat_param.grad, reference_gradient(module, [lambda one: square(one, x)]))


def test_views_follow_the_flat_parameter():
    """Its memory may be exchanged, as by gathers of shards, also between forward and backward."""
    for optimized in (False, True):
        module = Tied()
        wrapper = wrapped(module, optimized)
        x = torch.randn(4, 6)
        with wrapper.no_sync():
            square(wrapper, x).backward()
        wrapper.flat_param.data = wrapper.flat_param.data.clone()
        loss = square(wrapper, x)
        wrapper.flat_param.data = wrapper.flat_param.data * 1
        loss.backward()
        assert same_bits(wrapper.flat_param.grad, reference_gradient(module, [lambda one, x=x: square(one, x)] * 2))
        wrapper(x)
        assert wrapper.scalar.data_ptr() == wrapper.flat_param.data_ptr()


def test_version_counters_are_those_of_the_flat_parameter():
    """A step between forward and backward is an error as without the wrapper."""
    wrapper = wrapped(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    loss = square(wrapper, torch.randn(4, 6))
    with torch.no_grad():
        wrapper.flat_param.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# What is wrapped, arguments, the error, its text.
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "a number": (lambda: 3, {}, TypeError, "expected a module, got int"),
    "ssd_offload": (
        Tied,
        {"ssd_offload": True, "ssd_directory": "/tmp"},
        ValueError,
        "ssd_offload=True is not offered",
    ),
    "names": (
        Tied,
        {"flat_param_names": ["a", "b"]},
        ValueError,
        "expected names, each another, .* got \\['a', 'b'\\]",
    ),
    "a number as parameter": (
        Tied,
        {"param_list": [3]},
        TypeError,
        "expected param_list to have parameters, .* got int",
    ),
    "numbers": (Tied, {"param_list": [[3]]}, TypeError, "expected param_list to have parameters, .* got int"),
    "of another module": (
        Tied,
        {"param_list": [nn.Parameter(torch.ones(2))]},
        ValueError,
        r"expected param_list to have parameters of the module, got another one, of shape \[2\]",
    ),
    "dtypes": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=BF16)),
        {},
        ValueError,
        "to be of one dtype, got 1.weight of torch.bfloat16 and 0.weight of torch.float32",
    ),
    "devices": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")),
        {},
        ValueError,
        "to be of one device, got 1.weight of meta and 0.weight of cpu",
    ),
    "frozen ones": (Model, {}, ValueError, "to be of one requires_grad, got blocks.1.linear.bias of False"),
    "nested": (
        lambda: nn.Sequential(nn.Linear(2, 2), tg.FlattenParamsWrapper(nn.Linear(2, 2))),
        {},
        ValueError,
        "1.flat_param_0 is the flat parameter of another FlattenParamsWrapper",
    ),
    "lazy": (lambda: nn.LazyLinear(2), {}, TypeError, "expected weight to be a dense torch.nn.Parameter, got Uninit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, arguments, error, text = REFUSED[name]
    module = make()
    before = list(module.named_parameters()) if isinstance(module, nn.Module) else []
    with pytest.raises(error, match=text):
        tg.FlattenParamsWrapper(module, **arguments)
    assert [one for _, one in before] == (list(module.parameters()) if before else [])


def with_hook(module: nn.Module) -> None:
    module.second.bias.register_hook(lambda grad: None)


def with_late_hook(module: nn.Module) -> None:
    module.second.bias.register_post_accumulate_grad_hook(lambda one: None)


def with_gradient(module: nn.Module) -> None:
    module.second.bias.grad = torch.ones(6)


def in_flat_parameters(module: nn.Module) -> None:
    module.__dict__["flat"] = tg.FlatParameters([("bias", module.second.bias)])


def with_graph(module: nn.Module) -> None:
    tg.make_graphed_callables(module.second, (torch.randn(2, 6),))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (with_hook, "has hooks, which would be lost"),
        (with_late_hook, "has hooks, which would be lost"),
        (with_gradient, "has a gradient, which would be lost"),
        (in_flat_parameters, "is in a FlatParameters already"),
        (with_graph, "is a parameter of a graphed callable: wrap before"),
    ],
)
def test_what_would_be_lost_is_refused(change, text):
    module = Tied()
    change(module)
    with pytest.raises(ValueError, match=text):
        tg.FlattenParamsWrapper(module)


def test_a_parameter_in_two_lists_is_refused():
    module = Tied()
    with pytest.raises(
        ValueError, match=r"expected each parameter in one list of param_list, got first\.weight in two"
    ):
        tg.FlattenParamsWrapper(module, [[module.first.weight], [module.first.bias, module.second.weight]])
