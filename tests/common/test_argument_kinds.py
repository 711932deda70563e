"""What is no tensor, number, list or group where one is due: an error that names it, before anything is written."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import WORLDS, Rank, ranks_of
from tensor_lists import all_same_bits, copies
from torch import Tensor, nn

import te_graph as tg

ranks = pytest.fixture(ranks_of, scope="module", params=WORLDS)


class Sample:
    """Arguments that are right, on ``device``."""

    def __init__(self, device: str) -> None:
        self.gradients = [torch.randn(6, 4, device=device) for _ in range(2)]
        self.sources = [torch.randn(6, 4, device=device) for _ in range(2)]
        self.hp = [torch.zeros(6, 4, device=device) for _ in range(2)]
        self.parameters = [nn.Parameter(torch.zeros(6, 4, device=device)) for _ in range(2)]
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        self.one = torch.ones(1, device=device)
        self.plan = tg.MultiTensorPlan(self.gradients, self.sources)
        self.weights = tg.Fp8Weights(self.sources)
        self.all = [*self.gradients, *self.sources, *self.hp, *self.weights.data, *self.weights.transposed, self.one]


# By what messages call them: where a tensor of one element may be.
ELEMENTS: dict[str, Callable[[Sample, Any], object]] = {
    "clip_grad_norm_: found_inf": lambda s, x: tg.clip_grad_norm_(s.parameters, 1.0, found_inf=x),
    "clip_grads_with_norm_: found_inf": lambda s, x: tg.clip_grads_with_norm_(s.parameters, 1.0, s.one, found_inf=x),
    "clip_grads_with_norm_: total_norm": lambda s, x: tg.clip_grads_with_norm_(s.parameters, 1.0, x),
    "clip_tensors_by_global_norm: global_norm": lambda s, x: tg.clip_tensors_by_global_norm(s.gradients, 1.0, x),
    "norm_of_sum_squares: sum_squares": lambda s, x: tg.norm_of_sum_squares(x),
    "Fp8Weights: scale": lambda s, x: tg.Fp8Weights(s.sources, scale=x),
    "Fp8Weights: amax": lambda s, x: tg.Fp8Weights(s.sources, amax=x),
    "Fp8Weights: noop": lambda s, x: s.weights.cast_(noop=x),
    **{
        f"update_hp_grads: {name}": lambda s, x, name=name: tg.update_hp_grads(s.parameters, s.hp, **{name: x})
        for name in ("sum_squares", "found_inf", "noop")
    },
    "MultiTensorPlan: total_norm": lambda s, x: s.plan.clip_(x, 1.0),
    "MultiTensorPlan: scale": lambda s, x: s.plan.scale_(x),
    "MultiTensorPlan: found_inf": lambda s, x: s.plan.clip_norm_(1.0, found_inf=x),
    "MultiTensorPlan: sum_squares": lambda s, x: s.plan.accumulate_(sum_squares=x),
    "MultiTensorPlan: noop": lambda s, x: s.plan.accumulate_(noop=x),
}


@pytest.mark.parametrize("which", ELEMENTS)
def test_what_is_no_tensor_is_named(which, device):
    op, name = which.split(": ")
    sample = Sample(device)
    before = copies(sample.all)
    for wrong, kind in ((3.0, "float"), ("x", "str"), (True, "bool"), ([sample.one], "list")):
        with pytest.raises(TypeError, match=f"^{op}: expected {name} to be a tensor, got {kind}$"):
            ELEMENTS[which](sample, wrong)
    assert all_same_bits(sample.all, before)


NUMBERS: dict[str, Callable[[Sample, Any], object]] = {
    "clip_grad_norm_: max_norm": lambda s, x: tg.clip_grad_norm_(s.parameters, x),
    "clip_grad_norm_: norm_type": lambda s, x: tg.clip_grad_norm_(s.parameters, 1.0, x),
    "clip_grads_with_norm_: max_norm": lambda s, x: tg.clip_grads_with_norm_(s.parameters, x, s.one),
    "get_total_norm: norm_type": lambda s, x: tg.get_total_norm(s.gradients, x),
    "clip_tensors_by_global_norm: max_norm": lambda s, x: tg.clip_tensors_by_global_norm(s.gradients, x),
    "clip_tensors_by_global_norm: eps": lambda s, x: tg.clip_tensors_by_global_norm(s.gradients, 1.0, eps=x),
    "plan: p": lambda s, x: s.plan.norm(x),
    "plan.clip_: max_norm": lambda s, x: s.plan.clip_(s.one, x),
    "plan.clip_norm_: max_norm": lambda s, x: s.plan.clip_norm_(x),
}


def _op_and_argument(which: str) -> tuple[str, str]:
    """How messages call them."""
    op, name = which.split(": ")
    return "MultiTensorPlan" if op.startswith("plan") else op, name


@pytest.mark.parametrize("which", NUMBERS)
def test_what_is_no_number_is_named(which, device):
    op, name = _op_and_argument(which)
    sample = Sample(device)
    before = copies(sample.all)
    for wrong in (None, "x", [1.0], 1j, torch.ones(2), 10**400):
        with pytest.raises(TypeError, match=f"^{op}: expected {name} to be a number, got "):
            NUMBERS[which](sample, wrong)
    assert all_same_bits(sample.all, before)


LISTS: dict[str, Callable[[Sample, Any], object]] = {
    "get_total_norm: tensors": lambda s, x: tg.get_total_norm(x),
    "multi_tensor_norms: tensors": lambda s, x: tg.multi_tensor_norms(x),
    "clip_grad_norm_: parameters": lambda s, x: tg.clip_grad_norm_(x, 1.0),
    "clip_grads_with_norm_: parameters": lambda s, x: tg.clip_grads_with_norm_(x, 1.0, s.one),
    "get_global_norm_of_tensors: tensors": lambda s, x: tg.get_global_norm_of_tensors(x),
    "clip_tensors_by_global_norm: (input_)?tensors": lambda s, x: tg.clip_tensors_by_global_norm(x),
    "update_hp_grads: lp_params": lambda s, x: tg.update_hp_grads(x, s.hp[:1]),
    "update_hp_grads: hp_grads": lambda s, x: tg.update_hp_grads(s.parameters[:1], x),
    "plan: tensors": lambda s, x: tg.MultiTensorPlan(x),
    "plan: sources": lambda s, x: tg.MultiTensorPlan(s.gradients, x),
    "plan.update: tensors": lambda s, x: s.plan.update(x, s.sources),
    "plan.update: sources": lambda s, x: s.plan.update(s.gradients, x),
    "Fp8Weights: weights": lambda s, x: tg.Fp8Weights(x),
    "Fp8Weights.update: weights": lambda s, x: s.weights.update(x),
}


@pytest.mark.parametrize("which", LISTS)
def test_what_is_no_list_of_tensors_is_named(which, device):
    name = which.split(": ")[1]
    sample = Sample(device)
    before = copies(sample.all)
    for wrong, words in (
        (None, " to be a tensor or an iterable of them, got NoneType"),
        (3.0, " to be a tensor or an iterable of them, got float"),
        (nn.Linear(1, 1), r" to be a tensor or an iterable of them, got Linear: pass its parameters\(\)"),
        ([3.0], r"\[0\] to be a tensor, got float"),
        ({"weight": sample.one}, r"\[0\] to be a tensor, got str"),
        ((x for x in "x"), r"\[0\] to be a tensor, got str"),
    ):
        with pytest.raises(TypeError, match=f"expected {name}{words}"):
            LISTS[which](sample, wrong)
    assert all_same_bits(sample.all, before)


REGIONS = (
    *("copy_to_tp", "reduce_from_tp", "scatter_to_tp", "gather_from_tp", "all_gather_last_dim_from_tp"),
    *("scatter_to_sp", "gather_from_sp", "reduce_scatter_to_sp"),
)


def scenario_groups(rank: Rank) -> None:
    """Of process groups and peer groups."""
    x = torch.randn(2 * rank.world, 4, device=rank.device)
    foreign: Any = torch.distributed.GroupMember.NON_GROUP_MEMBER
    world = torch.distributed.group.WORLD
    with tg.PeerGroup(timeout=20, name="kinds") as group:
        for call in (
            lambda groups: tg.get_total_norm([x], process_groups=groups),
            lambda groups: tg.clip_grad_norm_([x], 1.0, process_groups=groups),
            lambda groups: tg.norm_of_sum_squares(tg.new_sum_squares(rank.device), groups),
            lambda groups: tg.clip_tensors_by_global_norm([x], process_groups=groups),
        ):
            for wrong in (foreign, group, 3, "x"):
                with pytest.raises(TypeError, match=r"expected process_groups\[1\] to be a process group that this"):
                    call([world, wrong])
            with pytest.raises(TypeError, match="expected process_groups to be a sequence of them, got"):
                call(world)
        regions = [vars(tg.tensor_parallel)[name] for name in REGIONS]
        ops: list[Callable[..., object]] = [tg.all_reduce, tg.all_reduce_, tg.reduce_scatter, tg.all_gather, *regions]
        outs = [tg.all_reduce_out, tg.reduce_scatter_out, tg.all_gather_out]
        for wrong in (None, group.name, world, 3):
            for op in ops:
                with pytest.raises(TypeError, match=f"^{op.__name__}: expected group to be a te_graph.PeerGroup, got"):
                    op(x, wrong)
            for op in outs:
                with pytest.raises(TypeError, match=f"^{op.__name__}: expected group to be a te_graph.PeerGroup, got"):
                    op(x, x, wrong)
        for op in ops:
            with pytest.raises(TypeError, match=f"^{op.__name__}: expected x to be a tensor, got None"):
                op(None, group)
        for op in (tg.tensor_parallel.scatter_to_tp, tg.tensor_parallel.scatter_to_sp):
            for wrong, got in ((x[0, 0], "a scalar"), (x.new_zeros(7, 7), "7")):
                if rank.world > 1 or wrong.dim() == 0:
                    with pytest.raises(ValueError, match=f"^{op.__name__}: expected x of a size in dim .* got {got}"):
                        op(wrong, group)
        assert bool((tg.all_reduce(torch.ones_like(x), group) == rank.world).all())


def scenario_options(rank: Rank) -> None:
    for options, words in (
        ({"tune": "x"}, "tune to be a bool or None, got 'x'"),
        ({"device": "nonsense"}, "device to be one of torch's, got 'nonsense'"),
        ({"device": 1.5}, "device to be one of torch's, got 1.5"),
        ({"device": "meta"}, "a device that the process group serves .* got meta"),
    ):
        with pytest.raises(ValueError, match=f"PeerGroup: expected {words}"):
            tg.PeerGroup(**options)


class Block(nn.Module):
    def __init__(self, group: tg.PeerGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.ones(2, device=group.device))

    def forward(self, x: Tensor) -> Tensor:  # [2]
        return tg.tensor_parallel.reduce_from_tp(x * self.weight, self.group)


def scenario_copies(rank: Rank) -> None:
    """A copy of a module that holds a group holds the same one, which is closed once."""
    x = torch.full((2,), rank.rank + 1.0, device=rank.device)
    with tg.PeerGroup(timeout=20, name="kinds") as group:
        block = Block(group)
        for make in (copy.copy, copy.deepcopy):
            made = make(block)
            assert made.group is group
            assert torch.equal(made(x), block(x))


@pytest.mark.parametrize("scenario", [scenario_groups, scenario_options, scenario_copies])
def test_groups(ranks, seed, scenario):
    ranks.run(scenario, seed)
