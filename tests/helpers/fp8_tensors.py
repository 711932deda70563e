"""What the tests of FP8 ops share: shapes, formats, awkward inputs, and outputs that lie in poisoned memory."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
import torch
from fp8_references import E4M3, FP8_DTYPES, FP8_MAX, ScaleState
from torch import Tensor

from te_graph.testing import find_differences

POISON = 0xA5
GUARD = 64  # poisoned bytes before and behind an output; a multiple of every alignment that kernels ask for
X_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FORMATS = [(x, fp8) for x in X_DTYPES for fp8 in FP8_DTYPES]
formats = pytest.mark.parametrize(
    ("x_dtype", "dtype"), FORMATS, ids=[f"{str(x)[6:]} to {str(fp8)[13:]}" for x, fp8 in FORMATS]
)
# Aligned or not, primes, single rows and columns, nothing.
SMALL_SHAPES = [(1, 1), (8, 8), (16, 16), (43, 43), (43, 256), (256, 43), (1, 768), (768, 1), (7, 13), (129, 65)]
EMPTY_SHAPES = [(0, 0), (0, 5), (5, 0)]
# Those of TransformerEngine's test of cast and transpose.
LARGE_SHAPES = [(1, 3221), (2333, 1), (120, 2080), (256, 256), (1481, 677), (768, 1024), (2333, 1033)]
HUGE_SHAPES = [(2048, 12288), (256, 65536), (65536, 128), (4096, 14336)]
# Of at least as many tiles of 128 x 128 as GPUs have multiprocessors: kernels work on them in wide tiles, else in thin
# ones.
MANY_TILES = [(1665, 1544), (136, 8456)]
# Flags by dtype: the first leaves a kernel at work, the others make it do nothing.
FLAGS = {torch.float32: (0.0, 1.0, -3.0, math.nan, 1e-45), torch.int32: (0, 1, -3, 256), torch.bool: (False, True)}
SET_FLAGS = [(dtype, value) for dtype, values in FLAGS.items() for value in values[1:]]


def numbers(shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Random ``[*shape]`` over many powers of two, so that some saturate and some underflow in FP8; all finite."""
    exponents = torch.randint(-12, 6, tuple(shape), device=device)
    return (torch.randn(tuple(shape), device=device) * torch.exp2(exponents)).to(dtype)


def with_many_tiles(shapes: list[tuple[int, int]], device: str) -> list[tuple[int, int]]:
    """``shapes``, and on a GPU those that its kernels work on otherwise."""
    return shapes if device == "cpu" else [*shapes, *MANY_TILES]


def normal_numbers(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random ``[*shape]`` of one magnitude, as activations are."""
    return torch.randn(shape, device=device).to(dtype)


def padded(out_t: Tensor) -> Tensor:
    """``out_t`` [N, M] with rows of a multiple of 16, the end zeros."""
    wide = torch.zeros(out_t.shape[0], -(-out_t.shape[1] // 16) * 16, dtype=torch.uint8, device=out_t.device)
    wide[:, : out_t.shape[1]] = out_t.view(torch.uint8)
    return wide.view(out_t.dtype)


def with_specials(x: Tensor, rng: random.Random) -> Tensor:
    """``x`` [...] with about one element in eight replaced by zeros, NaN, Inf and the ends of its dtype's range."""
    info = torch.finfo(x.dtype)
    specials = [0.0, -0.0, math.nan, math.inf, -math.inf, info.max, info.min, info.smallest_normal, info.tiny / 2]
    x = x.clone()
    for value in specials:
        x[torch.rand(x.shape, device=x.device) < rng.uniform(0, 0.03)] = value
    return x


def a_scale(rng: random.Random, device: str, dtype: torch.dtype = E4M3, shape: Sequence[int] = (1,)) -> Tensor:
    """A scale, ``[*shape]`` fp32, that is no power of two: of ``numbers()`` some saturate and some underflow."""
    return torch.full(tuple(shape), FP8_MAX[dtype] * 2 ** rng.uniform(-8, 0), device=device)


class Poisoned:
    """Outputs whose memory, and some before and behind it, is full of 0xA5."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._placed: list[tuple[Tensor, int, int]] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype, offset: int = 0) -> Tensor:
        """A contiguous poisoned ``[*shape]``, ``offset`` elements beyond an aligned address."""
        start, nbytes = GUARD + offset * dtype.itemsize, math.prod(shape) * dtype.itemsize
        whole = torch.full((start + nbytes + GUARD,), POISON, dtype=torch.uint8, device=self._device)
        self._placed.append((whole, start, nbytes))
        # A slice of what was viewed: a view of a slice must start at a multiple of the element's size.
        usable = whole[: whole.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        first = start // dtype.itemsize
        return usable[first : first + math.prod(shape)].view(tuple(shape))

    def like(self, values: Tensor, offset: int = 0) -> Tensor:
        """``values`` [...] copied behind ``offset`` elements, between poisoned bytes."""
        placed = self.empty(values.shape, values.dtype, offset)
        placed.copy_(values)
        return placed

    @property
    def placed(self) -> list[Tensor]:
        """The memory of all that was placed here, poisoned memory around included: [bytes] uint8 each."""
        return [whole for whole, _, _ in self._placed]

    def assert_guards_intact(self) -> None:
        for whole, start, nbytes in self._placed:
            for part in (whole[:start], whole[start + nbytes :]):
                assert bool((part == POISON).all()), "memory beside an output was written"

    def assert_untouched(self) -> None:
        """Nothing was written, neither outputs nor what is beside them."""
        for whole, _, _ in self._placed:
            assert bool((whole == POISON).all()), "an output was written"


def assert_same_bits(got: Tensor, expected: Tensor, what: object = "") -> None:
    """``got`` [...] has dtype, shape and bits of ``expected`` [...], each on any device."""
    differences = find_differences(got.detach().cpu(), expected.detach().cpu())
    assert not differences, f"{what} {differences[0]}"


def assert_same_state(got: ScaleState, expected: ScaleState) -> None:
    for name in ("scale", "history", "scale_inv"):
        assert_same_bits(getattr(got, name), getattr(expected, name), name)


def no_mask(device: str) -> Tensor:
    """[0]: an update writes all scale_invs."""
    return torch.empty(0, dtype=torch.bool, device=device)
