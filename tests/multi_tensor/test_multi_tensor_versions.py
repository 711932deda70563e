"""Whatever an op writes has another version afterwards: eagerly, and by a replay as often."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import te_graph as tg

ops = torch.ops.te_graph


class Operands:
    """What ops write and read on one device."""

    def __init__(self, device: str) -> None:
        self.x, self.y = torch.ones(5, device=device), torch.ones(5, device=device)  # [5]
        self.norm = torch.ones((), device=device)
        self.found_inf = torch.zeros(1, device=device)
        self.squares = tg.new_sum_squares(device)
        self.plan = tg.MultiTensorPlan([self.x], [self.y])
        self.parameter = torch.nn.Parameter(torch.zeros(5, device=device))
        self.parameter.grad = self.x

    def written(self) -> list[Tensor]:
        return [self.x, self.y, self.found_inf, self.squares]


def without_gradients(o: Operands) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.zeros(2, device=o.x.device))]


# Each with the names of what it writes.
WRITES: dict[str, tuple[Callable[[Operands], object], set[str]]] = {
    "clip": (lambda o: ops.multi_tensor_clip_([o.x], o.norm, 1.0, found_inf=o.found_inf), {"x", "found_inf"}),
    "clip of nothing": (lambda o: ops.multi_tensor_clip_([], o.norm, 1.0, found_inf=o.found_inf), {"found_inf"}),
    "clip norm": (lambda o: ops.multi_tensor_clip_norm_([o.x], 1.0, found_inf=o.found_inf), {"x", "found_inf"}),
    "scale": (lambda o: ops.multi_tensor_scale_([o.x], o.norm, found_inf=o.found_inf), {"x", "found_inf"}),
    "scale by a number": (lambda o: ops.multi_tensor_scale_([o.x], 2.0, found_inf=o.found_inf), {"x", "found_inf"}),
    "copy": (lambda o: ops.multi_tensor_copy_([o.x], [o.y], found_inf=o.found_inf), {"x", "found_inf"}),
    "accumulate": (
        lambda o: ops.multi_tensor_accumulate_(
            [o.x], [o.y], zero_source=True, sum_squares=o.squares, found_inf=o.found_inf
        ),
        {"x", "y", "found_inf", "squares"},
    ),
    "plan, clip": (lambda o: o.plan.clip_(o.norm, 1.0, found_inf=o.found_inf), {"x", "found_inf"}),
    "plan, clip norm": (lambda o: o.plan.clip_norm_(1.0, found_inf=o.found_inf), {"x", "found_inf"}),
    "plan, scale": (lambda o: o.plan.scale_(o.norm, found_inf=o.found_inf), {"x", "found_inf"}),
    "plan, copy": (lambda o: o.plan.copy_(found_inf=o.found_inf), {"x", "found_inf"}),
    "plan, accumulate": (
        lambda o: o.plan.accumulate_(zero_source=True, sum_squares=o.squares, found_inf=o.found_inf),
        {"x", "y", "found_inf", "squares"},
    ),
    "clip_grad_norm_": (
        lambda o: tg.clip_grad_norm_([o.parameter], 1.0, found_inf=o.found_inf),
        {"x", "found_inf"},
    ),
    "clip_grads_with_norm_ without gradients": (
        lambda o: tg.clip_grads_with_norm_(without_gradients(o), 1.0, o.norm, found_inf=o.found_inf),
        {"found_inf"},
    ),
    "update_hp_grads": (
        lambda o: tg.update_hp_grads([o.parameter], [o.y], sum_squares=o.squares, found_inf=o.found_inf),
        {"x", "y", "found_inf", "squares"},
    ),
}


def changed(o: Operands, call: Callable[[], object]) -> set[str]:
    before = [tensor._version for tensor in o.written()]
    call()
    moved = [tensor._version > version for tensor, version in zip(o.written(), before, strict=True)]
    return {name for name, has_moved in zip(("x", "y", "found_inf", "squares"), moved, strict=True) if has_moved}


@pytest.mark.parametrize("name", WRITES)
def test_versions_of_all_that_is_written_move_eagerly_and_by_replays(name, device):
    write, expected = WRITES[name]
    operands = Operands(device)
    assert changed(operands, lambda: write(operands)) == expected
    if name.endswith("without gradients"):  # makes a parameter, which a graph does not
        return
    step = tg.graphed(lambda: write(operands))
    for _ in range(3):
        assert expected <= changed(operands, step)
    assert step.info()["forward_replays"] > 0


def test_a_flag_that_autograd_saved_may_not_be_written_afterwards(device):
    x, flag = torch.ones(3, device=device), torch.zeros((), device=device)
    weight = torch.ones((), device=device, requires_grad=True)
    product = flag * weight
    ops.multi_tensor_scale_([x], 2.0, found_inf=flag)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
