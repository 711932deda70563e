"""What the multi-tensor ops and functions launch on a GPU, counted in the profiler's trace: few, and no wait."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from profiled_launches import launches
from tensor_lists import random_list
from torch import Tensor, nn

import te_graph as tg

pytestmark = pytest.mark.gpu
ops = torch.ops.te_graph
MIXED = (torch.float32, torch.bfloat16, torch.float16)


def parameters_with(gradients: list[Tensor]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    return parameters


# What to call on a list, and how many kernels, copies and memsets that may launch.
CALLS: dict[str, tuple[Callable[[list[Tensor]], Callable[[], object]], int]] = {
    "norm": (lambda tensors: partial(ops.multi_tensor_norm, tensors), 2),
    "maximum": (lambda tensors: partial(ops.multi_tensor_norm, tensors, math.inf), 2),
    "clip": (lambda tensors: partial(ops.multi_tensor_clip_, tensors, torch.tensor(2.0, device="cuda"), 1.0), 1),
    "zero": (lambda tensors: partial(ops.multi_tensor_zero_, tensors), 1),
    "scale": (lambda tensors: partial(ops.multi_tensor_scale_, tensors, 0.5), 1),
    "clip_grad_norm_": (lambda tensors: partial(tg.clip_grad_norm_, parameters_with(tensors), 1.0), 3),
    "get_total_norm": (lambda tensors: partial(tg.get_total_norm, tensors), 2),
    "plan, norm": (lambda tensors: tg.MultiTensorPlan(tensors).norm, 2),
    "plan, clip_norm_": (lambda tensors: partial(tg.MultiTensorPlan(tensors).clip_norm_, 1.0), 3),
    "plan, zero_": (lambda tensors: tg.MultiTensorPlan(tensors).zero_, 1),
}


def count(step: Callable[[], object]) -> tuple[int, int]:
    """Launches and waits of one call."""
    step()
    found = launches.count_launches(launches.trace_step(step, "cuda"))
    return found["outside_graphs"], found["waits"]


@pytest.mark.parametrize("number", [1, 300, 2000])
@pytest.mark.parametrize("name", CALLS)
def test_up_to_two_thousand_tensors_of_mixed_dtypes_take_few_launches_and_no_wait(name, number):
    make, most = CALLS[name]
    tensors = random_list([100] * number, MIXED, "cuda")
    launched, waits = count(make(tensors))
    assert 1 <= launched <= most and waits == 0


@pytest.mark.parametrize("number", [1, 300, 1328])
def test_accumulating_is_one_launch(number):
    sources = random_list([100] * number, [torch.bfloat16], "cuda")
    destinations = [torch.zeros(100, device="cuda") for _ in sources]
    plan = tg.MultiTensorPlan(destinations, sources)
    for step in (lambda: ops.multi_tensor_accumulate_(destinations, sources, zero_source=True), plan.accumulate_):
        assert count(step) == (1, 0)
    parameters = parameters_with(sources)
    assert count(lambda: tg.update_hp_grads(parameters, destinations)) == (1, 0)


def test_an_update_of_a_plan_is_one_launch_for_a_few_tensors():
    lists = [random_list([100] * 100, MIXED, "cuda") for _ in range(2)]
    plan = tg.MultiTensorPlan(lists[0])
    turns = iter(range(100))
    assert count(lambda: plan.update(lists[next(turns) % 2])) == (1, 0)


def test_twenty_thousand_tensors_take_as_many_launches_with_a_plan_as_one_does():
    tensors = random_list([10] * 20000, MIXED, "cuda")
    plans = [tg.MultiTensorPlan(tensors), tg.MultiTensorPlan(tensors[:1])]
    few = [count(lambda plan=plan: plan.clip_norm_(1.0)) for plan in plans]
    assert few[0] == few[1]
