"""Weights for ``Fp8Weights``, and what its casts of them must be."""

from __future__ import annotations

import torch
from fp8_references import reference_cast
from fp8_tensors import EMPTY_SHAPES, LARGE_SHAPES, SMALL_SHAPES, X_DTYPES, assert_same_bits, numbers
from torch import Tensor

import te_graph as tg

SHAPES = [*SMALL_SHAPES, *EMPTY_SHAPES, *LARGE_SHAPES[:4]]


def random_weights(device: str, shapes: list[tuple[int, int]] = SHAPES) -> list[Tensor]:
    return [numbers(shape, X_DTYPES[i % 3], device) for i, shape in enumerate(shapes)]


def written(weights: tg.Fp8Weights) -> list[Tensor]:
    counts = [] if weights.counts is None else [weights.counts]
    return [*weights.data, *weights.transposed, weights.scale_inv, weights.amax, *counts]


def assert_cast(prepared: tg.Fp8Weights, sources: list[Tensor], amax: Tensor, counts: Tensor | None = None) -> None:
    """``prepared`` holds the casts of ``sources`` [M_i, N_i], with ``amax`` [n] and ``counts`` [n, 3] before them."""
    for i, source in enumerate(sources):
        expected = reference_cast(source, prepared.scale[i], prepared.data[i].dtype)
        assert_same_bits(prepared.data[i], expected.out, i)
        if prepared.transposed:
            assert_same_bits(prepared.transposed[i], expected.out.t().contiguous(), i)
        assert_same_bits(prepared.scale_inv[i : i + 1], expected.scale_inv, i)
        assert_same_bits(prepared.amax[i : i + 1], torch.maximum(amax[i : i + 1].cpu(), expected.amax), i)
        if counts is not None:
            assert_same_bits(prepared.counts[i], counts[i].cpu() + expected.counts, i)
