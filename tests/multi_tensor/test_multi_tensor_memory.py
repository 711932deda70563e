"""Memory that an op would read while it is written, or write twice: refused before anything is written.

A sequence of torch's ops on such tensors finds numbers that one launch, whose blocks run in any order, cannot.
"""

from collections.abc import Callable

import pytest
import torch
from tensor_lists import all_same_bits, copies, same_bits
from torch import Tensor, nn

import te_graph as tg

ops = torch.ops.te_graph
Plan = tg.MultiTensorPlan


def memory(device: str, size: int = 20) -> Tensor:
    return torch.arange(1.0, size + 1.0, device=device)


def assert_refused(call: Callable[[], object], tensors: list[Tensor], message: str) -> None:
    before = copies(tensors)
    with pytest.raises(ValueError, match=message):
        call()
    assert all_same_bits(tensors, before)


# Plans: lists of stretches of one memory.


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize("begin", range(11))
def test_a_plan_refuses_sources_that_overlap_tensors(begin, update, device):
    """A source of 5 elements between tensors that lie at 0..3 and 5..8."""
    whole, outside = memory(device), [torch.zeros(3, device=device) for _ in range(2)]
    tensors, sources = [whole[5:8], whole[:3]], [outside[0], whole[begin : begin + 3]]
    fresh = [torch.zeros(3, device=device) for _ in range(4)]
    plan = Plan(fresh[:2], fresh[2:])
    expected = copies(sources)

    def make() -> Plan:
        if not update:
            return Plan(tensors, sources)
        plan.update(tensors, sources)
        return plan

    if begin < 8:
        assert_refused(make, [whole], r"tensor [01] and source 1 overlap|source 1 has the memory of a destination")
    if begin == 3:  # up to where the next one begins
        assert_refused(make, [whole], "tensor 0 and source 1 overlap")
    if begin >= 8:
        make().copy_()
        assert all_same_bits(tensors, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_reads_sources_that_overlap_and_refuses_to_zero_them(dtype, device):
    whole = memory(device).to(dtype)
    tensors, sources = [torch.ones(10, device=device) for _ in range(3)], [whole[2:12], whole[9:19], whole[:0]]
    tensors[2] = tensors[2][:0]
    plan, others = Plan(tensors, sources), [whole[:10], whole[10:], whole[:0]]
    expected = [tensor + source.float() for tensor, source in zip(tensors, sources, strict=True)]
    plan.accumulate_()
    assert all_same_bits(tensors, expected)
    assert_refused(
        lambda: plan.accumulate_(zero_source=True), [whole, *tensors], "sources 0 and 1 overlap, and would be zeroed"
    )
    plan.update(tensors, others)
    plan.accumulate_(zero_source=True)
    assert not whole.any()


def test_a_plan_refuses_tensors_that_are_to_be_negated_or_conjugated(device):
    negative, plain = torch._neg_view(memory(device, 4)), torch.zeros(4, device=device)
    for lists in (([plain], [negative]), ([negative], [plain]), ([negative],)):
        assert_refused(lambda lists=lists: Plan(*lists), [plain], r"negated or conjugated lazily; use resolve_neg")
    plan = Plan([plain], [negative.resolve_neg()])
    assert_refused(lambda: plan.update([plain], [negative]), [plain], "resolve_neg")
    ops.multi_tensor_copy_([plain], [negative])
    assert same_bits(plain, negative.resolve_neg())


def test_a_plan_refuses_tensors_that_wrap_others(device):
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls, tensor: Tensor) -> Tensor:
            return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype, device=tensor.device)

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise AssertionError

    plain = torch.zeros(4, device=device)
    for lists in (([Wrapper(plain)],), ([plain], [Wrapper(plain)])):
        with pytest.raises(TypeError, match="memory of its own"):
            Plan(*lists)


# What becomes of the tensors of a plan of 2 x 3 and its source.
CHANGES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "tensor transposed": lambda tensor, source: tensor.t_(),
    "source transposed": lambda tensor, source: source.t_(),
    "tensor of another shape": lambda tensor, source: tensor.as_strided_((3, 2), (1, 3)),
    "tensor of another dtype": lambda tensor, source: setattr(tensor, "data", tensor.view(torch.bfloat16)[:, ::2]),
    "source of another dtype": lambda tensor, source: setattr(source, "data", source.view(torch.int32)),
    "source negated": lambda tensor, source: setattr(source, "data", torch._neg_view(source.data)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_plan_names_tensors_whose_layout_or_dtype_changed_in_place(name, device):
    tensor, source = torch.zeros(2, 3, device=device), memory(device, 6).view(2, 3)
    plan = Plan([tensor], [source])
    plan.copy_()
    assert same_bits(tensor, source)
    CHANGES[name](tensor, source)
    before = copies([tensor, source])
    for method in (plan.copy_, plan.accumulate_, plan.check):
        with pytest.raises(RuntimeError, match=r"MultiTensorPlan: .* changed its size, strides or dtype"):
            method()
    assert all_same_bits([tensor, source], before)


def test_other_dense_strides_are_seen_and_new_ones_are_taken_by_an_update(device):
    tensor = torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    source = torch.randn_like(tensor)
    plan = Plan([tensor], [source])
    plan.copy_()
    assert same_bits(tensor, source)
    for other in (tensor, source):
        other.transpose_(0, 1)
        with pytest.raises(RuntimeError, match="changed its size, strides or dtype"):
            plan.copy_()
    plan.update([tensor], [source.mul_(2)])
    plan.copy_()
    assert same_bits(tensor, source)


# Numbers and flags inside the lists.


class Lists:
    """Of a memory [20] the elements 12..14 and 5..9, which are written, and sources for them."""

    def __init__(self, whole: Tensor) -> None:
        self.tensors = [whole[12:15], whole[5:10]]
        self.sources = [torch.ones_like(tensor) for tensor in self.tensors]
        self.plan, self.pairs = Plan(self.tensors), Plan(self.tensors, self.sources)
        self.one = torch.ones((), device=whole.device)


# The argument that is given, and the call.
CALLS: dict[str, tuple[str, Callable[[Lists, Tensor], object]]] = {
    "scale": ("scale", lambda on, x: ops.multi_tensor_scale_(on.tensors, x)),
    "scale and a flag": ("found_inf", lambda on, x: ops.multi_tensor_scale_(on.tensors, on.one, found_inf=x)),
    "scale by a number": ("found_inf", lambda on, x: ops.multi_tensor_scale_(on.tensors, 2.0, found_inf=x)),
    "clip": ("total_norm", lambda on, x: ops.multi_tensor_clip_(on.tensors, x, 0.5)),
    "clip and a flag": ("found_inf", lambda on, x: ops.multi_tensor_clip_(on.tensors, on.one, 0.5, found_inf=x)),
    "clip norm": ("found_inf", lambda on, x: ops.multi_tensor_clip_norm_(on.tensors, 0.5, found_inf=x)),
    "copy": ("scale", lambda on, x: ops.multi_tensor_copy_(on.tensors, on.sources, scale=x)),
    "accumulate": ("scale", lambda on, x: ops.multi_tensor_accumulate_(on.tensors, on.sources, scale=x)),
    "accumulate or not": ("noop", lambda on, x: ops.multi_tensor_accumulate_(on.tensors, on.sources, noop=x)),
    "accumulate and a flag": (
        "found_inf",
        lambda on, x: ops.multi_tensor_accumulate_(on.tensors, on.sources, found_inf=x),
    ),
    "plan, scale": ("scale", lambda on, x: on.plan.scale_(x)),
    "plan, scale and a flag": ("found_inf", lambda on, x: on.plan.scale_(on.one, found_inf=x)),
    "plan, clip": ("total_norm", lambda on, x: on.plan.clip_(x, 0.5)),
    "plan, clip norm": ("found_inf", lambda on, x: on.plan.clip_norm_(0.5, found_inf=x)),
    "plan, copy": ("scale", lambda on, x: on.pairs.copy_(scale=x)),
    "plan, accumulate or not": ("noop", lambda on, x: on.pairs.accumulate_(noop=x)),
    "function": ("total_norm", lambda on, x: tg.clip_tensors_by_global_norm(on.tensors, 0.5, global_norm=x)),
}


@pytest.mark.parametrize("place", [4, 5, 7, 9, 10, 11, 12, 14, 15])
@pytest.mark.parametrize("name", CALLS)
def test_a_number_inside_of_what_is_written_is_refused(name, place, device):
    argument, call = CALLS[name]
    whole = memory(device)
    on = Lists(whole)
    if place in (5, 7, 9, 12, 14):
        message = rf"(_|MultiTensorPlan): expected {argument} apart from the lists, .* of tensor {int(place < 12)};"
        assert_refused(lambda: call(on, whole[place]), [whole], message)
        return
    # Beside them it is read and written as anywhere else.
    twin = memory(device)
    apart = twin[place].clone()
    call(on, whole[place])
    call(Lists(twin), apart)
    twin[place] = apart
    assert same_bits(whole, twin)


GAPS: dict[str, tuple[str, Callable[[Tensor, Tensor], object]]] = {
    "scale": ("scale", lambda t, x: ops.multi_tensor_scale_([t], x)),
    "scale and a flag": ("found_inf", lambda t, x: ops.multi_tensor_scale_([t], 1e38, found_inf=x)),
    "clip and a flag": ("found_inf", lambda t, x: ops.multi_tensor_clip_([t], x / 0, 1.0, found_inf=x)),
    "clip norm": ("found_inf", lambda t, x: ops.multi_tensor_clip_norm_([t], 0.5, found_inf=x)),
    "copy": ("found_inf", lambda t, x: ops.multi_tensor_copy_([t], [t + 1], found_inf=x)),
    "accumulate or not": ("noop", lambda t, x: ops.multi_tensor_accumulate_([t], [t + 1], noop=x)),
    "accumulate from it": (
        "found_inf",
        lambda t, x: ops.multi_tensor_accumulate_([t + 1], [t], zero_source=True, found_inf=x),
    ),
}


@pytest.mark.parametrize("name", GAPS)
def test_a_number_inside_of_what_is_written_is_refused_where_that_has_gaps_and_taken_from_the_gaps(name, device):
    argument, call = GAPS[name]
    whole = torch.rand(4, 6, device=device)
    listed = "source" if name == "accumulate from it" else "tensor"
    for inside in (whole[0, 1], whole[2, 3], whole[3, 5]):
        message = rf"expected {argument} apart from the lists, got one in the memory of {listed} 0"
        assert_refused(lambda inside=inside: call(whole[:, 1::2], inside), [whole], message)
    for place in ((0, 0), (0, 2), (3, 4)):
        twin = whole.clone()
        apart = twin[place].clone()
        call(whole[:, 1::2], whole[place])
        call(twin[:, 1::2], apart)
        twin[place] = apart
        assert same_bits(whole, twin)
        whole = torch.rand(4, 6, device=device)


@pytest.mark.parametrize("kind", ["op", "plan"])
def test_a_flag_inside_of_what_is_read_is_refused_and_a_number_is_read(kind, device):
    whole, tensors = memory(device), [torch.ones(5, device=device)]
    sources = [whole[5:10]]
    pairs = Plan(tensors, sources)

    def accumulate(**options: Tensor | bool) -> None:
        if kind == "op":
            ops.multi_tensor_accumulate_(tensors, sources, **options)
        else:
            pairs.accumulate_(**options)

    assert_refused(lambda: accumulate(found_inf=whole[7]), [whole, *tensors], "expected found_inf apart .* of source 0")
    assert_refused(
        lambda: accumulate(scale=whole[7], zero_source=True), [whole, *tensors], "expected scale apart .* of source 0"
    )
    expected = tensors[0] + whole[5:10] * whole[7]
    accumulate(scale=whole[7])
    assert same_bits(tensors[0], expected)


@pytest.mark.parametrize("kind", ["op", "plan"])
def test_two_arguments_of_one_memory_are_refused_where_one_is_written(kind, device):
    tensors, number = [torch.ones(5, device=device)], torch.ones(1, device=device)
    sources = [torch.ones(5, device=device)]
    plan, pairs = Plan(tensors), Plan(tensors, sources)
    two = r"expected .* and .* that do not overlap, got two that share memory"
    if kind == "op":
        refused = {
            "scale": lambda: ops.multi_tensor_scale_(tensors, number, found_inf=number),
            "clip": lambda: ops.multi_tensor_clip_(tensors, number, 0.5, found_inf=number.view(())),
            "noop": lambda: ops.multi_tensor_accumulate_(tensors, sources, found_inf=number, noop=number),
        }
    else:
        refused = {
            "scale": lambda: plan.scale_(number, found_inf=number),
            "clip": lambda: plan.clip_(number, 0.5, found_inf=number),
            "noop": lambda: pairs.accumulate_(found_inf=number, noop=number),
        }
    for call in refused.values():
        assert_refused(call, [*tensors, number], two)
    # Both are read.
    if kind == "op":
        ops.multi_tensor_accumulate_(tensors, sources, scale=number - 1, noop=number - 1)
    else:
        zero = number - 1
        pairs.accumulate_(scale=zero, noop=zero)
    assert tensors[0].sum().item() == 5


# Several lists at once: all are checked before one is written.


def low(device: str, *gradients: Tensor | None) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.zeros(4, device=device)) for _ in gradients]
    for parameter, gradient in zip(made, gradients, strict=True):
        parameter.grad = gradient
    return made


@pytest.mark.parametrize("fault", ["met twice", "gaps that overlap", "memory of a gradient"])
def test_hp_grads_without_a_gradient_are_checked_before_the_others_are_written(fault, device):
    gradient, high = torch.ones(4, device=device), torch.zeros(4, device=device)
    unused = {
        "met twice": high,
        "gaps that overlap": torch.zeros(1, device=device).expand(4),
        "memory of a gradient": gradient,
    }[fault]
    parameters = low(device, gradient, None)
    assert_refused(
        lambda: tg.update_hp_grads(parameters, [high, unused], store=True),
        [gradient, high],
        "twice|overlapping elements|memory of a destination",
    )
    tg.update_hp_grads(parameters, [high, unused])  # without `store` it is not touched
    assert high.sum().item() == 4 and not gradient.any()


@pytest.mark.parametrize("name", ["found_inf", "noop", "sum_squares"])
@pytest.mark.parametrize("store", [False, True])
def test_operands_in_hp_grads_without_a_gradient_are_refused_before_anything_is_written(store, name, device):
    gradient, high = torch.ones(4, device=device), torch.zeros(4, device=device)
    unused = torch.zeros(144, device=device)
    operand = unused.view(torch.int64) if name == "sum_squares" else unused[3:4]
    operands = {"found_inf": torch.zeros(1, device=device), name: operand}
    assert_refused(
        lambda: tg.update_hp_grads(low(device, gradient, None), [high, unused], store=store, **operands),
        [gradient, high, unused, operands["found_inf"]],
        f"expected {name} apart from the lists, got one in the memory of tensor 0",
    )


@pytest.mark.gpu
def test_parts_on_several_devices_are_all_checked_before_one_is_written():
    for devices in (("cpu", "cuda"), ("cuda", "cpu")):
        gradients = [torch.ones(4, device=device) for device in devices]
        parameters = [low(device, gradient)[0] for device, gradient in zip(devices, gradients, strict=True)]
        flag = torch.zeros(1, device=devices[0])
        assert_refused(lambda p=parameters, f=flag: tg.clip_grad_norm_(p, 0.5, found_inf=f), gradients, "found_inf on")
        high = [torch.zeros(4, device=devices[0]), torch.zeros(5, device=devices[1])]
        assert_refused(lambda p=parameters, h=high: tg.update_hp_grads(p, h), [*gradients, *high], "of shape")
