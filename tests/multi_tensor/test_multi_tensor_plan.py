"""MultiTensorPlan: the ops without a plan are the reference, bit for bit; tensors that die or move are named."""

import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from references import reference_norm
from tensor_lists import CHUNK, all_same_bits, capture, copies, no_sync, random_list, same_bits
from torch import Tensor, nn

from te_graph import MultiTensorPlan

ops = torch.ops.te_graph
SIZES = (1, 7, CHUNK, 0, 2 * CHUNK + 5, 300)
MIXED = (torch.float32, torch.bfloat16, torch.float16)
POWERS = (0.0, 1.0, 2.0, 3.0, math.inf)


def gradients(device: str) -> list[Tensor]:
    """A list of mixed dtypes with an empty tensor, a transposed one and one at an odd offset."""
    tensors = random_list(SIZES, MIXED, device)
    return [*tensors, torch.randn(130, 70, device=device).t(), torch.randn(100, device=device)[1:].bfloat16()[1:]]


def sources_for(tensors: list[Tensor]) -> list[Tensor]:
    """Laid out like ``tensors`` [...]: bf16 for fp32 ones, the same dtype for the others."""
    own = [torch.bfloat16 if t.dtype == torch.float32 else t.dtype for t in tensors]
    return [torch.randn_like(t).to(dtype) for t, dtype in zip(tensors, own, strict=True)]


@pytest.mark.parametrize("p", POWERS)
def test_a_plan_gives_the_norm_of_the_op(p, device):
    tensors = gradients(device)
    plan = MultiTensorPlan(tensors)
    with no_sync(device):
        norm = plan.norm(p)
    assert same_bits(norm, ops.multi_tensor_norm(tensors, p))
    assert norm.item() == pytest.approx(reference_norm(tensors, p), rel=1e-6)
    assert same_bits(plan.norm(), ops.multi_tensor_norm(tensors))


# A method of a plan without sources, and the op that it stands for.
MUTATIONS: dict[str, tuple[Callable[[MultiTensorPlan, Tensor], None], Callable[[list[Tensor], Tensor], None]]] = {
    "clip": (lambda plan, x: plan.clip_(x, 2.0), lambda tensors, x: ops.multi_tensor_clip_(tensors, x, 2.0)),
    "clip, flag down": (
        lambda plan, x: plan.clip_(x, 2.0, found_inf=torch.zeros_like(x)),
        lambda tensors, x: ops.multi_tensor_clip_(tensors, x, 2.0),
    ),
    "clip, flag up": (lambda plan, x: plan.clip_(x, 2.0, found_inf=torch.ones_like(x)), lambda tensors, x: None),
    "nothing to clip": (lambda plan, x: plan.clip_(x, 9.0), lambda tensors, x: None),
    "scale": (lambda plan, x: plan.scale_(x), lambda tensors, x: ops.multi_tensor_scale_(tensors, x)),
    "zero": (lambda plan, x: plan.zero_(), lambda tensors, x: ops.multi_tensor_zero_(tensors)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_plan_changes_its_tensors_as_the_op_does(name, device):
    by_plan, by_op = MUTATIONS[name]
    tensors, number = gradients(device), torch.tensor(5.0, device=device)
    expected, plan = copies(tensors), MultiTensorPlan(tensors)
    with no_sync(device):
        assert by_plan(plan, number) is None
    by_op(expected, number)
    assert all_same_bits(tensors, expected)


@pytest.mark.parametrize("max_norm", [1.0, 1e6])
@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_clip_norm_is_norm_and_clip(p, max_norm, device):
    tensors = gradients(device)
    expected = copies(tensors)
    total = ops.multi_tensor_norm(expected, p)
    ops.multi_tensor_clip_(expected, total, max_norm)
    plan = MultiTensorPlan(tensors)
    with no_sync(device):
        norm = plan.clip_norm_(max_norm, p)
    assert same_bits(norm, total) and all_same_bits(tensors, expected)


def test_clip_norm_leaves_gradients_where_the_norm_is_not_finite_and_tells(device):
    tensors, found_inf = gradients(device), torch.zeros(1, device=device)
    plan = MultiTensorPlan(tensors)
    plan.clip_norm_(1e6, found_inf=found_inf)
    assert found_inf.item() == 0
    tensors[4][3] = math.inf
    before = copies(tensors)
    assert plan.clip_norm_(1.0, found_inf=found_inf).item() == math.inf
    assert found_inf.item() == 1 and all_same_bits(tensors, before)


@pytest.mark.parametrize("store", [False, True])
def test_a_plan_accumulates_and_copies_as_the_op_does(store, device):
    tensors = gradients(device)
    sources = sources_for(tensors)
    twins, twin_sources = copies(tensors), copies(sources)
    partial = torch.zeros_like(ops.multi_tensor_norm_partial(tensors))
    twin_partial = partial.clone()
    found_inf, twin_found = torch.zeros((), device=device), torch.zeros((), device=device)
    sources[2][0] = twin_sources[2][0] = math.inf
    plan, noop = MultiTensorPlan(tensors, sources), torch.zeros(1, device=device)
    options = {"store": store, "zero_source": True, "noop": noop}
    with no_sync(device):
        plan.accumulate_(**options, sum_squares=partial, found_inf=found_inf)
    ops.multi_tensor_accumulate_(twins, twin_sources, **options, sum_squares=twin_partial, found_inf=twin_found)
    assert all_same_bits(tensors, twins) and all_same_bits(sources, twin_sources)
    assert found_inf.item() == twin_found.item() == 1
    norms = [ops.multi_tensor_norm_finish(s, 2.0, torch.float32) for s in (partial, twin_partial)]
    assert same_bits(*norms)
    noop.fill_(1)
    for source in sources:
        source.fill_(7)
    plan.accumulate_(**options)
    assert all_same_bits(tensors, twins) and all(bool((source == 7).all()) for source in sources)
    scale = torch.tensor(0.3, device=device)
    with no_sync(device):
        plan.copy_(scale=scale)
    ops.multi_tensor_copy_(twins, sources, scale=scale)
    assert all_same_bits(tensors, twins)
    plan.copy_()
    assert all(bool((tensor == 7).all()) for tensor in tensors)


def test_a_plan_needs_sources_for_what_reads_them(device):
    plan = MultiTensorPlan(gradients(device))
    for method in (plan.accumulate_, plan.copy_):
        with pytest.raises((RuntimeError, ValueError), match="sources"):
            method()


def test_results_keep_their_values_when_the_plan_is_used_again(device):
    tensors = gradients(device)
    plan = MultiTensorPlan(tensors)
    first = plan.norm()
    value = first.clone()
    plan.scale_(torch.tensor(3.0, device=device))
    second = plan.clip_norm_(1.0)
    plan.norm()
    assert same_bits(first, value) and second.item() == pytest.approx(3 * value.item(), rel=1e-2)


def test_a_plan_does_not_keep_its_tensors_alive_and_says_which_one_is_gone(device):
    tensors = gradients(device)
    plan = MultiTensorPlan(tensors)
    gone = weakref.ref(tensors[4])
    plan.check()
    tensors[4] = tensors[4].clone()
    gc.collect()
    assert gone() is None
    for use in (plan.check, plan.norm, plan.zero_, lambda: plan.clip_norm_(1.0)):
        with pytest.raises(RuntimeError, match=r"\b4\b"):
            use()


def test_gradients_that_only_their_parameters_hold_are_alive(device):
    parameters = [nn.Parameter(torch.randn(9, device=device)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn(9, device=device)
    plan = MultiTensorPlan([p.grad for p in parameters])
    gc.collect()
    assert same_bits(plan.norm(), ops.multi_tensor_norm([p.grad for p in parameters]))
    parameters[1].grad = None
    with pytest.raises(RuntimeError, match=r"\b1\b"):
        plan.norm()


# How a tensor of 300 bf16 elements comes to lie elsewhere.
MOVES: dict[str, Callable[[Tensor], object]] = {
    "set_": lambda tensor: tensor.set_(tensor.clone()),
    "data": lambda tensor: setattr(tensor, "data", tensor.clone()),
    "resize_": lambda tensor: tensor.resize_(100_000),
    "other shape in place": lambda tensor: tensor.resize_(10),
    "other strides": lambda tensor: tensor.as_strided_((150, 1), (2, 1)),
}


# How 10 elements from the 5th of 40 on come to be others of the same memory.
SHIFTS: dict[str, Callable[[Tensor], object]] = {
    "further on": lambda tensor: tensor.as_strided_((10,), (1,), 20),
    "with gaps": lambda tensor: tensor.as_strided_((10,), (2,), 5),
}


@pytest.mark.parametrize("how", SHIFTS)
def test_a_tensor_that_became_another_part_of_its_memory_is_named_and_nothing_is_written(how, device):
    memory = torch.ones(40, device=device)
    tensor = memory[5:15]
    plan = MultiTensorPlan([tensor])
    SHIFTS[how](tensor)
    with pytest.raises(RuntimeError, match=r"tensors\[0\] moved to other memory"):
        plan.zero_()
    assert memory.sum().item() == 40


@pytest.mark.parametrize("how", MOVES)
@pytest.mark.parametrize("is_source", [False, True])
def test_a_tensor_that_moved_is_named_and_nothing_is_written(is_source, how, device):
    tensors = [torch.randn(size, device=device).bfloat16() for size in (3, 8, 300, 5)]
    sources = copies(tensors)
    plan = MultiTensorPlan(tensors, sources)
    plan.check()
    MOVES[how]((sources if is_source else tensors)[2])
    before = copies(tensors)
    for use in (plan.check, plan.norm, plan.zero_, plan.accumulate_):
        with pytest.raises(RuntimeError, match=r"\b2\b"):
            use()
    assert all_same_bits(tensors, before)


def test_after_an_update_a_plan_works_on_the_other_tensors_alone(device):
    old, new = gradients(device), gradients(device)
    old_sources, new_sources = sources_for(old), sources_for(new)
    plan = MultiTensorPlan(old, old_sources)
    before, expected = copies(old), copies(new)
    with no_sync(device):
        plan.update(new, new_sources)
    assert same_bits(plan.norm(), ops.multi_tensor_norm(new))
    plan.accumulate_()
    ops.multi_tensor_accumulate_(expected, new_sources)
    assert all_same_bits(new, expected) and all_same_bits(old, before)
    del old, old_sources, before
    plan.check()


@pytest.mark.parametrize("what", ["number", "size", "dtype", "sources"])
def test_an_update_that_does_not_fit_is_refused_and_the_plan_stays_as_it_was(what, device):
    tensors = gradients(device)
    plan, others = MultiTensorPlan(tensors), gradients(device)
    if what == "number":
        others = others[:-1]
    elif what == "size":
        others[2] = others[2][:-1].clone()
    elif what == "dtype":
        others[0] = others[0].double()
    arguments = [others, sources_for(others)] if what == "sources" else [others]
    with pytest.raises((TypeError, ValueError), match="expected"):
        plan.update(*arguments)
    assert same_bits(plan.norm(), ops.multi_tensor_norm(tensors))


def test_a_captured_op_follows_the_updates_of_its_plan(device):
    lists = [gradients(device) for _ in range(3)]
    plan, total = MultiTensorPlan(lists[0]), torch.zeros((), device=device)

    def step() -> None:
        total.copy_(plan.norm())
        plan.clip_(total, 1.0)

    replay, _ = capture(step, device)
    for tensors in (lists[1], lists[2], gradients(device), lists[1]):
        expected = copies(tensors)
        norm = ops.multi_tensor_norm(expected)
        ops.multi_tensor_clip_(expected, norm, 1.0)
        untouched = [copies(other) for other in lists if other is not tensors]
        with no_sync(device):
            plan.update(tensors)
            replay()
        assert same_bits(total, norm) and all_same_bits(tensors, expected)
        assert all(map(all_same_bits, [other for other in lists if other is not tensors], untouched))


def test_plans_do_not_know_of_each_other(device):
    lists = [gradients(device), gradients(device)[:3]]
    plans = [MultiTensorPlan(tensors) for tensors in lists]
    captured = [capture(plan.norm, device) for plan in plans]
    for _ in range(2):
        for (replay, result), tensors in zip(captured, lists, strict=True):
            tensors[0].add_(1)
            replay()
            assert same_bits(result, ops.multi_tensor_norm(tensors))


@pytest.mark.parametrize("count", [1, 2500])
def test_plans_of_any_length(count, device):
    tensors = copies(random_list([3, 0, 1, 5], MIXED, device) * -(-count // 4))[:count]
    plan = MultiTensorPlan(tensors)
    assert same_bits(plan.norm(), ops.multi_tensor_norm(tensors))
    plan.zero_()
    assert not any(tensor.any() for tensor in tensors)


def test_a_plan_of_empty_tensors_has_nothing_to_do(device):
    tensors = [torch.empty(0, device=device), torch.empty(3, 0, device=device)]
    sources = copies(tensors)
    plan = MultiTensorPlan(tensors, sources)
    assert plan.norm().item() == plan.clip_norm_(1.0).item() == 0
    plan.zero_()
    plan.accumulate_(zero_source=True)


@pytest.mark.parametrize("case", ["no tensor", "gaps", "overlap", "layout", "number", "size", "integers"])
def test_lists_that_a_plan_cannot_hold_are_refused(case, device):
    tensors, sources = [torch.randn(4, 5, device=device) for _ in range(2)], []
    if case == "no tensor":
        tensors = []
    elif case == "gaps":
        tensors[1] = torch.randn(4, 10, device=device)[:, ::2]
    elif case == "overlap":
        tensors[1] = torch.randn(5, device=device).expand(4, 5)
    elif case == "layout":
        sources = [tensors[0].clone(), torch.randn(5, 4, device=device).t()]
    elif case == "number":
        sources = [tensors[0].clone()]
    elif case == "size":
        sources = [tensors[0].clone(), torch.randn(4, 6, device=device)]
    else:
        tensors[1] = torch.ones(4, 5, device=device, dtype=torch.int64)
    with pytest.raises(TypeError if case == "integers" else ValueError, match=r"^MultiTensorPlan: expected"):
        MultiTensorPlan(tensors, sources)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_plan_is_not_copied(copied, device):
    with pytest.raises(TypeError, match=r"^MultiTensorPlan: cannot be copied or pickled; make one from the copy's"):
        copied(MultiTensorPlan(gradients(device)))


def test_an_update_inside_a_capture_is_refused(device):
    tensors = gradients(device)
    plan, others = MultiTensorPlan(tensors), gradients(device)
    steps = iter((plan.norm, lambda: plan.update(others)))  # a first run, and the one that is captured
    with pytest.raises(RuntimeError, match="expected update"):
        capture(lambda: next(steps)(), device)


def test_a_plan_writes_no_tensor_twice(device):
    tensor = torch.randn(5, device=device)
    with pytest.raises(ValueError, match="twice"):
        MultiTensorPlan([tensor, tensor]).zero_()


def test_methods_of_a_plan_count_as_writes_for_autograd(device):
    tensor, source = torch.randn(10, device=device), torch.randn(10, device=device)
    plan = MultiTensorPlan([tensor], [source])
    scale = torch.tensor(2.0, device=device)
    for write in (lambda: plan.scale_(scale), plan.accumulate_, plan.copy_, lambda: plan.clip_norm_(1e-3), plan.zero_):
        version = tensor._version
        write()
        assert tensor._version > version
    version = source._version
    plan.accumulate_(zero_source=True)
    assert source._version > version


REFUSED: dict[str, Callable[[MultiTensorPlan, Tensor], object]] = {
    "clip, max_norm": lambda plan, x: plan.clip_(x, -1.0),
    "clip, total_norm of a list": lambda plan, x: plan.clip_(torch.ones(2, device=x.device), 1.0),
    "clip norm, max_norm": lambda plan, x: plan.clip_norm_(-1.0),
    "clip norm, p": lambda plan, x: plan.clip_norm_(1.0, -1.0),
    "clip norm, found_inf": lambda plan, x: plan.clip_norm_(1.0, found_inf=x.double()),
    "scale": lambda plan, x: plan.scale_(x.half()),
    "copy": lambda plan, x: plan.copy_(scale=x.half()),
    "accumulate": lambda plan, x: plan.accumulate_(zero_source=True, noop=x.double()),
    "accumulate, sum_squares": lambda plan, x: plan.accumulate_(zero_source=True, sum_squares=x),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_call_counts_as_no_write_and_writes_nothing(name, device):
    tensor, source = torch.ones(10, device=device), torch.ones(10, device=device)
    plan, number = MultiTensorPlan([tensor], [source]), torch.tensor(2.0, device=device)
    before = tensor._version, source._version
    with pytest.raises((TypeError, ValueError), match=r"expected .*got"):
        REFUSED[name](plan, number)
    assert (tensor._version, source._version) == before
    assert bool((tensor == 1).all()) and bool((source == 1).all())


@pytest.mark.gpu
def test_updates_are_ordered_with_the_work_of_the_stream():
    lists = [[torch.full((1000,), float(i), device="cuda") for _ in range(50)] for i in range(1, 41)]
    plan, norms = MultiTensorPlan(lists[0]), []
    torch.cuda.synchronize()
    with no_sync("cuda"):
        torch.cuda._sleep(50_000_000)
        for tensors in lists:
            plan.update(tensors)
            norms.append(plan.norm())
    expected = [i * math.sqrt(50_000) for i in range(1, 41)]
    assert torch.stack(norms).tolist() == pytest.approx(expected, rel=1e-6)
