"""Bad input to the multi-tensor ops and functions: an exception before anything is written, or torch's result.

The tables say what is wrong, which exception comes, and words of its message.
"""

import math
import re
from collections.abc import Callable

import pytest
import torch
from tensor_lists import all_same_bits, copies, same_bits
from torch import Tensor, nn

import te_graph as tg

ops = torch.ops.te_graph
INF, NAN = math.inf, math.nan
POWERS_REFUSED = (-1.0, -INF, NAN, -1e-300)


def numbers(device: str, count: int = 2) -> list[Tensor]:
    return [torch.randn(6, 4, device=device) for _ in range(count)]


def number(value: float, device: str) -> Tensor:
    return torch.tensor(value, device=device)


# Each op on one list of tensors of 6 x 4.
ON_A_LIST: dict[str, Callable[[list[Tensor], str], object]] = {
    "multi_tensor_norm": lambda tensors, device: ops.multi_tensor_norm(tensors),
    "multi_tensor_norms": lambda tensors, device: ops.multi_tensor_norms(tensors),
    "multi_tensor_norm_partial": lambda tensors, device: ops.multi_tensor_norm_partial(tensors),
    "multi_tensor_clip_": lambda tensors, device: ops.multi_tensor_clip_(tensors, number(9.0, device), 1.0),
    "multi_tensor_clip_norm_": lambda tensors, device: ops.multi_tensor_clip_norm_(tensors, 1.0),
    "multi_tensor_scale_": lambda tensors, device: ops.multi_tensor_scale_(tensors, number(2.0, device)),
    "multi_tensor_zero_": lambda tensors, device: ops.multi_tensor_zero_(tensors),
    "multi_tensor_copy_": lambda tensors, device: ops.multi_tensor_copy_(tensors, numbers(device)),
    "multi_tensor_accumulate_": lambda tensors, device: ops.multi_tensor_accumulate_(tensors, numbers(device)),
}
MUTATING = [name for name in ON_A_LIST if name.endswith("_")]
SOURCES: dict[str, Callable[[list[Tensor], str], object]] = {
    "multi_tensor_copy_": lambda tensors, device: ops.multi_tensor_copy_(numbers(device), tensors),
    "multi_tensor_accumulate_": lambda tensors, device: ops.multi_tensor_accumulate_(numbers(device), tensors),
}
CALLS = [*((name, call) for name, call in ON_A_LIST.items()), *((name, call) for name, call in SOURCES.items())]
CALL_IDS = [*ON_A_LIST, *(f"source of {name}" for name in SOURCES)]

# A second tensor of 6 x 4 that no list may hold.
SPOILT: dict[str, tuple[Callable[[str], Tensor], type[Exception]]] = {
    "int64": (lambda device: torch.ones(6, 4, dtype=torch.int64, device=device), TypeError),
    "bool": (lambda device: torch.ones(6, 4, dtype=torch.bool, device=device), TypeError),
    "complex": (lambda device: torch.ones(6, 4, dtype=torch.complex64, device=device), TypeError),
    "fp8": (lambda device: torch.ones(6, 4, device=device).to(torch.float8_e4m3fn), TypeError),
    "meta": (lambda device: torch.ones(6, 4, device="meta"), ValueError),
    "sparse": (lambda device: torch.eye(6, 4, device=device).to_sparse(), TypeError),
    "sparse csr": (lambda device: torch.eye(6, 4, device=device).to_sparse_csr(), TypeError),
    "expanded": (lambda device: torch.ones(4, device=device).expand(6, 4), ValueError),
    "rows that overlap": (lambda device: torch.ones(30, device=device).as_strided((6, 4), (2, 1)), ValueError),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("case", SPOILT)
@pytest.mark.parametrize(("name", "call"), CALLS, ids=CALL_IDS)
def test_lists_with_a_tensor_that_cannot_be_handled_are_refused_before_anything_is_written(name, call, case, device):
    make, error = SPOILT[case]
    good = torch.randn(6, 4, device=device)
    before = good.clone()
    for tensors in ([good, make(device)], [make(device), good]):
        with pytest.raises(error, match=f"^{name}: expected .*got"):
            call(tensors, device)
    assert same_bits(good, before)


@pytest.mark.parametrize("name", MUTATING)
def test_a_tensor_that_would_be_written_twice_is_refused(name, device):
    tensor = torch.randn(6, 4, device=device)
    before = tensor.clone()
    for again in (tensor, tensor.detach(), tensor.view(6, 4)):
        with pytest.raises(ValueError, match=f"^{name}: .*twice"):
            ON_A_LIST[name]([tensor, again], device)
    assert same_bits(tensor, before)


def test_a_tensor_may_be_read_twice(device):
    tensor, destinations = torch.ones(6, 4, device=device), numbers(device)
    assert ops.multi_tensor_norm([tensor, tensor], 1.0).item() == 48
    ops.multi_tensor_copy_(destinations, [tensor, tensor])
    assert all_same_bits(destinations, [tensor, tensor])


def test_a_source_that_would_be_zeroed_twice_is_refused(device):
    source, destinations = torch.ones(6, 4, device=device), numbers(device)
    before = copies(destinations)
    with pytest.raises(ValueError, match="twice"):
        ops.multi_tensor_accumulate_(destinations, [source, source], zero_source=True)
    assert all_same_bits(destinations, before) and bool((source == 1).all())


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "call"), CALLS, ids=CALL_IDS)
def test_lists_on_several_devices_are_refused(name, call):
    for devices in (("cuda", "cpu"), ("cpu", "cuda")):
        tensors = [torch.randn(6, 4, device=device) for device in devices]
        before = copies(tensors)
        with pytest.raises(ValueError, match=f"^{name}: expected .* on .*got"):
            call(tensors, devices[0])
        assert all_same_bits(tensors, before)


# Arguments beside the lists: the call, the exception, words of the message behind the name of the op.
Case = tuple[Callable[[list[Tensor], list[Tensor], str], object], type[Exception], str]
ARGUMENTS: dict[str, Case] = {
    "total_norm of shape [2]": (
        lambda a, b, d: ops.multi_tensor_clip_(a, torch.ones(2, device=d), 1.0),
        ValueError,
        "multi_tensor_clip_: expected total_norm .*got",
    ),
    "integer total_norm": (
        lambda a, b, d: ops.multi_tensor_clip_(a, torch.tensor(3, device=d), 1.0),
        TypeError,
        "multi_tensor_clip_: expected total_norm .*got",
    ),
    "negative max_norm": (
        lambda a, b, d: ops.multi_tensor_clip_(a, number(9.0, d), -1.0),
        ValueError,
        "multi_tensor_clip_: expected max_norm .*got -1",
    ),
    "max_norm that is NaN": (
        lambda a, b, d: ops.multi_tensor_clip_(a, number(9.0, d), NAN),
        ValueError,
        "multi_tensor_clip_: expected max_norm .*got nan",
    ),
    "max_norm of norm and clip that is negative": (
        lambda a, b, d: ops.multi_tensor_clip_norm_(a, -1.0),
        ValueError,
        "multi_tensor_clip_norm_: expected max_norm .*got -1",
    ),
    "found_inf of clip in fp64": (
        lambda a, b, d: ops.multi_tensor_clip_(a, number(9.0, d), 1.0, found_inf=torch.zeros(1, device=d).double()),
        TypeError,
        "multi_tensor_clip_: expected found_inf .*got",
    ),
    "found_inf of scale of shape [2]": (
        lambda a, b, d: ops.multi_tensor_scale_(a, number(9.0, d), found_inf=torch.zeros(2, device=d)),
        ValueError,
        "multi_tensor_scale_: expected found_inf .*got",
    ),
    "scale of shape [2]": (
        lambda a, b, d: ops.multi_tensor_scale_(a, torch.ones(2, device=d)),
        ValueError,
        "multi_tensor_scale_: expected scale .*got",
    ),
    "integer scale": (
        lambda a, b, d: ops.multi_tensor_scale_(a, torch.tensor(3, device=d)),
        TypeError,
        "multi_tensor_scale_: expected scale .*got",
    ),
    "scale of copy in bf16": (
        lambda a, b, d: ops.multi_tensor_copy_(a, b, scale=number(2.0, d).bfloat16()),
        TypeError,
        "multi_tensor_copy_: expected scale .*got",
    ),
    "fewer sources of copy": (
        lambda a, b, d: ops.multi_tensor_copy_(a, b[:1]),
        ValueError,
        "multi_tensor_copy_: expected .*got",
    ),
    "fewer destinations": (
        lambda a, b, d: ops.multi_tensor_accumulate_(a[:1], b),
        ValueError,
        "multi_tensor_accumulate_: expected .*got",
    ),
    "another size": (
        lambda a, b, d: ops.multi_tensor_accumulate_(a, [b[0], torch.ones(5, 4, device=d)]),
        ValueError,
        "multi_tensor_accumulate_: expected .*got",
    ),
    "another size of copy": (
        lambda a, b, d: ops.multi_tensor_copy_(a, [b[0], torch.ones(6, 5, device=d)]),
        ValueError,
        "multi_tensor_copy_: expected .*got",
    ),
    "sum_squares in fp32": (
        lambda a, b, d: ops.multi_tensor_accumulate_(a, b, sum_squares=torch.zeros(100, device=d)),
        TypeError,
        "multi_tensor_accumulate_: expected sum_squares .*got",
    ),
    "sum_squares of another size": (
        lambda a, b, d: ops.multi_tensor_accumulate_(a, b, sum_squares=torch.zeros(3, dtype=torch.int64, device=d)),
        ValueError,
        "multi_tensor_accumulate_: expected sum_squares .*got",
    ),
    "found_inf of integers": (
        lambda a, b, d: ops.multi_tensor_accumulate_(a, b, found_inf=torch.zeros(1, dtype=torch.int32, device=d)),
        TypeError,
        "multi_tensor_accumulate_: expected found_inf .*got",
    ),
    "noop of shape [2]": (
        lambda a, b, d: ops.multi_tensor_accumulate_(a, b, noop=torch.zeros(2, device=d)),
        ValueError,
        "multi_tensor_accumulate_: expected noop .*got",
    ),
    "noop in fp16": (
        lambda a, b, d: ops.multi_tensor_accumulate_(a, b, noop=torch.zeros(1, device=d).half()),
        TypeError,
        "multi_tensor_accumulate_: expected noop .*got",
    ),
    "finish of nothing": (
        lambda a, b, d: ops.multi_tensor_norm_finish(None),
        TypeError,
        "multi_tensor_norm_finish: expected partial to be a tensor, got None",
    ),
    "finish of fp32": (
        lambda a, b, d: ops.multi_tensor_norm_finish(ops.multi_tensor_norm_partial(a).float(), 2.0, torch.float32),
        TypeError,
        "multi_tensor_norm_finish: expected partial .*got",
    ),
    "finish of another size": (
        lambda a, b, d: ops.multi_tensor_norm_finish(ops.multi_tensor_norm_partial(a)[:-1], 2.0, torch.float32),
        ValueError,
        "multi_tensor_norm_finish: expected partial .*got",
    ),
}


# Arguments of one element, each by the op that takes it.
ELEMENTS: dict[str, Callable[[list[Tensor], list[Tensor], Tensor], object]] = {
    "multi_tensor_clip_ total_norm": lambda a, b, x: ops.multi_tensor_clip_(a, x, 1.0),
    "multi_tensor_clip_ found_inf": lambda a, b, x: ops.multi_tensor_clip_(a, a[0].new_ones(1), 1.0, found_inf=x),
    "multi_tensor_clip_norm_ found_inf": lambda a, b, x: ops.multi_tensor_clip_norm_(a, 1.0, found_inf=x),
    "multi_tensor_scale_ scale": lambda a, b, x: ops.multi_tensor_scale_(a, x),
    "multi_tensor_scale_ found_inf": lambda a, b, x: ops.multi_tensor_scale_(a, 2.0, found_inf=x),
    "multi_tensor_copy_ scale": lambda a, b, x: ops.multi_tensor_copy_(a, b, scale=x),
    "multi_tensor_copy_ found_inf": lambda a, b, x: ops.multi_tensor_copy_(a, b, found_inf=x),
    **{
        f"multi_tensor_accumulate_ {name}": lambda a, b, x, name=name: ops.multi_tensor_accumulate_(a, b, **{name: x})
        for name in ("scale", "sum_squares", "found_inf", "noop")
    },
}


@pytest.mark.parametrize("which", ELEMENTS)
def test_elements_that_are_on_meta_or_sparse_are_refused_before_anything_is_written(which, device):
    op, name = which.split()
    first, second = numbers(device), numbers(device)
    before = copies([*first, *second])
    for spoilt, words in (
        (torch.ones(72, dtype=torch.int64, device="meta") if name == "sum_squares" else None, r"expected \w+"),
        (torch.ones(1, device="meta"), r"expected \w+"),
        (torch.ones(1, device=device).to_sparse(), f"expected {name}"),
    ):
        if spoilt is not None:
            with pytest.raises((TypeError, ValueError), match=f"^{op}: {words} .*got"):
                ELEMENTS[which](first, second, spoilt)
    assert all_same_bits([*first, *second], before)


@pytest.mark.parametrize("case", ARGUMENTS)
def test_other_arguments_that_do_not_fit_are_refused_before_anything_is_written(case, device):
    call, error, words = ARGUMENTS[case]
    first, second = numbers(device), numbers(device)
    before = copies([*first, *second])
    with pytest.raises(error, match=f"^{words}"):
        call(first, second, device)
    assert all_same_bits([*first, *second], before)


NARROWING = [(torch.float32, torch.bfloat16), (torch.float64, torch.float32), (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize("pair", [*NARROWING, (torch.float32, torch.float64), (torch.float32, torch.float16)], ids=str)
def test_accumulating_takes_narrow_dtypes_into_fp32_or_equal_ones_only(pair, device):
    destination, source = torch.ones(5, dtype=pair[1], device=device), torch.ones(5, dtype=pair[0], device=device)
    with pytest.raises(TypeError, match=r"^multi_tensor_accumulate_: expected .*got"):
        ops.multi_tensor_accumulate_([destination], [source])
    assert bool((destination == 1).all())


@pytest.mark.parametrize("p", POWERS_REFUSED)
def test_powers_below_zero_and_nan_are_refused(p, device):
    tensors = numbers(device)
    partial = ops.multi_tensor_norm_partial(tensors)
    for name, call in {
        "multi_tensor_norm": lambda: ops.multi_tensor_norm(tensors, p),
        "multi_tensor_norms": lambda: ops.multi_tensor_norms(tensors, p),
        "multi_tensor_norm_partial": lambda: ops.multi_tensor_norm_partial(tensors, p),
        "multi_tensor_clip_norm_": lambda: ops.multi_tensor_clip_norm_(tensors, 1.0, p),
        "multi_tensor_norm_finish": lambda: ops.multi_tensor_norm_finish(partial, p, torch.float32),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: expected p .*got"):
            call()
    for call in (tg.MultiTensorPlan(tensors).norm, lambda power: tg.MultiTensorPlan(tensors).clip_norm_(1.0, power)):
        with pytest.raises(ValueError, match=r"expected p .*got"):
            call(p)
    for call in (
        lambda: tg.get_total_norm(tensors, p),
        lambda: tg.multi_tensor_norms(tensors, p),
        lambda: tg.clip_grad_norm_([parameter(tensors[0], device)], 1.0, p),
    ):
        with pytest.raises(ValueError, match=r"expected norm_type to be 0, positive or inf, got"):
            call()


# Gradients of parameters, through the functions.


def parameter(gradient: Tensor | None, device: str) -> nn.Parameter:
    """A parameter of 6 x 4 with ``gradient`` [6, 4]."""
    made = nn.Parameter(torch.zeros(6, 4, device=device))
    made.grad = gradient
    return made


def clips(parameters: list[nn.Parameter]) -> dict[str, Callable[[], object]]:
    total = torch.tensor(9.0, device=parameters[0].device)
    return {
        "clip_grad_norm_": lambda: tg.clip_grad_norm_(parameters, 1.0),
        "clip_grads_with_norm_": lambda: tg.clip_grads_with_norm_(parameters, 1.0, total),
        "clip_tensors_by_global_norm": lambda: tg.clip_tensors_by_global_norm([p.grad for p in parameters], 1.0),
        "get_total_norm": lambda: tg.get_total_norm([p.grad for p in parameters]),
        "get_global_norm_of_tensors": lambda: tg.get_global_norm_of_tensors([p.grad for p in parameters]),
    }


@pytest.mark.parametrize("name", clips([parameter(None, "cpu")]))
def test_functions_refuse_gradients_that_are_sparse(name, device):
    parameters = [parameter(torch.ones(6, 4, device=device), device), parameter(None, device)]
    parameters[1].grad = torch.eye(6, 4, device=device).to_sparse()
    with pytest.raises(TypeError, match=r"expected .*got.*[Ss]parse"):
        clips(parameters)[name]()
    assert bool((parameters[0].grad == 1).all())


@pytest.mark.parametrize("name", ["get_total_norm", "get_global_norm_of_tensors", "clip_tensors_by_global_norm"])
def test_functions_refuse_integers(name, device):
    tensors = [torch.ones(6, 4, device=device), torch.ones(6, 4, dtype=torch.int64, device=device)]
    with pytest.raises(TypeError, match=r"expected .*got"):
        getattr(tg, name)(tensors)
    assert bool((tensors[0] == 1).all())


@pytest.mark.parametrize("max_norm", [-1.0, -INF, NAN, -1e-300])
def test_functions_refuse_a_negative_maximum_and_nan(max_norm, device):
    made = parameter(torch.ones(6, 4, device=device), device)
    total = number(9.0, device)
    plan = tg.MultiTensorPlan([made.grad])
    for call in (
        lambda: tg.clip_grad_norm_([made], max_norm),
        lambda: tg.clip_grads_with_norm_([made], max_norm, total),
        lambda: tg.clip_tensors_by_global_norm([made.grad], max_norm),
        lambda: tg.clip_tensors_by_global_norm([made.grad], max_norm, global_norm=total),
        lambda: plan.clip_(total, max_norm),
        lambda: plan.clip_norm_(max_norm),
        lambda: tg.clip_grad_norm_([], max_norm),
    ):
        with pytest.raises(ValueError, match=re.escape("max_norm") + ".*got"):
            call()
    assert bool((made.grad == 1).all())


def test_gradients_that_are_none_count_nothing(device):
    made = [parameter(None, device), parameter(torch.ones(6, 4, device=device), device), parameter(None, device)]
    assert tg.clip_grad_norm_(made, 1.0, norm_type=1).item() == 24
    assert made[0].grad is None and made[2].grad is None
    assert made[1].grad.sum().item() == pytest.approx(1.0)
    tg.clip_grads_with_norm_([made[0]], 1.0, number(9.0, device))
    assert tg.clip_grad_norm_([made[0]], 1.0).item() == 0


def test_parameters_without_gradients_have_the_norm_zero_on_their_device(device):
    assert same_bits(tg.clip_grad_norm_([parameter(None, device)], 1.0), torch.tensor(0.0, device=device))


def test_no_tensor_at_all_has_the_norm_zero_as_in_torch():
    for call, theirs in (
        (lambda: tg.clip_grad_norm_([], 1.0), torch.nn.utils.clip_grad_norm_([], 1.0)),
        (lambda: tg.get_total_norm([]), torch.nn.utils.get_total_norm([])),
        (lambda: tg.get_total_norm([], "inf"), torch.nn.utils.get_total_norm([])),
        (lambda: tg.get_global_norm_of_tensors([]), torch.tensor(0.0)),
        (lambda: tg.clip_tensors_by_global_norm([]), torch.tensor(0.0)),
    ):
        assert same_bits(call(), theirs)
    tg.clip_grads_with_norm_([], 1.0, torch.tensor(2.0))
    tg.update_hp_grads([], [])


@pytest.mark.parametrize("case", ["number", "size", "dtype", "none"])
def test_high_precision_gradients_that_do_not_fit_are_refused_before_anything_is_written(case, device):
    low = [parameter(torch.ones(6, 4, device=device), device) for _ in range(2)]
    high: list[Tensor | None] = [torch.zeros(6, 4, device=device) for _ in range(2)]
    if case == "number":
        high.pop()
    elif case == "size":
        high[1] = torch.zeros(6, 5, device=device)
    elif case == "dtype":
        high[1] = torch.zeros(6, 4, device=device, dtype=torch.bfloat16)
    else:
        high[1] = None
    with pytest.raises((TypeError, ValueError), match=r"expected .*got"):
        tg.update_hp_grads(low, high)
    assert not high[0].any() and all(bool((p.grad == 1).all()) for p in low)
