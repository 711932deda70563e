"""multi_tensor_norm, _norms, _norm_partial and _norm_finish against norms in float64 (``reference_norm``).

Sums run in fp32 within fixed chunks and exactly between them, so that a relative error of 1e-6 is kept by lists of any
length, and order and grouping change no bit.
"""

import math

import pytest
import torch
from references import reference_norm, wide_dtype
from tensor_lists import CHUNK, FLOATS, SIZES, Fences, all_same_bits, copies, no_sync, random_list, same_bits

from te_graph import _C  # noqa: F401 (registers the ops)

ops = torch.ops.te_graph
partial = ops.multi_tensor_norm_partial  # its bits tell of every rounding; those of a norm hide most of them
INF, NAN = math.inf, math.nan
POWERS = (0.0, 0.5, 1.0, 1.1, 1.5, 2.0, 3.0, 4.0, INF)  # 1.1 is no fp32 number
TOLERANCE = 1e-6  # relative, of a norm in fp32


def assert_norm(got: torch.Tensor, tensors: list[torch.Tensor], p: float) -> None:
    """``got`` [] is the p-norm of ``tensors`` [...], of the dtype and on the device that are promised."""
    assert (got.dtype, got.shape, got.device) == (wide_dtype(*tensors), (), tensors[0].device)
    all_wide = all(t.dtype == torch.float64 for t in tensors)
    # A root of order p below one multiplies relative errors of the sum by 1 / p.
    tolerance = (1e-13 if all_wide else TOLERANCE) * max(1.0, 2 / p if p else 1.0)
    assert got.item() == pytest.approx(reference_norm(tensors, p), rel=0 if p in (0, INF) else tolerance, abs=0)


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_norm_of_a_list_is_that_of_all_its_elements(dtype, p, device):
    tensors = random_list(SIZES, [dtype], device)
    before = copies(tensors)
    with no_sync(device):
        got = ops.multi_tensor_norm(tensors, p)
    assert_norm(got, tensors, p)
    assert all_same_bits(tensors, before)


@pytest.mark.parametrize("p", POWERS)
def test_mixed_dtypes_need_one_call_and_give_fp32(p, device):
    tensors = random_list(SIZES * 2, [torch.float32, torch.bfloat16, torch.float16], device)
    with no_sync(device):
        got = ops.multi_tensor_norm(tensors, p)
    assert_norm(got, tensors, p)


def test_one_fp64_tensor_makes_the_result_fp64(device):
    tensors = random_list(SIZES, [torch.bfloat16, torch.float32, torch.float64], device)
    assert_norm(ops.multi_tensor_norm(tensors), tensors, 2.0)
    assert ops.multi_tensor_norms(tensors).dtype == torch.float64


def test_two_is_the_default_power(device):
    tensors = random_list(SIZES, FLOATS, device)
    assert same_bits(ops.multi_tensor_norm(tensors), ops.multi_tensor_norm(tensors, 2.0))
    assert torch.equal(ops.multi_tensor_norm_partial(tensors), ops.multi_tensor_norm_partial(tensors, 2.0))
    assert same_bits(ops.multi_tensor_norms(tensors), ops.multi_tensor_norms(tensors, 2.0))


def test_zero_counts_what_is_not_zero_in_all_tensors_together(device):
    tensors = [torch.zeros(2 * CHUNK + 3, device=device, dtype=dtype) for dtype in FLOATS]
    assert ops.multi_tensor_norm(tensors, 0.0).item() == 0
    for tensor in tensors:
        tensor[[0, 1, CHUNK, -1]] = torch.tensor([-1.0, NAN, INF, -0.0], device=device, dtype=tensor.dtype)
        tensor[2] = torch.finfo(tensor.dtype).smallest_normal / 2  # subnormal
    assert ops.multi_tensor_norm(tensors, 0.0).item() == 4 * len(FLOATS)
    assert ops.multi_tensor_norms(tensors, 0.0).tolist() == [4.0] * len(FLOATS)


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, INF])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_infinity_propagate_from_any_place(dtype, p, device):
    for where in (0, CHUNK - 1, CHUNK, -1):
        tensors = random_list([3, 2 * CHUNK + 77, 0, 5], [dtype], device)
        tensors[1][where] = -INF
        assert ops.multi_tensor_norm(tensors, p).item() == INF, where
        tensors[0][0] = INF
        assert ops.multi_tensor_norm(tensors, p).item() == INF, where
        tensors[1][where] = NAN
        assert math.isnan(ops.multi_tensor_norm(tensors, p).item()), where
        norms = ops.multi_tensor_norms(tensors, p)
        assert norms[0].item() == INF and norms[1].isnan() and norms[2:].isfinite().all(), where


def test_4096_bf16_tensors_have_an_accurate_norm_however_they_are_grouped(device):
    sizes = torch.randint(1, 200, (4096,)).tolist()
    tensors = random_list(sizes, [torch.bfloat16], device)
    whole = ops.multi_tensor_norm(tensors)
    assert_norm(whole, tensors, 2.0)
    for groups in (2, 3, 64):
        partials = [ops.multi_tensor_norm_partial(tensors[i::groups]) for i in range(groups)]
        assert same_bits(ops.multi_tensor_norm_finish(sum(partials[1:], partials[0]), 2.0, torch.float32), whole)


@pytest.mark.parametrize("p", POWERS)
def test_order_and_repetition_change_no_bit(p, device):
    tensors = random_list(SIZES * 3, [torch.float32, torch.bfloat16, torch.float16], device)
    first = ops.multi_tensor_norm(tensors, p)
    assert same_bits(ops.multi_tensor_norm(tensors, p), first)
    for _ in range(3):
        shuffled = [tensors[i] for i in torch.randperm(len(tensors)).tolist()]
        assert same_bits(ops.multi_tensor_norm(shuffled, p), first)
        assert torch.equal(partial(shuffled, p), partial(tensors, p))


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("dtypes", [FLOATS[:1], FLOATS[2:], FLOATS[1:2], FLOATS], ids=str)
def test_states_of_parts_combine_to_the_state_of_the_whole(dtypes, p, device):
    tensors = random_list(SIZES * 2, dtypes, device)
    whole, dtype = ops.multi_tensor_norm_partial(tensors, p), wide_dtype(*tensors)
    assert whole.dtype == torch.int64 and whole.device == tensors[0].device
    before = whole.clone()
    for _ in range(2):
        assert same_bits(ops.multi_tensor_norm_finish(whole, p, dtype), ops.multi_tensor_norm(tensors, p))
    assert torch.equal(whole, before)
    parts = [ops.multi_tensor_norm_partial(part, p) for part in (tensors[:5], tensors[5:6], tensors[6:])]
    combined = torch.stack(parts).amax(0) if p == INF else torch.stack(parts).sum(0)
    assert same_bits(ops.multi_tensor_norm_finish(combined, p, dtype), ops.multi_tensor_norm(tensors, p))


@pytest.mark.parametrize("p", [1.0, 2.0, INF])
@pytest.mark.parametrize("value", [INF, NAN])
def test_states_carry_what_is_not_finite(value, p, device):
    clean, spoilt = random_list([CHUNK + 1, 9], [torch.float32], device)
    spoilt[4] = value
    for many in (1, 2, 5):
        parts = torch.stack([ops.multi_tensor_norm_partial([t], p) for t in [clean] * many + [spoilt] * many])
        combined = parts.amax(0) if p == INF else parts.sum(0)
        got = ops.multi_tensor_norm_finish(combined, p, torch.float32).item()
        assert math.isnan(got) if math.isnan(value) else got == INF


@pytest.mark.parametrize("p", POWERS)
def test_norms_of_single_tensors_are_norms_of_lists_of_one(p, device):
    tensors = random_list(SIZES * 2, [torch.float32, torch.bfloat16, torch.float16], device)
    with no_sync(device):
        norms = ops.multi_tensor_norms(tensors, p)
    assert (norms.shape, norms.dtype) == ((len(tensors),), torch.float32)
    for norm, tensor in zip(norms, tensors, strict=True):
        assert same_bits(norm, ops.multi_tensor_norm([tensor], p))


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, INF])
@pytest.mark.parametrize("places", [[0], [-1], [109], [110], [447], [109, 110, 447, -1], [0, 1, 2, -2, -1]], ids=str)
def test_empty_tensors_anywhere_add_nothing(places, p, device):
    tensors = random_list([5] * 450, [torch.float32], device)
    expected = [t for i, t in enumerate(tensors) if i not in {place % 450 for place in places}]
    for place in places:
        tensors[place] = tensors[place].new_empty(3, 0)
    assert same_bits(ops.multi_tensor_norm(tensors, p), ops.multi_tensor_norm(expected, p))
    assert_norm(ops.multi_tensor_norm(tensors, p), tensors, p)


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, INF])
def test_the_norm_of_nothing_is_zero(p, device):
    for count in (1, 3, 500):
        norm = ops.multi_tensor_norm([torch.empty(0, device=device) for _ in range(count)], p)
        assert (norm.item(), norm.dtype, norm.device.type) == (0.0, torch.float32, device)
    assert ops.multi_tensor_norms([torch.empty(0, device=device)] * 2, p).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, INF])
def test_the_norm_of_an_empty_list_is_zero_on_the_cpu(p):
    norm = ops.multi_tensor_norm([], p)
    assert (norm.item(), norm.dtype, norm.shape, norm.device.type) == (0.0, torch.float32, (), "cpu")
    assert ops.multi_tensor_norms([], p).shape == (0,)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_odd_storage_offsets_change_no_bit(dtype, device):
    tensors = random_list([1, 2, 15, CHUNK, 2 * CHUNK + 3], [dtype], device)
    fences = Fences()
    for offset in (1, 2, 3, 5, 7, 8, 13):
        moved = [fences.place(tensor, offset) for tensor in tensors]
        for p in (1.0, 2.0, INF):
            assert torch.equal(partial(moved, p), partial(tensors, p)), (offset, p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense_tensors_in_any_order_of_dimensions_are_read_as_they_lie_in_memory(dtype, device):
    flat = random_list([3 * 41 * 7 * 19], [dtype], device)[0]
    expected = partial([flat])
    for shape, order in (((123, 133), (1, 0)), ((3, 41, 133), (2, 0, 1)), ((3, 41, 7, 19), (0, 3, 1, 2))):
        view = flat.view(shape).permute(order)
        assert torch.equal(partial([view]), expected), order
        assert_norm(ops.multi_tensor_norm([view]), [flat], 2.0)
    assert_norm(ops.multi_tensor_norm([flat.view(123, 133).t().contiguous()]), [flat], 2.0)


def test_tensors_with_gaps_count_only_their_elements(device):
    whole = torch.full((150, 200), NAN, device=device)
    rows, columns = whole[::3, :90], whole[1:40:2, 91::2].t()
    for view in (rows, columns):
        view.copy_(torch.randn(view.shape, device=device))
    for p in POWERS:
        assert_norm(ops.multi_tensor_norm([rows, columns], p), [rows, columns], p)


def test_sums_of_squares_beyond_fp32_do_not_overflow_between_chunks(device):
    tensors = [torch.full((100 * CHUNK,), 1.8e17, device=device), torch.full((7,), 5e18, device=device)]
    assert reference_norm(tensors, 2.0) ** 2 > torch.finfo(torch.float32).max
    assert_norm(ops.multi_tensor_norm(tensors), tensors, 2.0)
    assert_norm(ops.multi_tensor_norms(tensors)[0], tensors[:1], 2.0)


def test_a_norm_is_finite_and_right_wherever_torchs_is(device):
    for exponent in torch.linspace(15, 21, 25).tolist():
        tensors = [t * 10**exponent for t in random_list([5, CHUNK + 1, 3 * CHUNK], [torch.float32], device)]
        theirs = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))
        ours = ops.multi_tensor_norm(tensors)
        assert ours.isfinite() or not theirs.isfinite(), exponent
        assert not ours.isnan(), exponent
        if ours.isfinite():
            assert_norm(ours, tensors, 2.0)


def test_fp16_norms_beyond_the_range_of_fp16_are_finite(device):
    tensors = [torch.full((size,), 6e4, device=device, dtype=torch.float16) for size in (1, 9000, 100)]
    assert ops.multi_tensor_norm(tensors).item() > torch.finfo(torch.float16).max
    for p in (1.0, 2.0, 3.0):
        assert_norm(ops.multi_tensor_norm(tensors, p), tensors, p)


@pytest.mark.parametrize("scale", [1e100, 1e-100])
def test_fp64_norms_have_the_range_of_fp64(scale, device):
    tensors = [t * scale for t in random_list(SIZES, [torch.float64], device)]
    for p in (1.0, 2.0, INF):
        assert_norm(ops.multi_tensor_norm(tensors, p), tensors, p)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    huge = torch.ones(2**31 + 7, device="cuda", dtype=torch.bfloat16)
    huge[-1] = 3
    tensors = [torch.ones(5, device="cuda"), huge]
    assert ops.multi_tensor_norm(tensors, 0.0).item() == pytest.approx(2**31 + 12, rel=TOLERANCE)
    assert ops.multi_tensor_norm(tensors, 2.0).item() == pytest.approx(math.sqrt(2**31 + 20), rel=TOLERANCE)
    assert ops.multi_tensor_norm(tensors, INF).item() == 3
    huge[-1] = NAN
    assert all(ops.multi_tensor_norm(tensors, p).isnan().item() for p in (1.0, 2.0, INF))


@pytest.mark.gpu
def test_a_norm_waits_for_the_work_before_it_on_its_own_stream():
    tensors, stream = [torch.zeros(10 * CHUNK, device="cuda") for _ in range(4)], torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        for tensor in tensors:
            tensor.fill_(2.0)
        got = ops.multi_tensor_norm(tensors)
    stream.synchronize()
    assert got.item() == pytest.approx(2 * math.sqrt(40 * CHUNK), rel=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [3, 700, 5000])
def test_a_captured_norm_follows_the_values_of_its_tensors(count):
    tensors = random_list([CHUNK + 1, 3, 0, 700, 5, 1][: min(count, 6)] * (count // 6 + 1), [torch.bfloat16], "cuda")
    ops.multi_tensor_norm(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = ops.multi_tensor_norm(tensors)
    for scale in (1.0, 3.0):
        for tensor in tensors:
            tensor.mul_(scale)
        graph.replay()
        assert same_bits(norm, ops.multi_tensor_norm(tensors))
        assert_norm(norm, tensors, 2.0)
