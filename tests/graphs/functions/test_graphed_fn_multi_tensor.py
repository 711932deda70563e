"""The whole optimizer side under graphed(): hp gradients, norm, clip, AdamW, casts. Eager twins are the reference."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from sequences import captures, counts
from tensor_lists import all_same_bits, copies, no_sync, random_list, same_bits
from torch import Tensor

import te_graph as tg

SHAPES = [(33, 7), (1,), (129, 64), (5,), (0,), (9001,)]
ops = torch.ops.te_graph


@dataclass
class OptimizerSide:
    """bf16 parameters with gradients, fp32 gradients and master weights, and AdamW with its learning rate as a tensor.

    ``step`` is what a mixed-precision optimizer does after the last micro-batch.
    """

    device: str
    max_norm: float
    found_inf: Tensor = field(init=False)  # []
    params: list[Tensor] = field(init=False)
    masters: list[Tensor] = field(init=False)
    optimizer: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator(self.device).manual_seed(3)
        self.masters = [torch.randn(shape, device=self.device, generator=generator) for shape in SHAPES]
        self.params = [master.bfloat16().requires_grad_() for master in self.masters]
        for param, master in zip(self.params, self.masters, strict=True):
            param.grad, master.grad = torch.zeros_like(param), torch.zeros_like(master)
        lr = torch.tensor(1e-2, device=self.device)
        self.optimizer = torch.optim.AdamW(self.masters, lr=lr, fused=True, capturable=self.device == "cuda")
        self.found_inf = torch.zeros((), device=self.device)
        self.optimizer.found_inf = self.found_inf
        self.optimizer.grad_scale = None

    def accumulate(self) -> None:
        tg.update_hp_grads(self.params, [master.grad for master in self.masters])

    def step(self) -> Tensor:
        self.found_inf.zero_()
        self.accumulate()
        norm = tg.clip_grad_norm_(self.masters, self.max_norm, found_inf=self.found_inf)
        self.optimizer.step()
        ops.multi_tensor_zero_([master.grad for master in self.masters])
        with torch.no_grad():
            ops.multi_tensor_copy_(self.params, self.masters)
        return norm

    def backward(self, gradients: list[Tensor]) -> None:
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad.add_(gradient)

    def state(self) -> list[Tensor]:
        moments = [self.optimizer.state[master] for master in self.masters]
        names = ("exp_avg", "exp_avg_sq", "step")
        return [*self.params, *self.masters, *(moment[name] for moment in moments for name in names)]


@pytest.mark.parametrize("max_norm", [0.7, 1e9])
def test_the_optimizer_side_equals_eager_over_50_steps_of_changing_learning_rate(device, max_norm):
    eager, replayed = OptimizerSide(device, max_norm), OptimizerSide(device, max_norm)
    step = tg.graphed(replayed.step)
    for number in range(50):
        gradients = [torch.randn(shape, device=device).bfloat16() for shape in SHAPES]
        if number % 7 == 5:
            gradients[2][0, 0] = float("inf")
        for side in (eager, replayed):
            side.optimizer.param_groups[0]["lr"].fill_(1e-2 / (1 + number))
            side.backward(gradients)
        before = copies(replayed.state()) if number else []
        norm = step().clone()
        assert same_bits(norm, eager.step())
        assert all_same_bits(replayed.state(), eager.state()), number
        if number % 7 == 5:
            # An overflow: nothing but the gradients has changed.
            assert all_same_bits(replayed.state(), before)
            assert replayed.found_inf.item() == 1
    assert counts(step) == (1, 49, 0, 1)


def test_replays_of_the_optimizer_side_do_not_wait_for_the_device(device):
    side = OptimizerSide(device, 1.0)
    step = tg.graphed(side.step)
    for _ in range(3):
        step()
    with no_sync(device):
        step()
    assert step.info()["forward_replays"] == 3


def test_a_plan_that_is_updated_between_replays_needs_no_new_capture(device):
    sizes, dtypes = (10, 9000, 1, 0), [torch.float32, torch.bfloat16]
    tensors = random_list(sizes, dtypes, device)
    plan = tg.MultiTensorPlan(tensors)
    clip = tg.graphed(lambda: plan.clip_norm_(0.5))
    for number in range(5):
        if number > 2:
            tensors = random_list(sizes, dtypes, device)
            plan.update(tensors)
        expected = copies(tensors)
        total = tg.clip_tensors_by_global_norm(expected, 0.5)
        assert same_bits(clip(), total) and all_same_bits(tensors, expected), number
    assert captures(clip) == 1 and clip.info()["forward_replays"] == 4


def test_every_replay_of_a_plan_counts_once(device):
    destinations = [torch.zeros(100, device=device) for _ in range(3)]
    sources = [torch.full((100,), 1.0, device=device) for _ in range(3)]
    plan = tg.MultiTensorPlan(destinations, sources)

    def accumulate() -> None:
        plan.accumulate_()

    step = tg.graphed(accumulate)
    for number in range(1, 6):
        step()
        assert [tensor.unique().tolist() for tensor in destinations] == [[number]] * 3


def test_a_replay_with_a_plan_whose_tensor_died_or_moved_is_refused_by_name(device):
    tensors = random_list((10, 20), [torch.float32], device)
    plan = tg.MultiTensorPlan(tensors)
    norm = tg.graphed(lambda: plan.norm())
    for _ in range(3):
        norm()
    tensors[1].data = torch.randn(20, device=device)
    with pytest.raises(RuntimeError, match=r"tensors\[1\] moved to other memory"):
        norm()
    del tensors[1]
    with pytest.raises(RuntimeError, match=r"tensors\[1\] no longer exists"):
        norm()


def test_an_update_of_a_plan_inside_a_graphed_function_is_refused(device):
    tensors = random_list((10,), [torch.float32], device)
    plan = tg.MultiTensorPlan(tensors)

    def update() -> Tensor:
        plan.update(tensors)
        return plan.norm()

    with pytest.raises(RuntimeError, match="outside of captures"):
        tg.graphed(update)()


def test_a_replay_tells_autograd_what_a_plan_has_written(device):
    tensors = random_list((10,), [torch.float32], device)
    plan = tg.MultiTensorPlan(tensors)
    zero = tg.graphed(lambda: plan.zero_())
    for _ in range(4):
        version = tensors[0]._version
        zero()
        assert tensors[0]._version > version


def test_a_list_that_an_op_reads_is_guarded_like_any_other(device):
    tensors = random_list((10, 20), [torch.float32], device)
    clip = tg.graphed(tg.clip_tensors_by_global_norm)
    for number in range(6):
        if number == 3:
            tensors = copies(tensors)
        expected = copies(tensors)
        total = tg.clip_tensors_by_global_norm(expected, 1.0)
        assert same_bits(clip(tensors, 1.0), total) and all_same_bits(tensors, expected)
        tensors[0].normal_()
    assert captures(clip) == 2


def test_a_plan_that_each_call_makes_is_refused_by_name(device):
    tensors, half = random_list((10,), [torch.float32], device), torch.full((), 0.5, device=device)

    def shrink(*_: Tensor) -> Tensor:
        tg.MultiTensorPlan(tensors).scale_(half)
        return half + 1

    words = "MultiTensorPlan: expected to be made before a capture.* make it outside"
    step = tg.graphed(shrink)
    step()
    for attempt in (step, lambda: captured_by_hand(device, shrink)):
        before = copies(tensors)
        with pytest.raises(RuntimeError, match=words):
            attempt()
        assert all_same_bits(tensors, before)


def captured_by_hand(device, function):
    graph = tg.Recorder() if torch.device(device).type == "cpu" else tg.create_graph()
    with tg.capture_to_graph(graph):
        function()
    return graph


def test_a_capture_by_hand_leaves_the_tensors_of_a_plan(device):
    tensors, half = random_list((10,), [torch.float32], device), torch.full((), 0.5, device=device)
    plan, before = tg.MultiTensorPlan(tensors), copies(tensors)
    graph = captured_by_hand(device, lambda: plan.scale_(half))
    assert all_same_bits(tensors, before)
    tg.replay_graph(graph)
    assert all_same_bits(tensors, [tensor * 0.5 for tensor in before])


@pytest.mark.parametrize("op", [lambda plan: plan.zero_(), lambda plan: plan.norm()])
def test_a_callable_that_computes_with_a_plan_is_refused_by_name(device, op):
    tensors = random_list((10,), [torch.float32], device)
    plan, before = tg.MultiTensorPlan(tensors), copies(tensors)

    def call(x: Tensor) -> Tensor:  # [3]
        op(plan)
        return x + 1

    with pytest.raises(tg.CaptureError, match=r"call: MultiTensorPlan cannot be captured: .* te_graph\.graphed"):
        tg.make_graphed_callables(call, (torch.ones(3, device=device),))
    assert all_same_bits(tensors, before)


def test_a_plan_that_the_first_call_makes_is_used_by_replays(device):
    tensors, half = random_list((10,), [torch.float32], device), torch.full((), 0.5, device=device)
    plans = {}

    @tg.graphed
    def shrink(factor: Tensor) -> Tensor:  # []
        if not plans:
            plans["of all"] = tg.MultiTensorPlan(tensors)
        plans["of all"].scale_(factor)
        return factor + 1

    for _ in range(4):
        expected = [tensor * 0.5 for tensor in tensors]
        shrink(half)
        assert all_same_bits(tensors, expected)
    assert shrink.info()["forward_replays"] > 0
