"""What other libraries hold their norm, clip, scale and copy to, rebuilt from the facts of their tests.

torch's test_nn and test_foreach, apex's clip_grad, TransformerEngine's test_multi_tensor, and a probe of fp32
accumulation. References: torch.nn.utils, torch.linalg.vector_norm, float64.
"""

import math
import random
import warnings

import pytest
import torch
from references import reference_norm
from tensor_lists import copies, no_sync, same_bits
from torch import Tensor, nn

import te_graph as tg

ops = torch.ops.te_graph
INF, NAN = math.inf, math.nan


# torch/test/test_nn.py


def two_gradients(device: str) -> list[Tensor]:
    """Gradients of nn.Linear(10, 10) of very different sizes."""
    return [torch.arange(1.0, 101.0, device=device).view(10, 10), torch.full((10,), 1e-3, device=device)]


def linear_with(gradients: list[Tensor]) -> nn.Linear:
    linear = nn.Linear(10, 10).to(gradients[0].device)
    for parameter, gradient in zip(linear.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()
    return linear


def factors(linear: nn.Linear, before: list[Tensor]) -> Tensor:
    """By what each gradient element was multiplied, [110]."""
    return torch.cat([(p.grad / grad).flatten() for p, grad in zip(linear.parameters(), before, strict=True)])


@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("norm_type", [0.5, 1.5, 2, 4, "inf"])
def test_torch_nn_large_gradients_shrink_by_one_factor_to_the_norm_asked_for(norm_type, foreach, device):
    before = two_gradients(device)
    linear, decomposed = linear_with(before), linear_with(before)
    expected = reference_norm(before, float(norm_type))
    norm = tg.clip_grad_norm_(linear.parameters(), 2, norm_type=norm_type, foreach=foreach)
    total = tg.get_total_norm([p.grad for p in decomposed.parameters()], norm_type, False, foreach)
    tg.clip_grads_with_norm_(decomposed.parameters(), 2, total, foreach)
    assert norm.item() == pytest.approx(expected, rel=1.3e-6, abs=1e-5) and same_bits(norm, total)
    after = [p.grad for p in linear.parameters()]
    assert reference_norm(after, float(norm_type)) == pytest.approx(2, rel=1.3e-6, abs=1e-5)
    scaled = factors(linear, before)
    assert scaled.std().item() == pytest.approx(0, abs=1e-7) and scaled[0] < 1
    assert all(same_bits(p.grad, grad) for p, grad in zip(decomposed.parameters(), after, strict=True))


@pytest.mark.parametrize("norm_type", [0.5, 1.5, 2, 4, "inf"])
def test_torch_nn_small_gradients_keep_their_size(norm_type, device):
    before = [torch.rand(10, 10, device=device) / 10000, torch.ones(10, device=device) / 500]
    if norm_type == 0.5:  # the quasi-norm of 110 small elements is not small
        before = [grad / 1000 for grad in before]
    linear = linear_with(before)
    norm = tg.clip_grad_norm_(linear.parameters(), 2, norm_type=norm_type)
    assert norm.item() <= 2
    assert all(same_bits(p.grad, grad) for p, grad in zip(linear.parameters(), before, strict=True))


def test_torch_nn_one_tensor_is_a_list_of_one(device):
    gradient = torch.randn(10, 10, device=device) * 5
    alone, listed = nn.Parameter(torch.zeros(10, 10, device=device)), nn.Parameter(torch.zeros(10, 10, device=device))
    alone.grad, listed.grad = gradient.clone(), gradient.clone()
    assert same_bits(tg.clip_grad_norm_(alone, 1.0), tg.clip_grad_norm_([listed], 1.0))
    assert same_bits(alone.grad, listed.grad) and not same_bits(alone.grad, gradient)
    assert same_bits(tg.get_total_norm(gradient), tg.get_total_norm([gradient]))


def test_torch_nn_an_exhausted_generator_warns_once_in_torchs_words(device):
    parameters = nn.Linear(2, 2, device=device).parameters()
    assert len(list(parameters)) == 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tg.clip_grad_norm_(parameters, 1.0)
        tg.clip_grad_norm_([], 1.0)
    words = "`parameters` is an empty generator, no gradient clipping will occur."
    assert [str(warning.message) for warning in caught] == [words]
    assert caught[0].filename == __file__


def three_parameters(device: str, where: int, value: float) -> list[nn.Parameter]:
    """Gradients of ones, with ``value`` in the middle of one of them."""
    parameters = [nn.Parameter(torch.zeros(10, 10, device=device)) for _ in range(3)]
    for index, parameter in enumerate(parameters):
        parameter.grad = torch.ones(10, 10, device=device)
        parameter.grad[4, 4] = value if index == where else 1.0
    return parameters


def assert_refused_and_kept(parameters: list[nn.Parameter], norm_type: float) -> None:
    before = copies([p.grad for p in parameters])
    with pytest.raises(RuntimeError, match="non-finite"):
        tg.clip_grad_norm_(parameters, 1.0, norm_type, error_if_nonfinite=True)
    assert all(same_bits(p.grad, grad) for p, grad in zip(parameters, before, strict=True))


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("norm_type", [0.5, 1.5, 2.0, 4.0, INF])
def test_torch_nn_a_norm_that_is_not_finite_raises_only_when_asked_and_before_any_write(value, norm_type, device):
    for where in range(3):
        parameters = three_parameters(device, where, value)
        assert_refused_and_kept(parameters, norm_type)
        norm = tg.clip_grad_norm_(parameters, 1.0, norm_type)
        after = torch.stack([p.grad for p in parameters])
        if math.isnan(value):
            assert norm.isnan() and after.isnan().all()
        else:
            assert norm.item() == INF and after[where, 4, 4].isnan()
            assert after.nan_to_num(0.0).count_nonzero() == 0 and after.isnan().sum() == 1


@pytest.mark.parametrize("norm_type", [2.0, 4.0])
def test_torch_nn_finite_gradients_whose_norm_overflows_count_as_not_finite(norm_type, device):
    parameters = three_parameters(device, 1, 2e22)
    assert_refused_and_kept(parameters, norm_type)
    assert tg.clip_grad_norm_(parameters, 1.0, norm_type).item() == INF
    assert not any(p.grad.any() for p in parameters)


@pytest.mark.parametrize("norm_type", [0.5, 1.5, INF])
def test_torch_nn_large_gradients_whose_norm_fits_are_clipped(norm_type, device):
    parameters = three_parameters(device, 1, 2e22)
    norm = tg.clip_grad_norm_(parameters, 1.0, norm_type, error_if_nonfinite=True)
    assert norm.item() == pytest.approx(2e22, rel=1e-5) and parameters[1].grad.amax().item() == pytest.approx(1.0)


# torch/test/test_foreach.py


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_torch_foreach_tensors_of_more_than_one_chunk(dtype, p, device):
    tensors = [torch.randn(131072, device=device).to(dtype) for _ in range(3)]
    norms = ops.multi_tensor_norms(tensors, p)
    for norm, tensor in zip(norms, tensors, strict=True):
        assert norm.item() == pytest.approx(reference_norm([tensor], p), rel=1e-6)


@pytest.mark.parametrize("is_captured", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, INF])
def test_torch_foreach_four_thousand_small_tensors_with_empty_ones_between(p, is_captured, device):
    device = "cuda" if is_captured else device
    empty = {200, 1500, 1501, 2800, 2801, 2802, 3500, 3998}
    tensors = [torch.randn((0,) if i in empty else (2, 3), device=device) for i in range(4000)]
    norms, total = ops.multi_tensor_norms(tensors, p), ops.multi_tensor_norm(tensors, p)
    if is_captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            norms, total = ops.multi_tensor_norms(tensors, p), ops.multi_tensor_norm(tensors, p)
        norms.fill_(NAN)
        graph.replay()
    full = [i for i in range(4000) if i not in empty]
    expected = torch.linalg.vector_norm(torch.stack([tensors[i] for i in full]).flatten(1).double(), p, dim=1)
    torch.testing.assert_close(norms[full].double(), expected, rtol=1e-6, atol=0)
    assert not norms[sorted(empty)].any()
    assert total.item() == pytest.approx(reference_norm(tensors, p), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_torch_foreach_large_values(dtype, device):
    size = math.sqrt(torch.finfo(dtype).max)
    tensors = [(torch.rand(100, device=device, dtype=torch.float64) * size).to(dtype) for _ in range(10)]
    norms, total = ops.multi_tensor_norms(tensors), ops.multi_tensor_norm(tensors)
    for norm, part in [*zip(norms, ([t] for t in tensors), strict=True), (total, tensors)]:
        expected = reference_norm(part, 2.0)
        fits = expected <= math.sqrt(torch.finfo(norm.dtype).max)
        # A sum of squares that fp32 cannot hold may become infinite, and torch's is; nothing else may.
        assert norm.item() == pytest.approx(expected, rel=1e-6) or (norm.item() == INF and not fits)
    if dtype == torch.float16:
        assert norms.isfinite().all() and total.isfinite()


def test_torch_foreach_empty_tensors_between_large_ones(device):
    """The sizes of pytorch#140066, a sixteenth of them on the CPU."""
    part = 1 if device == "cuda" else 16
    sizes = [n // part for n in (4915200, 4915200, 4915200, 2457600, 0, 0, 4915200)]
    tensors = [torch.randn(n, device=device) for n in sizes]
    for p in (1.0, 2.0, INF):
        for norm, tensor in zip(ops.multi_tensor_norms(tensors, p), tensors, strict=True):
            assert norm.item() == pytest.approx(reference_norm([tensor], p), rel=1e-6)
    many = [torch.randn(0 if i % 7 == 3 or i > 209 else 19, device=device) for i in range(215)]
    assert ops.multi_tensor_norm(many).item() == pytest.approx(reference_norm(many, 2.0), rel=1e-6)


# apex/contrib/test/clip_grad


def apex_parameters(count: int, dtypes: list[torch.dtype], devices: list[str]) -> list[nn.Parameter]:
    draw, parameters = random.Random(1234), []
    for _ in range(count):
        shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 3))]
        options = {"device": draw.choice(devices), "dtype": draw.choice(dtypes)}
        parameters.append(nn.Parameter(torch.randn(shape, **options)))
        parameters[-1].grad = torch.randn(shape, **options)
    return parameters


def apex_twin(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    twins = [nn.Parameter(p.detach().clone()) for p in parameters]
    for twin, parameter in zip(twins, parameters, strict=True):
        twin.grad = parameter.grad.clone()
    return twins


@pytest.mark.parametrize("norm_type", [2.0, 1.0, INF])
@pytest.mark.parametrize(
    ("count", "dtypes"),
    [(41, [torch.float32, torch.float16, torch.float64]), (11, [torch.float16]), (17, [torch.float32])],
)
def test_apex_norm_and_gradients_are_torchs_and_parameters_stay(count, dtypes, norm_type, device):
    devices = ["cpu", "cuda"] if device == "cuda" else ["cpu"]
    ours = apex_parameters(count, dtypes, devices)
    theirs, values = apex_twin(ours), [p.detach().clone() for p in ours]
    norm = tg.clip_grad_norm_(ours, 0.54321, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.54321, norm_type)
    torch.testing.assert_close(norm.cpu().double(), expected.cpu().double(), rtol=1e-3, atol=1e-20)
    tolerances = {torch.float32: 1e-6, torch.float64: 1e-6 if len(dtypes) > 1 else 1e-15}
    for mine, other in zip(ours, theirs, strict=True):
        # torch keeps norm, sum, reciprocal, factor and product in fp16: half an ulp, 2^-11, is lost in each of them.
        rtol = 3e-3 if torch.float16 in dtypes else tolerances[mine.dtype]
        torch.testing.assert_close(mine.grad, other.grad, rtol=rtol, atol=1e-20)
    assert all(torch.equal(p, value) for p, value in zip(ours, values, strict=True))


def test_apex_another_maximum_gives_other_gradients(device):
    ours = apex_parameters(11, [torch.float32], [device])
    theirs = apex_twin(ours)
    tg.clip_grad_norm_(ours, 1.23)
    torch.nn.utils.clip_grad_norm_(theirs, 3.21)
    assert not any(torch.allclose(p.grad, q.grad, rtol=1e-3) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("value", [NAN, INF])
def test_apex_what_is_not_finite_raises(value, device):
    parameters = apex_parameters(11, [torch.float32, torch.float16], [device])
    parameters[7].grad.view(-1)[0] = value
    with pytest.raises(RuntimeError, match="non-finite"):
        tg.clip_grad_norm_(parameters, 0.54321, error_if_nonfinite=True)


# transformer_engine/tests/pytorch/test_multi_tensor.py

SIZE_PAIRS = [(7777 * 77, 555 * 555), (777, 555), (555, 65537), (65537, 555), (555, 65536), (65536, 555)]
SIZE_PAIRS += [(33333, 555), (555, 33333)]
SIZE_CASES = [(pair, 1) for pair in SIZE_PAIRS] + [((777, 555), 55), ((555, 33333), 55)]
LARGE_CASES = [(pair, 55) for pair in SIZE_PAIRS]
NARROW = (torch.float32, torch.float16, torch.bfloat16)


def lists_of(case: tuple, dtype: torch.dtype, value: float, device: str) -> list[Tensor]:
    sizes, repeat = case
    return [torch.full((size,), value, dtype=dtype, device=device) for _ in range(repeat) for size in sizes]


def check_scale(case: tuple, from_dtype: torch.dtype, to_dtype: torch.dtype, device: str) -> None:
    """4 * (1 / 4) is 1, and the flag tells a NaN or infinity at the ends and in the middle."""
    sources, scale = lists_of(case, from_dtype, 4.0, device), torch.tensor(0.25, device=device)
    results, found_inf = lists_of(case, to_dtype, NAN, device), torch.zeros(1, device=device)
    with no_sync(device):
        ops.multi_tensor_copy_(results, sources, scale=scale, found_inf=found_inf)
    assert all(bool((result == 1).all()) for result in results) and found_inf.item() == 0
    places = [(0, 0, NAN), (-1, -1, INF), (len(sources) // 2, sources[len(sources) // 2].numel() // 2, INF)]
    for index, element, value in places:
        kept = sources[index][element].clone()
        sources[index][element] = value
        ops.multi_tensor_copy_(results, sources, scale=scale, found_inf=found_inf)
        assert found_inf.item() > 0, (index, element)
        found_inf.zero_()
        if from_dtype == to_dtype:  # in place, by a tensor and by a number
            for factor in (scale, 0.25):
                ops.multi_tensor_scale_(copies(sources), factor, found_inf=found_inf)
                assert found_inf.item() > 0, (index, element)
                found_inf.zero_()
        sources[index][element] = kept


@pytest.mark.parametrize("dtypes", [(a, b) for a in NARROW for b in NARROW], ids=str)
@pytest.mark.parametrize("case", SIZE_CASES, ids=str)
def test_transformer_engine_scale_and_its_flag(case, dtypes, device):
    check_scale(case, *dtypes, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(a, b) for a in NARROW for b in NARROW], ids=str)
@pytest.mark.parametrize("case", LARGE_CASES, ids=str)
def test_transformer_engine_scale_and_its_flag_of_long_lists(case, dtypes):
    check_scale(case, *dtypes, "cuda")


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("case", SIZE_CASES, ids=str)
def test_transformer_engine_l2norm_in_total_and_per_tensor(case, dtype, device):
    tensors = lists_of(case, dtype, 4.0, device)
    with no_sync(device):
        total, each = ops.multi_tensor_norm(tensors), ops.multi_tensor_norms(tensors)
    numbers = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.float64)
    assert total.item() == pytest.approx(4 * math.sqrt(numbers.sum()), rel=1e-6)
    torch.testing.assert_close(each.cpu().double(), 4 * numbers.sqrt(), rtol=1e-6, atol=0)


# pytorch#194434


def test_bf16_gradients_accumulate_in_fp32(device):
    destination = torch.full((7,), NAN, device=device)
    for store, value in ((True, 256.0), (False, 1.0), (False, -256.0)):
        source = torch.full((7,), value, device=device, dtype=torch.bfloat16)
        ops.multi_tensor_accumulate_([destination], [source], store=store)
    assert destination.tolist() == [1.0] * 7
