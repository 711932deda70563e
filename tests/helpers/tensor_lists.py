"""What the tests of multi-tensor ops share: awkward tensors, comparisons of bits, and fences around outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

import te_graph
from te_graph import testing

CHUNK = 8192  # elements that are summed in fp32 before the exact combine
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIZES = (1, 7, CHUNK - 1, CHUNK, CHUNK + 1, 0, 3 * CHUNK + 5)  # of tensors, in elements
T = TypeVar("T")
FENCE = 64  # elements before and behind a fenced tensor; a multiple of 16 bytes for every dtype


def same_bits(a: Tensor, b: Tensor) -> bool:
    """The same dtype, shape and bits [...], and on the same device."""
    return a.device == b.device and testing.same_bits(a, b)


def all_same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(map(same_bits, a, b))


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Dense copies with the strides of dense ``tensors`` [...]."""
    return [t.detach().clone() for t in tensors]


def random_list(sizes: Sequence[int], dtypes: Sequence[torch.dtype], device: str) -> list[Tensor]:
    """Normally distributed tensors of ``sizes`` elements each, whose dtypes go round ``dtypes``."""
    return [
        torch.randn(size, device=device, dtype=torch.float64).to(dtypes[i % len(dtypes)])
        for i, size in enumerate(sizes)
    ]


class Fences:
    """Copies of tensors inside storages that are full of NaN, where a write beside one is seen."""

    def __init__(self) -> None:
        self._wholes: list[tuple[Tensor, Tensor]] = []

    def place(self, tensor: Tensor, offset: int = 0) -> Tensor:
        """A copy of ``tensor`` [...], dense, with its strides, ``offset`` elements beyond an aligned address."""
        start, numel = FENCE + offset, tensor.numel()
        whole = torch.full((start + numel + FENCE,), torch.nan, dtype=tensor.dtype, device=tensor.device)
        inner = whole.as_strided(tensor.shape, tensor.stride(), start)
        inner.copy_(tensor)
        self._wholes += [(whole[:start], whole[:start].clone()), (whole[start + numel :], whole[:FENCE].clone())]
        return inner

    def assert_intact(self) -> None:
        assert all(same_bits(*pair) for pair in self._wholes), "memory beside a tensor was written"


@contextlib.contextmanager
def no_sync(device: str) -> Iterator[None]:
    """On CUDA, torch calls that wait for the device raise inside."""
    if device != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture(function: Callable[[], T], device: str) -> tuple[Callable[[], None], T]:
    """Run ``function`` once, then capture it: what replays it, and what it returned at capture."""
    function()
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = function()
    else:
        graph = te_graph.Recorder()
        with graph.capture():
            result = function()
    return graph.replay, result


def capture_alone(function: Callable[[], object], device: str) -> None:
    """Capture ``function`` without running it before."""
    if device == "cuda":
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            function()
    else:
        with te_graph.Recorder().capture():
            function()
