"""What autograd knows of tensors from outside: a replay adds nothing to it, so a function that would is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sequences import called, counts
from torch import Tensor, nn

from te_graph import CaptureError, clip_grad_norm_, clip_grads_with_norm_, get_total_norm, graphed, update_hp_grads
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def iadd(total: Tensor, value: Tensor) -> None:
    total += value.sum()


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "+=": iadd,
    "add_": lambda total, value: total.add_(value),
    "copy_": lambda total, value: total.copy_(value),
    "an element": lambda total, value: total.__setitem__(0, value[0]),
    "a view": lambda total, value: total[1:].mul_(value[1:]),
    "index_add_": lambda total, value: total.index_add_(0, torch.arange(3, device=total.device), value),
    "a list": lambda total, value: torch._foreach_add_([total], [value]),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_with_a_history_is_refused_before_it_is_done(device: str, write: Callable) -> None:
    weight = torch.randn(3, requires_grad=True, device=device)

    def step(total: Tensor) -> None:  # [3]
        write(total, weight * 2)

    total, expected, replayed = torch.zeros(3, device=device), torch.zeros(3, device=device), graphed(step)
    replayed(total), step(expected)
    with pytest.raises(CaptureError, match=r"adds to what autograd knows of a tensor from outside"):
        for _ in range(2):  # the first of them is seen by what the first call of all has changed
            replayed(total)
            step(expected)
    grads = [torch.autograd.grad(one.sum(), weight)[0] for one in (total, expected)]
    assert_bitwise_equal([total.detach(), grads[0]], [expected.detach(), grads[1]])


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_of_a_detached_value_replays(device: str, write: Callable) -> None:
    weight = torch.randn(3, requires_grad=True, device=device)

    def step(total: Tensor) -> None:  # [3]
        write(total, (weight * 2).detach())

    total, expected, replayed = torch.zeros(3, device=device), torch.zeros(3, device=device), graphed(step)
    called(replayed, 4, total), called(step, 4, expected)
    assert_bitwise_equal(total, expected)
    assert counts(replayed)[1] == 3


def test_what_is_written_inside_may_have_a_history(device: str) -> None:
    weight = torch.ones(3, requires_grad=True, device=device)

    def step() -> None:
        hidden = torch.zeros(3, device=weight.device)
        hidden += weight * 2
        hidden.sum().backward()

    replayed = graphed(step)
    weight.grad = torch.zeros_like(weight)
    called(replayed, 4)
    assert_bitwise_equal(weight.grad, torch.full_like(weight, 8.0))
    assert counts(replayed)[1] == 3


class Adds(torch.autograd.Function):
    """total [3] += value [3]."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, value: Tensor) -> Tensor:
        ctx.mark_dirty(total)
        return total.add_(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def test_a_write_by_a_function_of_autograd_is_refused(device: str) -> None:
    weight = torch.randn(3, requires_grad=True, device=device)
    total = (weight * 2).clone()

    def step() -> None:
        Adds.apply(total, weight)

    replayed = graphed(step)
    replayed()
    with pytest.raises(CaptureError, match="adds to what autograd knows of closure variable total"):
        replayed()


def test_running_statistics_have_none(device: str) -> None:
    norm = nn.BatchNorm1d(3).to(device)
    replayed = graphed(lambda x: norm(x).detach())
    x = torch.randn(4, 3, device=device)
    called(replayed, 4, x)
    assert norm.num_batches_tracked == 4 and counts(replayed)[1] == 3


def test_a_detach_in_place_of_another_tensor_each_time_runs_eagerly(device: str) -> None:
    weight = torch.ones(3, requires_grad=True, device=device)
    hidden = weight * 2

    def step() -> None:
        hidden.detach_()

    replayed = graphed(step)
    for _ in range(6):
        hidden = weight * 2
        replayed()
        assert not hidden.requires_grad
    assert counts(replayed)[1] == 0


READERS: dict[str, Callable] = {
    "clip_grad_norm_": lambda parameters: clip_grad_norm_(parameters, 1.0),
    "clip_grads_with_norm_": lambda parameters: clip_grads_with_norm_(
        parameters, 1.0, parameters[0].new_full((), 20.0)
    ),
    "get_total_norm": lambda parameters: get_total_norm([p.grad for p in parameters if p.grad is not None]),
    "update_hp_grads": lambda parameters: update_hp_grads(parameters, [p.main for p in parameters]),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("appears", [0, 1])
def test_a_gradient_that_appears_is_seen(device: str, reader: str, appears: int) -> None:
    def parameters() -> list[nn.Parameter]:  # [3] each
        made = [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
        for one in made:
            one.main = torch.zeros(3, device=device)
        return made

    plain, ours = parameters(), parameters()
    function, replayed = READERS[reader], graphed(READERS[reader])
    for step in range(6):
        for each in (plain, ours):
            for number, one in enumerate(each):
                if number != appears or step > 3:
                    one.grad = torch.full_like(one, 10.0) if one.grad is None else one.grad.fill_(10.0)
        function(plain)
        replayed(ours)
        assert_bitwise_equal([p.grad for p in ours], [p.grad for p in plain])
        assert_bitwise_equal([p.main for p in ours], [p.main for p in plain])
    assert counts(replayed)[1] > 0


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_loss_that_is_still_held_at_the_capture_of_a_backward_is_named(device: str) -> None:
    """It keeps the parameters' nodes of autograd, whose stream is not the one that captures."""
    layer, x = nn.Linear(4, 4, device=device), torch.randn(3, 4, device=device)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)

    @graphed
    def step() -> Tensor:
        loss = layer(x).square().sum()
        loss.backward()
        return loss.detach()

    step()
    loss = layer(x).sum()
    with pytest.raises(CaptureError, match="of an earlier call with the same parameters is still held"):
        step()
    loss.backward()
    del loss
    gc.collect()  # torch's errors of CUDA are in cycles, with what was computed
    called(step, 3)
    assert step.info()["forward_replays"] == 3
