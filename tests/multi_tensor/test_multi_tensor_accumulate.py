"""multi_tensor_accumulate_, _copy_, _scale_ and _zero_ against plain PyTorch: fp32 (fp64 for fp64), rounded once."""

import itertools
import math

import pytest
import torch
from references import product, reference_norm, wide_dtype
from tensor_lists import CHUNK, FLOATS, SIZES, Fences, all_same_bits, copies, no_sync, random_list, same_bits
from torch import Tensor

from te_graph import _C  # noqa: F401 (registers the ops)

ops = torch.ops.te_graph
INF, NAN = math.inf, math.nan
PAIRS = [  # of accumulate: from, to
    *((dtype, dtype) for dtype in FLOATS),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float32),
]
FLAGS = [((), 0.0), ((1,), 0.0), ((), 1.0), ((1,), 1.0)]


def accumulated(destination: Tensor, source: Tensor, store: bool) -> Tensor:
    """Reference: what ``destination`` [...] holds after ``source`` [...] was stored or added."""
    if store:
        return source.to(destination.dtype, copy=True)
    wide = wide_dtype(destination)
    return (destination.to(wide) + source.to(wide)).to(destination.dtype)


def rounded(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Reference: fp64 ``value`` [...] in ``dtype``, rounded once, ties to even. torch rounds to fp32 on the way."""
    if dtype in (torch.float32, torch.float64):
        return value.to(dtype)
    limits = torch.finfo(dtype)
    unit = torch.ldexp(torch.full_like(value, limits.eps), torch.frexp(value).exponent - 1)
    unit.clamp_(min=limits.smallest_normal * limits.eps)
    return ((value / unit).round() * unit).to(dtype)


def scaled(source: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Reference: ``source`` [...] times ``scale`` [] in ``dtype``. Products are in fp32, and in fp64 for pairs that are
    or include fp64 and for those of fp16 and bf16, neither of which holds the other."""
    if torch.float64 in (source.dtype, dtype) or {source.dtype, dtype} == {torch.float16, torch.bfloat16}:
        return rounded(source.double() * scale.double(), dtype)
    return (source.float() * scale).to(dtype)


def pairs_of(pairs: list[tuple[torch.dtype, torch.dtype]], device: str, fences: Fences, offset: int = 0) -> tuple:
    """Destinations and sources of all ``pairs`` and sizes, fenced; ``offset`` displaces sources by one element more."""
    lists = []
    for index in (1, 0):
        tensors = [random_list([size], [pair[index]], device)[0] for pair in pairs for size in SIZES]
        lists.append([fences.place(tensor, offset + (1 - index)) for tensor in tensors])
    return lists[0], lists[1]


@pytest.mark.parametrize("offset", [0, 1, 6])
@pytest.mark.parametrize("zero_source", [False, True])
@pytest.mark.parametrize("store", [False, True])
def test_all_pairs_of_dtypes_get_the_reference_bits_in_one_call(store, zero_source, offset, device):
    fences = Fences()
    destinations, sources = pairs_of(PAIRS, device, fences, offset)
    if store:
        for destination in destinations:
            destination.fill_(NAN)
    expected = [accumulated(d, s, store) for d, s in zip(destinations, sources, strict=True)]
    left = [torch.zeros_like(s) for s in sources] if zero_source else copies(sources)
    with no_sync(device):
        assert ops.multi_tensor_accumulate_(destinations, sources, store=store, zero_source=zero_source) is None
    assert all_same_bits(destinations, expected)
    assert all_same_bits(sources, left)
    fences.assert_intact()


def test_adding_is_the_default_and_leaves_the_source(device):
    destination, source = torch.ones(5, device=device), torch.full((5,), 2.0, device=device, dtype=torch.bfloat16)
    for expected in (3.0, 5.0, 7.0):
        ops.multi_tensor_accumulate_([destination], [source])
        assert destination.tolist() == [expected] * 5 and source.tolist() == [2.0] * 5


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_squares_of_what_was_written_are_added_to_a_partial(pair, store, device):
    destinations, sources = pairs_of([pair], device, Fences())
    other = random_list([CHUNK + 9, 4], [pair[1]], device)
    partial = ops.multi_tensor_norm_partial(other)
    with no_sync(device):
        ops.multi_tensor_accumulate_(destinations, sources, store=store, sum_squares=partial)
    dtype = wide_dtype(*destinations)
    got = ops.multi_tensor_norm_finish(partial, 2.0, dtype)
    assert same_bits(got, ops.multi_tensor_norm([*destinations, *other]))
    assert got.item() == pytest.approx(reference_norm([*destinations, *other], 2.0), rel=1e-6)


@pytest.mark.parametrize("value", [INF, NAN])
def test_a_state_carries_what_is_not_finite(value, device):
    destination, source = torch.zeros(2 * CHUNK, device=device), torch.ones(2 * CHUNK, device=device)
    source[-1] = value
    partial = torch.zeros_like(ops.multi_tensor_norm_partial([destination]))
    ops.multi_tensor_accumulate_([destination], [source], sum_squares=partial)
    norm = ops.multi_tensor_norm_finish(partial, 2.0, torch.float32).item()
    assert math.isnan(norm) if math.isnan(value) else norm == INF


# A source and a destination whose sum, or whose rounding, is not finite.
NOT_FINITE = {
    "nan": (torch.bfloat16, torch.float32, NAN, 0.0),
    "inf": (torch.float16, torch.float32, -INF, 0.0),
    "in the destination": (torch.float32, torch.float32, 1.0, INF),
    "inf - inf": (torch.float64, torch.float64, -INF, INF),
    "overflow of fp32": (torch.float32, torch.float32, 3e38, 3e38),
    "overflow of fp16": (torch.float16, torch.float16, 6e4, 6e4),
}


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("case", NOT_FINITE)
def test_found_inf_is_set_where_a_written_value_is_not_finite(case, shape, device):
    from_dtype, to_dtype, added, present = NOT_FINITE[case]
    for where in (0, CHUNK, -1):
        destinations = random_list([3, 2 * CHUNK + 1], [to_dtype], device)
        sources = random_list([3, 2 * CHUNK + 1], [from_dtype], device)
        found_inf = torch.zeros(shape, device=device)
        with no_sync(device):
            ops.multi_tensor_accumulate_(destinations, sources, found_inf=found_inf)
        assert same_bits(found_inf, torch.zeros(shape, device=device))
        destinations[1][where], sources[1][where] = present, added
        expected = [accumulated(d, s, False) for d, s in zip(destinations, sources, strict=True)]
        ops.multi_tensor_accumulate_(destinations, sources, found_inf=found_inf)
        assert same_bits(found_inf, torch.ones(shape, device=device)), where
        assert all_same_bits(destinations, expected)


def test_found_inf_is_never_reset_and_a_stored_value_hides_what_it_overwrites(device):
    destination, source = torch.full((9,), NAN, device=device), torch.ones(9, device=device)
    for flag in (0.0, 1.0, 5.0):
        found_inf = torch.tensor(flag, device=device)
        ops.multi_tensor_accumulate_([destination], [source], store=True, found_inf=found_inf)
        assert found_inf.item() == flag
        destination.fill_(NAN)


@pytest.mark.parametrize(("shape", "flag"), FLAGS, ids=str)
def test_noop_gates_everything_that_is_written(shape, flag, device):
    destinations, sources = pairs_of(PAIRS, device, Fences())
    sources[0][0] = INF
    before = copies(destinations), copies(sources)
    written = [accumulated(d, s, False) for d, s in zip(destinations, sources, strict=True)]
    partial = torch.zeros_like(ops.multi_tensor_norm_partial(destinations))
    noop, found_inf = torch.full(shape, flag, device=device), torch.zeros(shape, device=device)
    extras = {"zero_source": True, "sum_squares": partial, "found_inf": found_inf, "noop": noop}
    with no_sync(device):
        ops.multi_tensor_accumulate_(destinations, sources, **extras)
    zeros = [torch.zeros_like(source) for source in sources]
    expected = before if flag else (written, zeros)
    assert all_same_bits(destinations, expected[0]) and all_same_bits(sources, expected[1])
    assert bool(partial.any()) is bool(found_inf.item()) is (flag == 0)
    assert same_bits(noop, torch.full(shape, flag, device=device))


def test_layouts_of_source_and_destination_may_differ(device):
    for make in (lambda t: t.t(), lambda t: t[::2, 1::3], lambda t: t.t()[1:, ::2]):
        destination, source = torch.randn(80, 90, device=device), torch.randn(90, 80, device=device).bfloat16()
        views = make(destination), make(source.t())
        assert views[0].shape == views[1].shape and views[0].stride() != views[1].stride()
        expected = accumulated(views[0], views[1], False)
        inside = torch.zeros_like(destination, dtype=torch.bool)
        make(inside).fill_(True)
        outside = destination[~inside]
        ops.multi_tensor_accumulate_([views[0]], [views[1]], zero_source=True)
        assert same_bits(views[0], expected) and not views[1].any()
        assert torch.equal(destination[~inside], outside)
        assert source.count_nonzero() >= source.numel() - views[1].numel() - 5


@pytest.mark.parametrize("count", [1, 700, 5000])
def test_lists_of_any_length_are_accumulated(count, device):
    sources = copies(random_list([3, 0, 1, 5], [torch.bfloat16], device) * -(-count // 4))[:count]
    destinations = [torch.randn(len(source), device=device) for source in sources]
    expected = [accumulated(d, s, False) for d, s in zip(destinations, sources, strict=True)]
    ops.multi_tensor_accumulate_(destinations, sources)
    assert all_same_bits(destinations, expected)


@pytest.mark.parametrize("pair", list(itertools.product(FLOATS, FLOATS)), ids=str)
def test_copy_converts_every_dtype_to_every_other(pair, device):
    fences = Fences()
    destinations, sources = pairs_of([pair], device, fences, offset=1)
    expected, before = [rounded(source.double(), pair[1]) for source in sources], copies(sources)
    with no_sync(device):
        assert ops.multi_tensor_copy_(destinations, sources) is None
    assert all_same_bits(destinations, expected) and all_same_bits(sources, before)
    fences.assert_intact()


@pytest.mark.parametrize("pair", list(itertools.product(FLOATS, FLOATS)), ids=str)
def test_copy_multiplies_by_a_scale_before_it_rounds(pair, device):
    destinations, sources = pairs_of([pair], device, Fences())
    scale = torch.tensor(0.37, device=device)
    with no_sync(device):
        ops.multi_tensor_copy_(destinations, sources, scale=scale)
    assert all_same_bits(destinations, [scaled(source, scale, pair[1]) for source in sources])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("factor", [0.37, 4.0, 0.0, INF])
def test_scale_multiplies_by_a_number_or_by_a_tensor(factor, dtype, device):
    fences = Fences()
    tensors = [fences.place(tensor, 3) for tensor in random_list(SIZES, [dtype], device)]
    scale, start = torch.tensor(factor, device=device), copies(tensors)
    expected = [product(tensor, scale) for tensor in tensors]
    with no_sync(device):
        assert ops.multi_tensor_scale_(tensors, scale) is None
    assert all_same_bits(tensors, expected)
    for tensor, value in zip(tensors, start, strict=True):
        tensor.copy_(value)
    with no_sync(device):
        assert ops.multi_tensor_scale_(tensors, factor) is None
    if dtype == torch.float64:  # here a number keeps its digits
        expected = [value * factor for value in start]
    assert all_same_bits(tensors, expected)
    fences.assert_intact()


def test_a_scale_of_one_changes_no_bit(device):
    tensors = [torch.randint(0, 256, (4 * CHUNK + 4,), dtype=torch.uint8, device=device).view(torch.float32)]
    before = copies(tensors)
    for scale in (1.0, torch.tensor(1.0, device=device)):
        ops.multi_tensor_scale_(tensors, scale)
        assert all_same_bits(tensors, before)


@pytest.mark.parametrize("call", ["scale", "scale by a number", "copy"])
def test_found_inf_of_scale_and_copy_is_set_by_what_they_write(call, device):
    def run(tensor: Tensor, factor: float, found_inf: Tensor) -> None:
        scale = torch.tensor(factor, device=device)
        if call == "copy":
            ops.multi_tensor_copy_([torch.empty_like(tensor)], [tensor], scale=scale, found_inf=found_inf)
        else:
            ops.multi_tensor_scale_([tensor], scale if call == "scale" else factor, found_inf=found_inf)

    for dtype, value, factor, flag in (
        (torch.float32, 1.0, 2.0, 0.0),
        (torch.bfloat16, NAN, 0.25, 1.0),
        (torch.float32, INF, 0.5, 1.0),
        (torch.float16, 6e4, 4.0, 1.0),
        (torch.float32, 3e38, 10.0, 1.0),
        (torch.float64, 1.0, INF, 1.0),
    ):
        for where in (0, CHUNK + 3, -1):
            tensor, found_inf = torch.ones(2 * CHUNK + 5, device=device, dtype=dtype), torch.zeros(1, device=device)
            tensor[where] = value
            run(tensor, factor, found_inf)
            assert found_inf.item() == flag, (dtype, value, factor, where)


@pytest.mark.parametrize("dtypes", [[dtype] for dtype in FLOATS] + [list(FLOATS)], ids=str)
def test_zero_leaves_positive_zeros(dtypes, device):
    fences, tensors = Fences(), random_list(SIZES, dtypes, device)
    tensors = [fences.place(tensor, offset) for offset, tensor in enumerate(tensors)]
    tensors[1][:3] = torch.tensor([NAN, -0.0, INF])
    with no_sync(device):
        assert ops.multi_tensor_zero_(tensors) is None
    assert all_same_bits(tensors, [torch.zeros_like(tensor) for tensor in tensors])
    fences.assert_intact()


def test_zero_and_scale_reach_transposed_and_gapped_tensors_and_nothing_else(device):
    whole = torch.randn(60, 70, device=device)
    before = whole.clone()
    ops.multi_tensor_scale_([whole[::2, 3:50].t(), whole[1::2, 50:]], torch.tensor(2.0, device=device))
    before[::2, 3:50] *= 2
    before[1::2, 50:] *= 2
    assert same_bits(whole, before)
    ops.multi_tensor_zero_([whole[::2, 3:50].t(), whole[1::2, 50:]])
    before[::2, 3:50], before[1::2, 50:] = 0, 0
    assert same_bits(whole, before)


def test_empty_lists_are_nothing_to_do(device):
    nothing = torch.empty(0, device=device)
    scale = torch.tensor(2.0, device=device)
    for tensors in ([], [nothing], [nothing, nothing.new_empty(3, 0)]):
        ops.multi_tensor_zero_(tensors)
        ops.multi_tensor_scale_(tensors, scale)
        ops.multi_tensor_scale_(tensors, 2.0)
        ops.multi_tensor_copy_(tensors, copies(tensors))
        ops.multi_tensor_accumulate_(tensors, copies(tensors))


def test_what_is_written_has_a_new_version_for_autograd(device):
    source, *written = torch.randn(4, 10, device=device)
    versions = [tensor._version for tensor in written]
    ops.multi_tensor_accumulate_([written[0]], [source])
    ops.multi_tensor_copy_([written[1]], [source])
    ops.multi_tensor_scale_([written[2]], 2.0)
    ops.multi_tensor_zero_([written[2]])
    assert all(tensor._version > version for tensor, version in zip(written, versions, strict=True))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements_are_accumulated_and_zeroed():
    source = torch.ones(2**31 + 7, device="cuda", dtype=torch.bfloat16)
    destination = torch.ones(2**31 + 7, device="cuda")
    partial = torch.zeros_like(ops.multi_tensor_norm_partial([destination[:1]]))
    ops.multi_tensor_accumulate_([destination], [source], zero_source=True, sum_squares=partial)
    assert destination.aminmax() == (2.0, 2.0) and source.aminmax() == (0.0, 0.0)
    norm = ops.multi_tensor_norm_finish(partial, 2.0, torch.float32).item()
    assert norm == pytest.approx(2 * math.sqrt(2**31 + 7), rel=1e-6)
    ops.multi_tensor_scale_([destination], 0.5)
    assert destination.aminmax() == (1.0, 1.0)
    ops.multi_tensor_copy_([source], [destination])
    assert source.aminmax() == (1.0, 1.0)


@pytest.mark.gpu
def test_a_captured_accumulate_reads_its_flag_at_each_replay():
    destination, source = torch.zeros(CHUNK + 1, device="cuda"), torch.ones(CHUNK + 1, device="cuda").bfloat16()
    noop, found_inf = torch.ones(1, device="cuda"), torch.zeros((), device="cuda")
    extras = {"noop": noop, "found_inf": found_inf, "zero_source": True}
    ops.multi_tensor_accumulate_([destination], [source], **extras)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.multi_tensor_accumulate_([destination], [source], **extras)
    for flag, value, expected in ((0.0, 2.0, 2.0), (1.0, 3.0, 2.0), (0.0, 3.0, 5.0)):
        noop.fill_(flag)
        source.fill_(value)
        with no_sync("cuda"):
            graph.replay()
        assert destination.aminmax() == (expected, expected) and not found_inf.item()
        assert bool(source.any()) is bool(flag)
