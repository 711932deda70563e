"""multi_tensor_clip_ against ``clipped``: torch's coefficient, one multiplication in fp32, one rounding."""

import math
import subprocess
import sys
from itertools import compress

import pytest
import torch
from references import clipped, coefficient, reference_norm
from tensor_lists import CHUNK, FLOATS, SIZES, Fences, all_same_bits, copies, no_sync, random_list, same_bits

from te_graph import _C  # noqa: F401 (registers the ops)

ops = torch.ops.te_graph
INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("ratio", [0.0, 1e-30, 0.3, 0.999, 1.0, 1.5, INF])
@pytest.mark.parametrize("dtypes", [*([d] for d in FLOATS), [torch.float32, torch.bfloat16, torch.float16]], ids=str)
def test_gradients_get_the_bits_of_the_reference(dtypes, ratio, device):
    fences, tensors = Fences(), random_list(SIZES, dtypes, device)
    tensors = [fences.place(tensor, offset) for offset, tensor in enumerate(tensors)]
    total = ops.multi_tensor_norm(tensors)
    max_norm = ratio * total.item()
    expected, total_before = clipped(tensors, total, max_norm), total.clone()
    with no_sync(device):
        assert ops.multi_tensor_clip_(tensors, total, max_norm) is None
    assert all_same_bits(tensors, expected)
    assert same_bits(total, total_before)
    fences.assert_intact()


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, INF])
@pytest.mark.parametrize("ratio", [0.3, 1.5])
def test_norm_and_clip_in_one_op_are_norm_and_clip(ratio, p, device):
    tensors = random_list(SIZES, [torch.float32, torch.bfloat16, torch.float16], device)
    total = ops.multi_tensor_norm(tensors, p)
    max_norm = ratio * total.item()
    expected = clipped(tensors, total, max_norm)
    with no_sync(device):
        norm = ops.multi_tensor_clip_norm_(tensors, max_norm, p)
    assert same_bits(norm, total) and all_same_bits(tensors, expected)


@pytest.mark.parametrize(("value", "flag"), [(1.0, 0.0), (1.0, 1.0), (NAN, 0.0), (INF, 0.0)])
def test_found_inf_gates_norm_and_clip_in_one_op_but_not_the_norm(value, flag, device):
    tensors, found_inf = random_list(SIZES, [torch.float32], device), torch.tensor(flag, device=device)
    tensors[3][5] = value
    total = ops.multi_tensor_norm(tensors)
    is_clipped = flag == 0 and math.isfinite(value)
    expected = clipped(tensors, total, 1.0) if is_clipped else copies(tensors)
    norm = ops.multi_tensor_clip_norm_(tensors, 1.0, found_inf=found_inf)
    assert same_bits(norm, total) and all_same_bits(tensors, expected)
    assert bool(found_inf) is not is_clipped


def test_clipped_gradients_have_the_norm_asked_for(device):
    tensors = random_list(SIZES, [torch.float32], device)
    ops.multi_tensor_clip_(tensors, ops.multi_tensor_norm(tensors), 2.0)
    assert reference_norm(tensors, 2.0) == pytest.approx(2.0, rel=1e-5)


def test_a_total_in_fp64_clips_tensors_of_every_dtype(device):
    tensors = random_list(SIZES, FLOATS, device)
    total = ops.multi_tensor_norm(tensors)
    assert total.dtype == torch.float64
    expected = clipped(tensors, total, 3.0)
    ops.multi_tensor_clip_(tensors, total, 3.0)
    for got, want in zip(tensors, expected, strict=True):
        # The coefficient may be rounded to fp32 before it is applied, which moves a result by a unit in its last place.
        torch.testing.assert_close(got, want, rtol=2 * torch.finfo(got.dtype).eps, atol=0)
    is_wide = [tensor.dtype == torch.float64 for tensor in tensors]
    assert all_same_bits(list(compress(tensors, is_wide)), list(compress(expected, is_wide)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_where_nothing_is_clipped_every_bit_stays(dtype, device):
    itemsize = torch.empty(0, dtype=dtype).element_size()
    # Random bytes: NaNs with payloads, infinities, negative zeros and subnormals among them.
    tensors = [
        torch.randint(0, 256, (size * itemsize,), dtype=torch.uint8, device=device).view(dtype) for size in SIZES
    ]
    before = copies(tensors)
    for total, max_norm in ((1.0, 2.0), (0.0, 1.0), (1.0, INF), (2.0, 2.0 * (1 + 1e-5)), (0.0, 1e-6)):
        ops.multi_tensor_clip_(tensors, torch.tensor(total, device=device), max_norm)
        assert all_same_bits(tensors, before), (total, max_norm)


def test_the_coefficient_is_one_only_where_torchs_is(device):
    """Around one: totals that differ in the last bits."""
    tensor = torch.randn(1000, device=device)
    kept = 0
    for step in range(-40, 40):
        total = torch.tensor(1.0 - 1e-6 + step * 2.0**-24, device=device)
        mine, expected = tensor.clone(), clipped([tensor], total, 1.0)
        ops.multi_tensor_clip_([mine], total, 1.0)
        assert same_bits(mine, expected[0]), step
        kept += bool(coefficient(total, 1.0) == 1)
    assert 10 < kept < 70


WRITE_PROTECTED = """
import mmap, warnings, torch
from te_graph import _C
warnings.simplefilter("ignore")
protected = mmap.mmap(-1, 40000, prot=mmap.PROT_READ)
tensors = [
    torch.frombuffer(protected, dtype=torch.float32, count=9000),
    torch.frombuffer(protected, dtype=torch.bfloat16, count=1000, offset=36000),
]
clip, gate = torch.ops.te_graph.multi_tensor_clip_, torch.tensor(1.0)
clip(tensors, torch.tensor(1.0), 2.0)
clip(tensors, torch.tensor(2.0), 1.0, found_inf=gate)
print("untouched", flush=True)
clip(tensors, torch.tensor(2.0), 1.0)
print("not reached")
"""


def test_where_nothing_is_clipped_nothing_is_written():
    """In memory that cannot be written: the last call, which clips, ends the process."""
    process = subprocess.run([sys.executable, "-c", WRITE_PROTECTED], capture_output=True, text=True)
    assert process.stdout.split() == ["untouched"], process.stderr
    assert process.returncode < 0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_an_infinite_norm_makes_finite_gradients_zero_and_infinite_ones_nan(dtype, device):
    tensors = [torch.tensor([1.0, -2.0, INF, -INF, NAN], dtype=dtype, device=device), torch.ones(9000, device=device)]
    total = ops.multi_tensor_norm([tensors[0][:3]])
    assert total.item() == INF
    ops.multi_tensor_clip_(tensors, total, 1.0)
    assert tensors[0][:2].tolist() == [0.0, 0.0] and math.copysign(1, tensors[0][1].item()) == -1
    assert tensors[0][2:].isnan().all()
    assert not tensors[1].any()


@pytest.mark.parametrize("max_norm", [0.0, 1.0, INF])
def test_a_norm_that_is_nan_makes_all_gradients_nan(max_norm, device):
    tensors = random_list([3, CHUNK + 1], [torch.float32, torch.bfloat16], device)
    ops.multi_tensor_clip_(tensors, torch.tensor(NAN, device=device), max_norm)
    assert all(tensor.isnan().all() for tensor in tensors)


def test_an_infinite_norm_and_an_infinite_maximum_give_nan_as_in_torch(device):
    tensor, parameter = torch.ones(5, device=device), torch.nn.Parameter(torch.ones(5, device=device))
    parameter.grad, total = torch.ones(5, device=device), torch.tensor(INF, device=device)
    torch.nn.utils.clip_grads_with_norm_([parameter], INF, total)
    ops.multi_tensor_clip_([tensor], total, INF)
    assert tensor.isnan().all() and parameter.grad.isnan().all()


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize(("flag", "is_clipped"), [(0.0, True), (-0.0, True), (1.0, False), (3.0, False)])
def test_found_inf_keeps_gradients_as_they_are(flag, is_clipped, shape, device):
    tensors, total = random_list(SIZES, [torch.float32, torch.bfloat16], device), torch.tensor(9.0, device=device)
    found_inf = torch.full(shape, flag, device=device)
    expected = clipped(tensors, total, 1.0) if is_clipped else copies(tensors)
    with no_sync(device):
        ops.multi_tensor_clip_(tensors, total, 1.0, found_inf=found_inf)
    assert all_same_bits(tensors, expected)
    assert bool(found_inf) is bool(flag)


@pytest.mark.parametrize("value", [NAN, INF])
def test_a_norm_that_is_not_finite_sets_found_inf_and_changes_nothing_else(value, device):
    tensors, total = random_list(SIZES, [torch.float32, torch.bfloat16], device), torch.tensor(value, device=device)
    found_inf, before = torch.zeros(1, device=device), copies(tensors)
    with no_sync(device):
        ops.multi_tensor_clip_(tensors, total, 1.0, found_inf=found_inf)
    assert all_same_bits(tensors, before) and found_inf.item() == 1


def test_transposed_and_gapped_gradients_are_clipped_and_nothing_else(device):
    whole = torch.randn(90, 120, device=device)
    before, inner = whole.clone(), torch.zeros(90, 120, dtype=torch.bool, device=device)
    inner[5:60:3, 7:100] = True
    tensors = [whole[5:60:3, 7:100].t(), torch.randn(70, 130, device=device).t()]
    expected = clipped(tensors, torch.tensor(5.0, device=device), 2.0)
    ops.multi_tensor_clip_(tensors, torch.tensor(5.0, device=device), 2.0)
    assert all_same_bits(tensors, expected)
    assert torch.equal(whole[~inner], before[~inner]) and not torch.equal(whole[inner], before[inner])


@pytest.mark.parametrize("count", [1, 109, 700, 5000])
def test_lists_of_any_length_with_empty_tensors_are_clipped(count, device):
    tensors = random_list([3, 0, 1, 5], [torch.bfloat16, torch.float32, torch.float32], device) * (count // 4)
    tensors = [*copies(tensors), torch.randn(2, device=device), torch.empty(0, device=device)]
    total = ops.multi_tensor_norm(tensors)
    expected = clipped(tensors, total, total.item() / 3)
    ops.multi_tensor_clip_(tensors, total, total.item() / 3)
    assert all_same_bits(tensors, expected)


def test_an_empty_list_is_clipped_without_a_word(device):
    ops.multi_tensor_clip_([], torch.tensor(1.0, device=device), 1.0)
    ops.multi_tensor_clip_([torch.empty(0, device=device)], torch.tensor(2.0, device=device), 1.0)


def test_clipping_counts_as_a_write_for_autograd(device):
    tensor = torch.randn(10, device=device)
    version = tensor._version
    ops.multi_tensor_clip_([tensor], torch.tensor(2.0, device=device), 1.0)
    assert tensor._version > version


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements():
    huge = torch.ones(2**31 + 7, device="cuda", dtype=torch.bfloat16)
    ops.multi_tensor_clip_([huge], torch.tensor(4.0, device="cuda"), 1.0)
    # eps brings the coefficient just below a quarter, which bf16 rounds back.
    assert huge.aminmax() == (0.25, 0.25)


@pytest.mark.gpu
def test_a_captured_clip_reads_norm_and_flag_at_each_replay():
    tensors = random_list([CHUNK + 1, 3], [torch.bfloat16, torch.float32], "cuda")
    total, found_inf = torch.tensor(1.0, device="cuda"), torch.zeros(1, device="cuda")
    ops.multi_tensor_clip_(tensors, total, 1.5, found_inf=found_inf)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.multi_tensor_clip_(tensors, total, 1.5, found_inf=found_inf)
    for norm, flag in ((1.0, 0.0), (2.0, 0.0), (2.0, 1.0), (3.0, 0.0)):
        total.fill_(norm)
        found_inf.fill_(flag)
        expected = copies(tensors) if flag else clipped(tensors, total, 1.5)
        with no_sync("cuda"):
            graph.replay()
        assert all_same_bits(tensors, expected), (norm, flag)
