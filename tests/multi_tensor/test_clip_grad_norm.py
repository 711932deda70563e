"""clip_grad_norm_, get_total_norm, clip_grads_with_norm_ and DeepSpeed's pair, in one process.

References: torch.nn.utils on gradients in fp32, norms in float64, plain PyTorch for each element.
"""

import math
from collections.abc import Callable

import pytest
import torch
from references import clipped_to, product, reference_norm
from tensor_lists import CHUNK, all_same_bits, capture, copies, no_sync, random_list, same_bits
from torch import Tensor, nn

import te_graph as tg

ops = torch.ops.te_graph
INF, NAN = math.inf, math.nan
SIZES = (1, 7, CHUNK + 1, 0, 2 * CHUNK + 5, 300)
MIXED = (torch.float32, torch.bfloat16, torch.float16)
NORM_TYPES = (0, 0.5, 1, 1.5, 2.0, 3.0, INF, "inf")


def parameters_of(gradients: list[Tensor]) -> list[nn.Parameter]:
    """Parameters with copies of ``gradients`` [...], and one without."""
    parameters = [nn.Parameter(torch.randn_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return [*parameters, nn.Parameter(torch.zeros(5, device=gradients[0].device))]


def gradients_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("ratio", [0.3, 1.5])
def test_gradients_in_fp32_get_torchs_norm_and_torchs_values(ratio, norm_type, device):
    gradients = random_list([size for size in SIZES if size], [torch.float32], device)
    ours, theirs = parameters_of(gradients), parameters_of(gradients)
    max_norm = ratio * reference_norm(gradients, float(norm_type))
    with no_sync(device):
        norm = tg.clip_grad_norm_(ours, max_norm, norm_type)
    if norm_type == 0:  # torch counts tensors
        torch.nn.utils.clip_grads_with_norm_(theirs, max_norm, norm)
    else:
        expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    assert norm.item() == pytest.approx(reference_norm(gradients, float(norm_type)), rel=4e-6)
    for mine, other in zip(gradients_of(ours), gradients_of(theirs), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtypes", [MIXED, MIXED[1:2], MIXED[2:], [torch.float64]], ids=str)
@pytest.mark.parametrize("ratio", [0.3, 1.5])
def test_one_call_clips_every_dtype_and_returns_fp32_on_the_device(ratio, dtypes, device):
    gradients = random_list(SIZES, dtypes, device)
    parameters = parameters_of(gradients)
    values, max_norm = copies(parameters), ratio * reference_norm(gradients, 2.0)
    expected, kept = clipped_to(gradients, max_norm), gradients_of(parameters)
    with no_sync(device):
        norm = tg.clip_grad_norm_(parameters, max_norm)
    assert norm.dtype == (torch.float64 if dtypes == [torch.float64] else torch.float32)
    assert (norm.shape, norm.device.type, norm.requires_grad) == ((), device, False)
    assert same_bits(norm, ops.multi_tensor_norm(gradients))
    assert all_same_bits(gradients_of(parameters), expected)
    assert all(a is b for a, b in zip(gradients_of(parameters), kept, strict=True))
    assert all_same_bits(copies(parameters), values)


def test_the_two_steps_are_the_one(device):
    gradients = random_list(SIZES, MIXED, device)
    whole, steps = parameters_of(gradients), parameters_of(gradients)
    norm = tg.clip_grad_norm_(whole, 2.0, 3.0)
    with no_sync(device):
        total = tg.get_total_norm(gradients_of(steps), 3.0)
        assert tg.clip_grads_with_norm_(steps, 2.0, total) is None
    assert same_bits(norm, total) and all_same_bits(gradients_of(steps), gradients_of(whole))
    assert not all_same_bits(gradients_of(whole), gradients)


CONTAINERS: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "tuple": tuple,
    "generator": lambda parameters: (parameter for parameter in parameters),
    "values of a dictionary": lambda parameters: dict(enumerate(parameters)).values(),
    "ParameterList": nn.ParameterList,
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_parameters_come_in_any_iterable(kind, device):
    gradients = random_list(SIZES, MIXED, device)
    parameters = parameters_of(gradients)
    norm = tg.clip_grad_norm_(CONTAINERS[kind](parameters), 1.0)
    assert same_bits(norm, ops.multi_tensor_norm(gradients))
    assert all_same_bits(gradients_of(parameters), clipped_to(gradients, 1.0))
    again = copies(gradients_of(parameters))
    tg.clip_grads_with_norm_(CONTAINERS[kind](parameters), 0.5, torch.tensor(1.0, device=device))
    assert not all_same_bits(gradients_of(parameters), again)
    assert same_bits(tg.get_total_norm(iter(gradients)), norm)


@pytest.mark.parametrize("max_norm", [0.0, INF])
def test_a_maximum_of_zero_or_infinity_means_what_it_says(max_norm, device):
    gradients = random_list(SIZES, MIXED, device)
    parameters = parameters_of(gradients)
    tg.clip_grad_norm_(parameters, max_norm)
    if max_norm == 0:
        assert not any(gradient.any() for gradient in gradients_of(parameters))
    else:
        assert all_same_bits(gradients_of(parameters), gradients)


def test_gradients_that_carry_a_graph_of_their_own_are_clipped(device):
    parameter = nn.Parameter(torch.full((3,), 2.0, device=device))
    # backward(create_graph=True) would do the same, and warn of it once in a process; another test waits for that.
    (parameter.grad,) = torch.autograd.grad(parameter.pow(3).sum(), parameter, create_graph=True)
    assert parameter.grad.requires_grad
    norm = tg.clip_grad_norm_([parameter], 1.0)
    assert not norm.requires_grad and norm.item() == pytest.approx(12 * math.sqrt(3))
    assert parameter.grad.norm().item() == pytest.approx(1.0)
    parameter.grad = None


def test_a_norm_that_is_a_number_is_refused_by_name(device):
    with pytest.raises(TypeError, match="expected total_norm to be a tensor, got float"):
        tg.clip_grads_with_norm_(parameters_of([torch.ones(3, device=device)]), 1.0, 2.0)


@pytest.mark.parametrize("is_conjugate", [False, True])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_gradients_have_a_2_norm(dtype, is_conjugate, device):
    gradients = [torch.randn(size, dtype=dtype, device=device) for size in (5, CHUNK + 1)]
    ours, theirs = parameters_of(gradients), parameters_of(gradients)
    if is_conjugate:  # as autograd leaves them where a parameter is used by its conjugate
        for parameter in (*ours[:2], *theirs[:2]):
            parameter.grad = parameter.grad.conj()
    norm, expected = tg.clip_grad_norm_(ours, 1.0), torch.nn.utils.clip_grad_norm_(theirs, 1.0, foreach=False)
    torch.testing.assert_close(norm, expected.to(norm.dtype))
    for mine, other in zip(gradients_of(ours), gradients_of(theirs), strict=True):
        torch.testing.assert_close(mine, other)
    with pytest.raises(TypeError):
        tg.get_total_norm(gradients, 1.0)


@pytest.mark.parametrize("total", [torch.tensor(8.0), torch.tensor(8.0, dtype=torch.bfloat16), torch.tensor([8.0])])
def test_a_norm_from_elsewhere_may_have_any_dtype_and_lie_on_the_cpu(total, device):
    gradients = random_list(SIZES, MIXED, device)
    parameters, before = parameters_of(gradients), total.clone()
    tg.clip_grads_with_norm_(parameters, 2.0, total)
    factor = (2.0 / (total.float() + 1e-6)).view(())
    assert all_same_bits(gradients_of(parameters), [product(gradient, factor) for gradient in gradients])
    assert same_bits(total, before)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_found_inf_is_set_by_a_norm_that_is_not_finite_and_gradients_stay(shape, device):
    for value in (None, INF, -INF, NAN):
        gradients = random_list(SIZES, MIXED, device)
        if value is not None:
            gradients[4][CHUNK] = value
        parameters, found_inf = parameters_of(gradients), torch.zeros(shape, device=device)
        with no_sync(device):
            norm = tg.clip_grad_norm_(parameters, 1.0, found_inf=found_inf)
        assert same_bits(norm, ops.multi_tensor_norm(gradients))
        assert same_bits(found_inf, torch.full(shape, float(value is not None), device=device))
        expected = clipped_to(gradients, 1.0) if value is None else gradients
        assert all_same_bits(gradients_of(parameters), expected)


def test_where_found_inf_is_set_already_nothing_is_clipped(device):
    gradients = random_list(SIZES, MIXED, device)
    parameters, found_inf = parameters_of(gradients), torch.ones(1, device=device)
    with no_sync(device):
        norm = tg.clip_grad_norm_(parameters, 1.0, found_inf=found_inf)
        tg.clip_grads_with_norm_(parameters, 1.0, norm, found_inf=found_inf)
    assert all_same_bits(gradients_of(parameters), gradients) and found_inf.item() == 1
    assert same_bits(norm, ops.multi_tensor_norm(gradients))


def test_clipping_by_a_norm_that_is_not_finite_sets_found_inf_as_well(device):
    gradients = random_list(SIZES, MIXED, device)
    parameters, found_inf = parameters_of(gradients), torch.zeros(1, device=device)
    tg.clip_grads_with_norm_(parameters, 1.0, torch.tensor(INF, device=device), found_inf=found_inf)
    assert found_inf.item() == 1 and all_same_bits(gradients_of(parameters), gradients)


@pytest.mark.parametrize("norm", [2.0, INF, NAN])
def test_clipping_nothing_by_a_norm_that_is_not_finite_sets_found_inf(norm, device):
    nothing = [torch.ones(0, device=device)]
    for shape in ((), (1,)):
        found_inf, total_norm = torch.zeros(shape, device=device), torch.tensor(norm, device=device)
        tg.clip_grads_with_norm_([nn.Parameter(torch.ones(3, device=device))], 1.0, total_norm, found_inf=found_inf)
        assert found_inf.item() == float(not math.isfinite(norm))
        found_inf.zero_()
        ops.multi_tensor_clip_([], total_norm, 1.0, found_inf=found_inf)
        assert found_inf.item() == float(not math.isfinite(norm))
        found_inf.zero_()
        tg.MultiTensorPlan(nothing).clip_(total_norm, 1.0, found_inf=found_inf)
        assert found_inf.item() == float(not math.isfinite(norm))


def test_flags_made_in_inference_mode_are_read_only_outside_of_it(device):
    """As for torch's own functions. The flag of a PeerGroup is made so."""
    with torch.inference_mode():
        flag = torch.zeros((), device=device)
    tensor, one = torch.ones(3, device=device), torch.ones((), device=device)
    sources = [torch.ones(3, device=device)]
    plan = tg.MultiTensorPlan([tensor], sources)
    sums = tg.new_sum_squares(device)
    for call in (
        lambda: tg.clip_grad_norm_(parameters_of([tensor]), 1.0, found_inf=flag),
        lambda: tg.clip_grads_with_norm_(parameters_of([tensor]), 1.0, one, found_inf=flag),
        lambda: tg.clip_grads_with_norm_([], 1.0, one, found_inf=flag),
        lambda: ops.multi_tensor_scale_([tensor], one, found_inf=flag),
        lambda: ops.multi_tensor_scale_([tensor], 2.0, found_inf=flag),
        lambda: ops.multi_tensor_copy_([tensor], [tensor + 1], found_inf=flag),
        lambda: ops.multi_tensor_accumulate_([tensor], [tensor + 1], found_inf=flag),
        lambda: plan.clip_(one, 1.0, found_inf=flag),
        lambda: plan.clip_norm_(1.0, found_inf=flag),
        lambda: plan.scale_(one, found_inf=flag),
        lambda: plan.copy_(found_inf=flag),
        lambda: plan.accumulate_(found_inf=flag),
    ):
        with pytest.raises(RuntimeError, match="expected found_inf made outside of inference mode"):
            call()
    assert flag.item() == 0 and all_same_bits([tensor], [torch.ones(3, device=device)])
    plan.accumulate_(noop=flag, sum_squares=sums)  # it may be read
    assert tensor.tolist() == [2, 2, 2]


def test_found_inf_makes_a_fused_optimizer_skip_the_step_and_nothing_else(device):
    """The overflow skip of mixed precision without a host sync: parameters, moments and step number stay."""
    parameters = [nn.Parameter(torch.randn(size, device=device)) for size in (5, 100, CHUNK)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True)
    optimizer.found_inf, optimizer.grad_scale = torch.zeros((), device=device), None

    def step(value: float) -> list[Tensor]:
        optimizer.found_inf.zero_()
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        parameters[1].grad[3] = value
        tg.clip_grad_norm_(parameters, 1.0, found_inf=optimizer.found_inf)
        optimizer.step()
        states = [optimizer.state[parameter] for parameter in parameters]
        return copies([*parameters, *(state[key] for state in states for key in ("exp_avg", "exp_avg_sq", "step"))])

    first = step(1.0)
    assert all_same_bits(step(INF), first) and all_same_bits(step(NAN), first)
    second = step(1.0)
    assert not any(map(same_bits, second, first))
    assert [t.item() for t in second[5::3]] == [2.0, 2.0, 2.0]


def test_get_global_norm_of_tensors_is_the_norm_of_the_op(device):
    tensors = random_list(SIZES, MIXED, device)
    for norm_type in NORM_TYPES:
        with no_sync(device):
            norm = tg.get_global_norm_of_tensors(tensors, norm_type)
        assert same_bits(norm, ops.multi_tensor_norm(tensors, float(norm_type)))
    assert same_bits(tg.get_global_norm_of_tensors(tensors), ops.multi_tensor_norm(tensors))


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("max_norm", [1.0, 1e9])
def test_clip_tensors_by_global_norm_clips_and_returns_the_norm(max_norm, is_given, device):
    tensors = random_list(SIZES, MIXED, device)
    expected, total = clipped_to(tensors, max_norm), ops.multi_tensor_norm(tensors)
    with no_sync(device):
        norm = tg.clip_tensors_by_global_norm(tensors, max_norm, global_norm=total if is_given else None)
    assert same_bits(norm, total) and all_same_bits(tensors, expected)


def test_clip_tensors_by_global_norm_takes_the_norm_it_is_given_and_an_eps(device):
    tensors = random_list(SIZES, [torch.float32], device)
    expected = [product(tensor, torch.tensor(0.25)) for tensor in tensors]
    given = torch.tensor(3.5, device=device)
    assert same_bits(tg.clip_tensors_by_global_norm(tensors, global_norm=given, eps=0.5), given)
    for got, want in zip(tensors, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_a_captured_clip_follows_the_values_of_the_gradients(device):
    gradients = random_list(SIZES, MIXED, device)
    parameters, found_inf = parameters_of(gradients), torch.zeros(1, device=device)
    replay, norm = capture(lambda: tg.clip_grad_norm_(parameters, 1.0, found_inf=found_inf), device)
    for factor in (1.0, 1e-6, 3.0, INF, 2.0):
        found_inf.zero_()
        for parameter, gradient in zip(parameters, gradients, strict=False):
            parameter.grad.copy_(gradient * factor)
        before = copies(gradients_of(parameters))
        with no_sync(device):
            replay()
        assert found_inf.item() == (factor == INF)
        assert same_bits(norm, ops.multi_tensor_norm(before))
        assert all_same_bits(gradients_of(parameters), before if factor == INF else clipped_to(before, 1.0))


def test_thousands_of_parameters_are_clipped(device):
    gradients = copies(random_list([3, 1, 5, 2], MIXED, device) * 1000)
    parameters = parameters_of(gradients)
    with no_sync(device):
        norm = tg.clip_grad_norm_(parameters, 1.0)
    assert norm.item() == pytest.approx(reference_norm(gradients, 2.0), rel=1e-6)
    assert all_same_bits(gradients_of(parameters), clipped_to(gradients, 1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["cpu", "cuda"])
def test_parameters_on_several_devices_share_one_norm(first):
    second = {"cpu": "cuda", "cuda": "cpu"}[first]
    gradients = [t for pair in zip(*(random_list(SIZES, MIXED, d) for d in (first, second)), strict=True) for t in pair]
    parameters = parameters_of(gradients)
    on_one = [gradient.to(first) for gradient in gradients]
    norm = tg.clip_grad_norm_(parameters, 1.0)
    assert same_bits(norm, ops.multi_tensor_norm(on_one))
    expected = clipped_to(on_one, 1.0)
    assert all_same_bits([gradient.to(first) for gradient in gradients_of(parameters)], expected)
    for p in (1.0, INF):
        assert same_bits(tg.get_total_norm(gradients, p), ops.multi_tensor_norm(on_one, p))
