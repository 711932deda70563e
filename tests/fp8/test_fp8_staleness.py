"""Fp8Weights.is_stale: which steps of optimizers are seen to change weights, however the weights were given."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from tensor_lists import all_same_bits
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import register_optimizer_step_post_hook

import te_graph as tg


def stepped(parameter: nn.Parameter, **kwargs: object) -> None:
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], **kwargs).step()


@pytest.mark.parametrize("kind", ["fused", "foreach"])
def test_a_step_of_an_optimizer_makes_its_weights_stale_and_no_others(kind, device):
    mine, other, bystander = (nn.Parameter(torch.randn(16, 16, device=device)) for _ in range(3))
    prepared, unconcerned = tg.Fp8Weights([mine, other]), tg.Fp8Weights([bystander])
    for weights in (prepared, unconcerned):
        weights.cast_()
    stepped(other, **{kind: True})
    assert prepared.is_stale and not unconcerned.is_stale
    with pytest.raises(RuntimeError, match="weight 1 changed"):
        prepared.check()


def test_weights_without_a_gradient_do_not_become_stale(device):
    parameters = [nn.Parameter(torch.randn(16, 16, device=device)) for _ in range(2)]
    prepared = tg.Fp8Weights(parameters[:1])
    prepared.cast_()
    parameters[1].grad = torch.ones_like(parameters[1])
    torch.optim.AdamW(parameters, fused=True).step()
    assert not prepared.is_stale


def test_prepared_weights_may_be_collected_while_an_optimizer_calls_its_hooks(device):
    parameter = nn.Parameter(torch.randn(16, 16, device=device))
    collects = register_optimizer_step_post_hook(lambda *_: gc.collect())
    gc.disable()
    try:
        circle = [tg.Fp8Weights([parameter])]
        circle.append(circle)
        gone = weakref.ref(circle[0])
        del circle
        prepared = tg.Fp8Weights([parameter])
        prepared.cast_()
        assert gone() is not None
        stepped(parameter)
        assert gone() is None
    finally:
        gc.enable()
        collects.remove()
    assert prepared.is_stale


# What is given as a weight: the parameter, or others over its memory.

GIVEN: dict[str, Callable[[nn.Parameter], list[Tensor]]] = {
    "the parameter": lambda p: [p],
    "detached": lambda p: [p.detach()],
    "data": lambda p: [p.data],
    "slices": lambda p: [p[:8], p[8:]],
    "detached slices": lambda p: list(p.detach().split(8)),
    "slices of data": lambda p: list(p.data.split(8)),
    "a view": lambda p: [p.view(8, 32)],
}
OPTIMIZERS: dict[str, Callable[[nn.Parameter], torch.optim.Optimizer]] = {
    "fused": lambda p: torch.optim.AdamW([p], fused=True),
    "foreach": lambda p: torch.optim.SGD([p], lr=0.1, foreach=True),
    "loop": lambda p: torch.optim.SGD([p], lr=0.1, foreach=False),
    "through data": lambda p: ThroughData([p], {}),
}


class ThroughData(torch.optim.Optimizer):
    """As those of older trainers, which autograd does not see either."""

    def step(self, closure: Callable[[], object] | None = None) -> None:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad)


def a_parameter(device: str) -> nn.Parameter:  # [16, 16]
    return nn.Parameter(torch.randn(16, 16, device=device))


def assert_holds_casts_of_now(prepared: tg.Fp8Weights) -> None:
    fresh = tg.Fp8Weights([weight.clone() for weight in prepared.weights])
    fresh.cast_()
    assert all_same_bits(prepared.data, fresh.data)


def assert_stale_after(act: Callable[[], object], prepared: tg.Fp8Weights) -> None:
    """``act`` changes the weights, all of them are stale then, and right after another cast."""
    before = [weight.clone() for weight in prepared.weights]
    act()
    assert not any(torch.equal(a, b) for a, b in zip(before, prepared.weights, strict=True))
    assert prepared.is_stale
    with pytest.raises(RuntimeError, match="weight 0 changed"):
        prepared.check()
    prepared.cast_()
    assert not prepared.is_stale
    assert_holds_casts_of_now(prepared)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("given", GIVEN)
def test_a_step_makes_all_weights_over_the_memory_of_a_parameter_stale(given, optimizer, device):
    parameter, bystander = a_parameter(device), a_parameter(device)
    prepared, unconcerned = tg.Fp8Weights(GIVEN[given](parameter)), tg.Fp8Weights(GIVEN[given](bystander))
    for weights in (prepared, unconcerned):
        weights.cast_()
    steps = OPTIMIZERS[optimizer](parameter)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        assert_stale_after(steps.step, prepared)
    assert not unconcerned.is_stale


@pytest.mark.parametrize("given", GIVEN)
def test_weights_over_the_memory_of_a_parameter_without_a_gradient_do_not_become_stale(given, device):
    parameter, other = a_parameter(device), a_parameter(device)
    prepared = tg.Fp8Weights(GIVEN[given](parameter))
    prepared.cast_()
    other.grad = torch.ones_like(other)
    torch.optim.AdamW([parameter, other], fused=True).step()
    assert not prepared.is_stale


# Gradients that are not there before the step, or not after it.


def clears_after(optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_post_hook(lambda one, *_: one.zero_grad(set_to_none=True))


def test_gradients_that_a_hook_sets_to_none_after_the_step_are_known(device):
    parameter = a_parameter(device)
    prepared, optimizer = tg.Fp8Weights([parameter]), torch.optim.AdamW([parameter], fused=True)
    prepared.cast_()
    clears_after(optimizer)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        assert_stale_after(optimizer.step, prepared)
        assert parameter.grad is None
    optimizer.step()
    assert not prepared.is_stale


def test_gradients_that_a_hook_makes_and_another_one_drops_are_known(device):
    parameter = a_parameter(device)
    prepared, optimizer = tg.Fp8Weights([parameter]), torch.optim.AdamW([parameter], fused=True)
    prepared.cast_()
    optimizer.register_step_pre_hook(lambda *_: setattr(parameter, "grad", torch.ones_like(parameter)))
    clears_after(optimizer)
    assert_stale_after(optimizer.step, prepared)


@pytest.mark.parametrize("named", [False, True])
def test_gradients_of_a_closure_that_a_hook_drops_are_known(named, device):
    parameter = a_parameter(device)
    prepared, optimizer = tg.Fp8Weights([parameter]), ThroughData([parameter], {})
    prepared.cast_()
    clears_after(optimizer)

    def closure() -> None:
        parameter.grad = torch.ones_like(parameter)

    assert_stale_after(lambda: optimizer.step(closure=closure) if named else optimizer.step(closure), prepared)


def test_a_step_in_the_backward_of_each_parameter_is_known(device):
    parameter = a_parameter(device)
    prepared, optimizer = tg.Fp8Weights([parameter.detach()]), torch.optim.AdamW([parameter], fused=True)
    prepared.cast_()

    def step(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(step)
    assert_stale_after(lambda: parameter.square().sum().backward(), prepared)


def test_a_step_that_raises_leaves_the_next_one_right(device):
    parameter = a_parameter(device)
    prepared = tg.Fp8Weights([parameter])
    prepared.cast_()
    optimizer = ThroughData([parameter], {})
    parameter.grad = torch.ones_like(parameter)

    def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        optimizer.step(fails)
    parameter.grad = None
    optimizer.step()
    assert not prepared.is_stale
    parameter.grad = torch.ones_like(parameter)
    assert_stale_after(optimizer.step, prepared)


def test_steps_of_optimizers_of_other_tensors_pass(device):
    """Of parameters that have no storage of the usual kind, and of empty ones."""
    prepared = tg.Fp8Weights([a_parameter(device)])
    prepared.cast_()
    sparse = nn.Parameter(torch.eye(3, device=device).to_sparse())
    sparse.grad = torch.eye(3, device=device).to_sparse()
    others = [nn.Parameter(torch.empty(0, device=device)), nn.Parameter(torch.empty(2, device="meta"))]
    for parameter in others:
        parameter.grad = torch.ones_like(parameter)
    ThroughData(others, {}).step()
    torch.optim.SGD([sparse], lr=0.1).step()
    assert not prepared.is_stale


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_step_of_a_dtensor_makes_its_local_part_stale(mesh):
    parameter = nn.Parameter(distribute_tensor(torch.randn(16, 16), mesh, [Shard(0)]))
    prepared = tg.Fp8Weights([parameter.to_local().detach()])
    prepared.cast_()
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    optimizer.step()
    assert not prepared.is_stale
    parameter.grad = torch.ones_like(parameter)
    assert_stale_after(optimizer.step, prepared)


@pytest.mark.parametrize("kind", ["fused", "foreach"])
@pytest.mark.parametrize("given", ["the parameter", "detached", "detached slices"])
def test_a_step_that_is_replayed_is_known(given, kind, device):
    parameter = a_parameter(device)
    prepared = tg.Fp8Weights(GIVEN[given](parameter))
    prepared.cast_()
    optimizer = torch.optim.SGD([parameter], lr=0.1, **{kind: True})
    step = tg.graphed(optimizer.step)
    parameter.grad = torch.ones_like(parameter)
    for _ in range(5):
        assert_stale_after(step, prepared)
    assert step.info()["forward_replays"] >= 3


def test_a_compiled_step_is_known(device):
    parameter = a_parameter(device)
    prepared, optimizer = tg.Fp8Weights([parameter.detach()]), torch.optim.AdamW([parameter])
    prepared.cast_()
    compiled = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        assert_stale_after(compiled, prepared)


def test_an_optimizer_is_freed_with_its_last_owner(device):
    parameter = a_parameter(device)
    prepared, optimizer = tg.Fp8Weights([parameter]), torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None and prepared.is_stale


# What cannot be seen, as the documentation of ``Fp8Weights`` says.


def test_documented_limit_a_collective_of_torch_into_a_weight_is_not_seen(mesh):
    weight = torch.randn(16, 16)
    prepared = tg.Fp8Weights([weight])
    prepared.cast_()
    dist.broadcast(weight, 0)
    assert not prepared.is_stale
    with tg.PeerGroup() as group:
        tg.all_reduce_(weight, group)
    assert prepared.is_stale


@pytest.mark.parametrize("fused", [False, True])
def test_documented_limit_a_fused_function_without_its_optimizer_is_not_seen(fused, device):
    layer, x = tg.Linear(16, 16, bias=False, device=device), torch.randn(4, 16, device=device)
    weight, moments = layer.weight, [torch.zeros(16, 16, device=device) for _ in range(2)]
    weight.requires_grad_(False)
    prepared = tg.Fp8Weights([weight])
    prepared.cast_()

    def forward() -> Tensor:
        with tg.fp8_autocast(recipe=tg.Float8CurrentScaling()):
            return layer(x)

    before = forward()
    adamw(
        *([[tensor] for tensor in (weight, torch.ones_like(weight), *moments)]),
        [],
        [torch.zeros((), device=device)],
        **{"fused": fused, "foreach": False, "amsgrad": False, "maximize": False, "lr": 0.5},
        **{"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8},
    )
    assert prepared.is_stale == (not fused)
    assert torch.equal(forward(), before) == fused
    weight.data.mul_(1)
    assert prepared.is_stale
    assert not torch.equal(forward(), before)
