"""Random lists: any dtypes, sizes around chunk borders, empty ones, odd storage offsets, transposed layouts.

References are norms in float64, and one multiplication or addition in fp32 (fp64) for each element.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from references import product, reference_norm, wide_dtype
from tensor_lists import CHUNK, FLOATS, Fences, all_same_bits, copies, same_bits
from torch import Tensor

from te_graph import _C  # noqa: F401 (registers the ops)

ops = torch.ops.te_graph
INF = math.inf
POWERS = (0.0, 0.5, 1.0, 2.0, 3.0, INF)
# Primes on both sides of multiples of the chunk.
PRIMES = (2, 13, 1021, 8191, 8209, 16381, 16411, 24571, 32771, 40961)
SIZES = st.one_of(st.sampled_from((0, 1, CHUNK, 2 * CHUNK, *PRIMES)), st.integers(2, 300))
NARROW = (torch.float32, torch.float16, torch.bfloat16)

# The fixtures of a test last for all its examples: none depends on what an example did.
searched = settings(
    deadline=None, database=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@dataclass(frozen=True)
class Spec:
    """A tensor to be made: its size, layout, and distance from an aligned address in elements."""

    size: int
    dtype: torch.dtype
    offset: int
    columns: int  # of a transposed matrix; 1 for a vector


def specs(dtypes: tuple[torch.dtype, ...]) -> st.SearchStrategy[list[Spec]]:
    one = st.builds(Spec, SIZES, st.sampled_from(dtypes), st.integers(0, 9), st.sampled_from((1, 1, 2, 7, 64)))
    return st.lists(one, min_size=1, max_size=12)


LISTS, NARROW_LISTS = specs(FLOATS), specs(NARROW)
SEEDS = st.integers(0, 2**31)


def make(wanted: list[Spec], seed: int, device: str, fences: Fences) -> list[Tensor]:
    """The tensors, of values from 1e-3 to 1e3 with some zeros, fenced."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for spec in wanted:
        rows = spec.size // spec.columns
        shape = (spec.size,) if spec.columns == 1 else (rows, spec.columns)
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        value *= 10 ** (6 * torch.rand(shape, generator=generator, dtype=torch.float64) - 3)
        value[torch.rand(shape, generator=generator) < 0.05] = 0
        value = value.to(device, spec.dtype)
        tensors.append(fences.place(value.t() if value.dim() == 2 else value, spec.offset))
    return tensors


def assert_close_to(norm: float, tensors: list[Tensor], p: float) -> None:
    tolerance = 0 if p in (0, INF) else 1e-6 * max(1.0, 2 / p)
    assert norm == pytest.approx(reference_norm(tensors, p), rel=tolerance, abs=0)


@searched
@given(wanted=LISTS, seed=SEEDS, p=st.sampled_from(POWERS))
def test_norms_are_those_in_float64(wanted, seed, p, device):
    fences = Fences()
    tensors = make(wanted, seed, device, fences)
    norm, norms = ops.multi_tensor_norm(tensors, p), ops.multi_tensor_norms(tensors, p)
    assert norm.dtype == norms.dtype == wide_dtype(*tensors)
    assert_close_to(norm.item(), tensors, p)
    for one, tensor in zip(norms.tolist(), tensors, strict=True):
        assert_close_to(one, [tensor], p)
    fences.assert_intact()


@searched
@given(wanted=LISTS, seed=SEEDS, p=st.sampled_from(POWERS), data=st.data())
def test_no_permutation_changes_a_bit(wanted, seed, p, data, device):
    tensors = make(wanted, seed, device, Fences())
    shuffled = data.draw(st.permutations(tensors))
    assert same_bits(ops.multi_tensor_norm(shuffled, p), ops.multi_tensor_norm(tensors, p))
    assert torch.equal(ops.multi_tensor_norm_partial(shuffled, p), ops.multi_tensor_norm_partial(tensors, p))


@searched
@given(wanted=LISTS, seed=SEEDS, p=st.sampled_from(POWERS), data=st.data())
def test_no_grouping_changes_a_bit(wanted, seed, p, data, device):
    tensors = make(wanted, seed, device, Fences())
    groups = data.draw(st.lists(st.integers(0, 2), min_size=len(tensors), max_size=len(tensors)))
    whole = ops.multi_tensor_norm(tensors, p)
    parts = [[t for t, own in zip(tensors, groups, strict=True) if own == group] for group in range(3)]
    partials = torch.stack([ops.multi_tensor_norm_partial(part, p) for part in parts if part])
    combined = partials.amax(0) if p == INF else partials.sum(0)
    assert same_bits(ops.multi_tensor_norm_finish(combined, p, whole.dtype), whole)


@searched
@given(wanted=LISTS, seed=SEEDS, p=st.sampled_from(POWERS), offsets=st.lists(st.integers(0, 9), min_size=12))
def test_no_displacement_in_memory_changes_a_bit(wanted, seed, p, offsets, device):
    tensors, fences = make(wanted, seed, device, Fences()), Fences()
    moved = [fences.place(tensor, offset) for tensor, offset in zip(tensors, offsets, strict=False)]
    assert len(moved) == len(tensors)
    assert torch.equal(ops.multi_tensor_norm_partial(moved, p), ops.multi_tensor_norm_partial(tensors, p))


@searched
@given(wanted=NARROW_LISTS, seed=SEEDS, ratio=st.floats(0, 1.2), found_inf=st.sampled_from((None, 0.0, 1.0)))
def test_clipping_multiplies_every_element_once_or_none(wanted, seed, ratio, found_inf, device):
    fences = Fences()
    tensors = make(wanted, seed, device, fences)
    total = ops.multi_tensor_norm(tensors)
    coef = (ratio * total.item() / (total + 1e-6)).clamp(max=1.0)
    flag = None if found_inf is None else torch.tensor(found_inf, device=device)
    expected = copies(tensors) if found_inf or coef == 1 else [product(tensor, coef) for tensor in tensors]
    ops.multi_tensor_clip_(tensors, total, ratio * total.item(), found_inf=flag)
    assert all_same_bits(tensors, expected)
    fences.assert_intact()


@searched
@given(wanted=LISTS, seed=SEEDS, store=st.booleans(), zero_source=st.booleans(), noop=st.sampled_from((None, 0, 1)))
def test_accumulating_adds_or_stores_every_element_once_or_none(wanted, seed, store, zero_source, noop, device):
    fences = Fences()
    sources = make(wanted, seed, device, fences)
    # Half of the narrow destinations are of the source's own dtype; layouts and alignments differ from the source's.
    dtypes = [s.dtype if s.dtype == torch.float64 or i % 2 else torch.float32 for i, s in enumerate(sources)]
    starts = [torch.randn(s.shape, device=device).to(d) for s, d in zip(sources, dtypes, strict=True)]
    destinations = [fences.place(start, i % 5) for i, start in enumerate(starts)]
    summed = [
        (d.to(wide_dtype(d)) + s.to(wide_dtype(d))).to(d.dtype) for d, s in zip(destinations, sources, strict=True)
    ]
    stored = [s.to(d.dtype, copy=True) for d, s in zip(destinations, sources, strict=True)]
    expected, left = (stored if store else summed), [torch.zeros_like(s) for s in sources]
    if noop:
        expected = starts
    if noop or not zero_source:
        left = copies(sources)
    flag = None if noop is None else torch.tensor(float(noop), device=device)
    ops.multi_tensor_accumulate_(destinations, sources, store=store, zero_source=zero_source, noop=flag)
    assert all_same_bits(destinations, expected)
    assert all_same_bits(sources, left)
    fences.assert_intact()


@searched
@given(wanted=LISTS, seed=SEEDS, to=st.sampled_from(FLOATS))
def test_copying_converts_every_element_and_zero_leaves_none(wanted, seed, to, device):
    fences = Fences()
    sources = make(wanted, seed, device, fences)
    destinations = [fences.place(torch.full(s.shape, math.nan, device=device, dtype=to), 3) for s in sources]
    ops.multi_tensor_copy_(destinations, sources)
    for got, source in zip(destinations, sources, strict=True):
        if source.dtype == torch.float64 and to in (torch.float16, torch.bfloat16):  # torch rounds twice
            torch.testing.assert_close(got, source.to(to), rtol=torch.finfo(to).eps, atol=1e-7)
        else:
            assert same_bits(got, source.to(to))
    ops.multi_tensor_zero_(sources)
    assert all_same_bits(sources, [torch.zeros_like(s) for s in sources])
    fences.assert_intact()
