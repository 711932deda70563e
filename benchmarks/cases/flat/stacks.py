"""Models that are trained: transformer layers one after another, of plain torch modules without a concat or a split."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Stack:
    """So many layers of one shape.

    Attributes:
        is_llama: RMSNorm, SwiGLU, grouped queries, no biases; otherwise LayerNorm, GELU, biases.
    """

    hidden: int
    width: int
    heads: int
    groups: int
    layers: int
    is_llama: bool = False

    @property
    def label(self) -> str:
        return f"{self.layers} {'Llama' if self.is_llama else 'GPT'} layers, {self.hidden} x {self.width}"

    def of(self, layers: int | None) -> "Stack":
        """This with another number of layers, if one is given."""
        return self if layers is None else replace(self, layers=layers)


STACKS = {
    "llama": Stack(4096, 14336, 32, 8, layers=4, is_llama=True),
    "gpt": Stack(2048, 8192, 16, 16, layers=24),
}
SMALL = {
    "llama": Stack(32, 64, 2, 1, layers=2, is_llama=True),
    "gpt": Stack(32, 64, 2, 2, layers=2),
}


class Layer(nn.Module):
    """Pre-norm and causal. Projections are modules of their own, so that no gradient of theirs is a concat."""

    def __init__(self, stack: Stack, **factory: Any) -> None:
        super().__init__()
        self.is_llama, self.head_dim = stack.is_llama, stack.hidden // stack.heads
        hidden, width, shared = stack.hidden, stack.width, stack.groups * self.head_dim
        norm, factory_of_linear = (
            (nn.RMSNorm if self.is_llama else nn.LayerNorm),
            {"bias": not self.is_llama, **factory},
        )
        self.norm1 = norm(hidden, **factory)
        self.query = nn.Linear(hidden, hidden, **factory_of_linear)
        self.key = nn.Linear(hidden, shared, **factory_of_linear)
        self.value = nn.Linear(hidden, shared, **factory_of_linear)
        self.proj = nn.Linear(hidden, hidden, **factory_of_linear)
        self.norm2 = norm(hidden, **factory)
        self.gate = nn.Linear(hidden, width, **factory_of_linear) if self.is_llama else None
        self.up = nn.Linear(hidden, width, **factory_of_linear)
        self.down = nn.Linear(width, hidden, **factory_of_linear)

    def forward(self, x: Tensor) -> Tensor:
        """The layer of x [1, tokens, hidden]."""
        y = self.norm1(x)
        query, key, value = (
            linear(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        is_grouped = key.shape[1] < query.shape[1]
        context = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
        x = x + self.proj(context.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        y = F.gelu(self.up(y), approximate="tanh") if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.down(y)


class Model(nn.Module):
    """The layers of a stack, in bf16."""

    def __init__(self, stack: Stack, device: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(stack, device=device, dtype=torch.bfloat16) for _ in range(stack.layers))

    def forward(self, x: Tensor) -> Tensor:
        """All layers, of x [1, tokens, hidden]."""
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(y: Tensor, microbatches: int) -> Tensor:
    """What a micro-batch whose result is y [1, tokens, hidden] contributes to the loss of a step."""
    return y.float().square().mean() / microbatches
