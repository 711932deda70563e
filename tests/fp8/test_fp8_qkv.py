"""Gradients of queries, keys and values, side by side: against autograd's of a split."""

from __future__ import annotations

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor

from te_graph.fp8.split_qkv import SplitQKV, split_qkv

pytestmark = pytest.mark.usefixtures("repeatable")
ops = torch.ops.te_graph
# Outer and inner sizes, groups, heads a group, and their dimension.
SHAPES = [(3, 2, 4, 1, 16), (5, 1, 1, 1, 64), (2, 3, 2, 4, 8), (1, 7, 3, 2, 24), (0, 2, 2, 1, 16), (4, 2, 2, 3, 5)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


def parts_of(shape: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, layout: str) -> list[Tensor]:
    """[a, b, heads, dim] each, as attention may lay out its gradients."""
    a, b, groups, per_group, dim = shape
    parts = []
    for heads in (groups * per_group, groups, groups):
        if layout == "heads first":
            part = torch.randn(b, heads, a, dim, device=device).to(dtype).permute(2, 0, 1, 3)
        elif layout == "columns first":
            part = torch.randn(a, b, dim, heads, device=device).to(dtype).mT
        elif layout == "odd offset":
            part = torch.randn(a * b * heads * dim + 1, device=device).to(dtype)[1:].view(a, b, heads, dim)
        elif layout == "expanded":
            part = torch.randn(1, b, heads, dim, device=device).to(dtype).expand(a, b, heads, dim)
        else:
            part = torch.randn(a, b, heads, dim, device=device).to(dtype)
        parts.append(part)
    return parts


@shapes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["plain", "heads first", "columns first", "odd offset", "expanded"])
def test_they_are_the_gradient_of_a_split(shape, dtype: torch.dtype, layout: str, device: str) -> None:
    a, b, groups, per_group, dim = shape
    grads = parts_of(shape, dtype, device, layout)
    qkv = torch.randn(a, b, groups * (per_group + 2) * dim, device=device).to(dtype).requires_grad_()
    results = split_qkv(qkv, groups, per_group)
    expected = torch.autograd.grad(results, qkv, grads)[0]
    assert same_bits(ops.concat_qkv(*grads), expected)
    one = SplitQKV.apply(qkv, groups, per_group)
    assert all(map(same_bits, one, results))
    assert same_bits(torch.autograd.grad(one, qkv, grads)[0], expected)


def test_parts_without_a_gradient_count_as_zeros(device: str) -> None:
    qkv = torch.randn(2, 3, 2 * 4 * 8, device=device, requires_grad=True)
    found, expected = (
        torch.autograd.grad(split(qkv, 2, 2)[1].square().sum(), qkv)[0] for split in (SplitQKV.apply, split_qkv)
    )
    assert same_bits(found, expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v: (q[0], k, v), ValueError, "expected query of four dimensions, got shape"),
        (lambda q, k, v: (q, k[0], v), ValueError, "expected key of four dimensions, got shape"),
        (lambda q, k, v: (q[:, :, :3], k, v), ValueError, "expected heads of query that those of key divide, got"),
        (lambda q, k, v: (q[:1], k, v), ValueError, r"expected query of shape \[3, 2, 4, 8\], as key has it, got"),
        (lambda q, k, v: (q, k, v[:1]), ValueError, r"expected value of shape \[3, 2, 2, 8\], as key, got \[1"),
        (lambda q, k, v: (q, k.half(), v), TypeError, "expected key of dtype torch.float32, got torch.float16"),
        (lambda q, k, v: (q, k, v.to("meta")), ValueError, "expected value on"),
    ],
)
def test_bad_input_is_named(change, error: type[Exception], message: str, device: str) -> None:
    parts = [torch.zeros(3, 2, heads, 8, device=device) for heads in (4, 2, 2)]
    with pytest.raises(error, match=f"concat_qkv: {message}"):
        ops.concat_qkv(*change(*parts))
