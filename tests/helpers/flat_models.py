"""Models for tests of flat parameters, and what they are compared by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import te_graph as tg
from te_graph.testing import same_bits


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        return x + F.gelu(self.linear(self.norm(x)))


class Model(nn.Module):
    """With tied weights, a frozen one, one that is not always used, and a convolution in channels_last."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.sometimes = nn.Linear(width, width, bias=False)
        self.conv = nn.Conv2d(width, width, (2, 2), padding=1).to(memory_format=torch.channels_last)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].linear.bias.requires_grad_(False)

    def forward(self, tokens: Tensor, uses_all: bool = True) -> Tensor:  # [batch, length] -> [batch, length + 1, 7]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        if uses_all:
            x = x + self.sometimes(x)
        x = self.conv(x.transpose(1, 2).unsqueeze(-1))[..., 0].transpose(1, 2)
        return self.head(x)


class Mixed(nn.Module):
    """Parameters of two dtypes, some divided among ranks inside of rows, some on few ranks, of all kinds of shapes."""

    def __init__(self, low: torch.dtype = torch.bfloat16, scale: int = 1) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(30 * scale, 97))
        self.conv = nn.Conv2d(8 * scale, 5 * scale, (3, 5)).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(11 * scale, 1, 90).transpose(0, 2))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.low = nn.Linear(100, 12 * scale).to(low)
        self.low_scalar = nn.Parameter(torch.tensor(0.5, dtype=low))
        self.tied = nn.Module()
        self.tied.weight = self.low.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.one = nn.Parameter(torch.randn(1))
        self.late = nn.Parameter(torch.randn(5, dtype=low))  # has a gradient later


def trained(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    """``.grad`` or ``main_grad`` of each trained parameter."""
    return [getattr(one, "main_grad", None) if one.grad is None else one.grad for one in trained(model)]


def assert_same(model: nn.Module, expected: nn.Module, what: str = "") -> None:
    """Parameters and ``.grad`` of both have the same bits."""
    for (name, one), (_, other) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert same_bits(one.detach(), other.detach()), f"{what}: {name}"
        assert (one.grad is None) == (other.grad is None), f"{what}: .grad of {name}"
        assert one.grad is None or same_bits(one.grad, other.grad), f"{what}: .grad of {name}"


def assert_in_buffers(flat: tg.FlatParameters, model: nn.Module) -> None:
    """Parameters, and gradients that are there, lie in the buffers, in reverse order, aligned, with zeros between."""
    (buffer,) = flat.buffers
    item, grad_item = buffer.data.element_size(), buffer.grads.element_size()
    covered = torch.zeros(buffer.data.numel(), dtype=torch.bool)
    assert [id(one) for one in reversed(trained(model))] == [id(one) for one in buffer.parameters]
    for parameter, grad in zip(trained(model), gradients_of(model), strict=True):
        offset, left = divmod(parameter.data_ptr() - buffer.data.data_ptr(), item)
        assert left == 0 and offset * item % 256 == 0
        if grad is not None:
            assert grad.data_ptr() - buffer.grads.data_ptr() == offset * grad_item
            assert grad.stride() == parameter.stride()
        covered[offset : offset + parameter.numel()] = True
    assert not covered.all()
    for values in (buffer.data, buffer.grads):
        assert not values.cpu()[~covered].any()


def assert_equal(one: Any, other: Any, what: str = "") -> None:
    """Nested dictionaries, lists and tensors."""
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape, what
        assert same_bits(one.detach().cpu(), other.detach().cpu()), what
    elif isinstance(one, dict):
        assert sorted(map(str, one)) == sorted(map(str, other)), what
        for key in one:
            assert_equal(one[key], other[key], f"{what}.{key}")
    elif isinstance(one, (list, tuple)):
        for number, pair in enumerate(zip(one, other, strict=True)):
            assert_equal(*pair, f"{what}.{number}")
    else:
        assert one == other, what


def count_as_reduced(flat: tg.FlatParameters) -> None:
    """What a test has set alike on all ranks needs no reduction, which might round it."""
    for buffer in flat.buffers:
        buffer.settle_()
        buffer.all_gradients.note_reduced()
