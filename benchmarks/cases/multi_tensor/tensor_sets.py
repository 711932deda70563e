"""The lists of tensors that multi-tensor ops are measured on: those of models, and extreme ones."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorSet:
    """Shapes of a list of gradients of one dtype."""

    label: str
    dtype: torch.dtype
    shapes: tuple[Shape, ...]

    @property
    def elements(self) -> int:
        return sum(map(math.prod, self.shapes))

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


def gpt_shapes(layers: int, hidden: int, vocabulary: int, positions: int) -> Iterable[Shape]:
    """Parameters of GPT with tied embeddings: 12 for each layer and 4 outside."""
    yield vocabulary, hidden
    yield positions, hidden
    for _ in range(layers):
        yield from ((hidden,), (hidden,), (3 * hidden, hidden), (3 * hidden,), (hidden, hidden), (hidden,))
        yield from ((hidden,), (hidden,), (4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,))
    yield from ((hidden,), (hidden,))


def llama_shapes(layers: int, hidden: int, inner: int, keys: int, vocabulary: int) -> Iterable[Shape]:
    """Parameters of Llama: 9 for each layer and 3 outside; ``keys`` is the width of keys and of values."""
    yield vocabulary, hidden
    for _ in range(layers):
        yield from ((hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden))
        yield from ((inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,))
    yield from ((hidden,), (vocabulary, hidden))


BF16, FP32 = torch.bfloat16, torch.float32

_GPT = tuple(gpt_shapes(layers=24, hidden=2048, vocabulary=50304, positions=2048))
_LLAMA = tuple(llama_shapes(layers=32, hidden=4096, inner=14336, keys=1024, vocabulary=128256))
LISTS = {
    "gpt3-1.3b-bf16": TensorSet("GPT-3 1.3B, bf16", BF16, _GPT),
    "gpt3-1.3b-fp32": TensorSet("GPT-3 1.3B, fp32", FP32, _GPT),
    "llama3-8b-bf16": TensorSet("Llama-3 8B, bf16", BF16, _LLAMA),
    "2000x1024": TensorSet("2000 x 1024, bf16", BF16, ((1024,),) * 2000),
    "20000x100": TensorSet("20000 x 100, bf16", BF16, ((100,),) * 20000),
    "one-4gb": TensorSet("one tensor of 4 GiB, fp32", FP32, ((2**30,),)),
}

_SMALL_GPT = tuple(gpt_shapes(layers=2, hidden=64, vocabulary=500, positions=64))
_SMALL_LLAMA = tuple(llama_shapes(layers=2, hidden=64, inner=224, keys=16, vocabulary=500))
# The same names, for a quick look: megabytes instead of gigabytes, tens of tensors instead of thousands.
SMALL_LISTS = {
    "gpt3-1.3b-bf16": TensorSet("GPT of h 64, bf16", BF16, _SMALL_GPT),
    "gpt3-1.3b-fp32": TensorSet("GPT of h 64, fp32", FP32, _SMALL_GPT),
    "llama3-8b-bf16": TensorSet("Llama of h 64, bf16", BF16, _SMALL_LLAMA),
    "2000x1024": TensorSet("50 x 1024, bf16", BF16, ((1024,),) * 50),
    "20000x100": TensorSet("100 x 100, bf16", BF16, ((100,),) * 100),
    "one-4gb": TensorSet("one tensor of 1 MiB, fp32", FP32, ((2**18,),)),
}
