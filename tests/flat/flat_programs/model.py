"""The model that programs train: of several dtypes, with what is tied, frozen, seldom or never used."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .program import Setup

TOKENS, SOMETIMES = 7, 2


class Failure(Exception):
    """Raised by a program in its forward or backward."""


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # [...]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # [...]
        raise Failure


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, width]
        x = x.to(self.linear.weight.dtype)
        return x + F.gelu(self.linear(self.norm(x)))


class Model(nn.Module):
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        width, dtypes = setup.width, itertools.cycle(getattr(torch, name) for name in setup.dtypes)
        self.embedding = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(setup.blocks))
        self.sometimes = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(SOMETIMES))
        self.conv = nn.Conv2d(width, width, (2, 2), padding=1) if setup.has_conv else None
        self.head = nn.Linear(width, TOKENS, bias=setup.has_head_bias)
        for module in (self.embedding, *self.blocks, *self.sometimes, self.conv, self.head):
            if module is not None:
                module.to(next(dtypes))
        if self.conv is not None:
            self.conv.to(memory_format=torch.channels_last)
        # Gradients of zeros of both signs.
        self.signed = nn.Parameter(torch.randn(5, dtype=next(dtypes)))
        self.register_buffer("zeros", torch.tensor([0.0, -0.0, 0.0, -0.0, -0.0]))
        self.unused = nn.Parameter(torch.randn(3, dtype=next(dtypes)))
        self.empty = nn.Parameter(torch.empty(0, 2, dtype=next(dtypes)))
        if "head" in setup.ties:
            self.head.to(self.embedding.weight.dtype)
            self.head.weight = self.embedding.weight
        if "blocks" in setup.ties and setup.blocks > 1:
            self.blocks[-1].to(self.blocks[0].linear.weight.dtype)
            self.blocks[-1].linear = self.blocks[0].linear
        bias = self.blocks[0].linear.bias.requires_grad_(not setup.frozen)
        if setup.frozen and setup.left_over:
            bias.grad = torch.randn_like(bias)

    def forward(
        self,
        tokens: Tensor,  # [batch, length]
        uses: Sequence[bool] = (True,) * SOMETIMES,
        checkpoints: Sequence[str] = (),
        fails: str = "",
    ) -> Tensor:  # []
        """A loss.

        Args:
            uses: which of the layers that are not always used are.
            checkpoints: "reentrant", "other" or "" for each block.
            fails: "forward" or "backward", before or behind the last block.
        """
        x = self.embedding(tokens)
        for block, kind in itertools.zip_longest(self.blocks, checkpoints[: len(self.blocks)], fillvalue=""):
            if fails and block is self.blocks[-1]:
                x = _fail(x, fails)
            x = checkpoint(block, x, use_reentrant=kind == "reentrant") if kind else block(x)
        for layer, is_used in zip(self.sometimes, uses, strict=True):
            if is_used:
                x = x.to(layer.weight.dtype)
                x = x + layer(x)
        if self.conv is not None:
            x = self.conv(x.to(self.conv.weight.dtype).transpose(1, 2).unsqueeze(-1))[..., 0].transpose(1, 2)
        y = self.head(x.to(self.head.weight.dtype)).float()
        return y.square().mean() + (self.signed.float() * self.zeros).sum()


def _fail(x: Tensor, where: str) -> Tensor:  # [...]
    if where == "forward":
        raise Failure
    return _FailsBackward.apply(x)
