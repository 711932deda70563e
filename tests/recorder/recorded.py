"""What the recorder's tests share: the eager reference, comparison of bits, and modules to record."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from te_graph.testing import same_bits


def eager(function: Callable, inputs: Sequence[Tensor], leaves: Sequence[Tensor], grad_output: Tensor) -> list[Tensor]:
    """Reference: output and gradients of ``leaves``, in eager execution."""
    output = function(*inputs)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad_output)]


def assert_same_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(actual) == len(expected)
    for index, (got, want) in enumerate(zip(actual, expected, strict=True)):
        assert (got.dtype, got.shape) == (want.dtype, want.shape), index
        assert same_bits(got, want), f"tensor {index}: largest difference {(got - want).abs().max()}"


class Block(nn.Module):
    """A GPT block."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, width] -> the same
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=self.dropout)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, tokens, width)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:  # as the inner module
        return checkpoint(self.inner, x, use_reentrant=False)
