"""The zoo, second half: functions without parameters, autograd Functions, function transforms, writes of lists of
tensors, and pieces that round."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .pieces import CONSTANT
from .prelude import ints


class GradInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.gradient = x * 2
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.gradient


class Half2(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = x > 0
        ctx.mark_non_differentiable(mask)
        ctx.save_for_backward(mask)
        return x * mask, mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class SavedGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return GradInForward.apply(x * self.p)


class FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.gradients = x * p * p, x * x * p
        return (x * p).square().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return ctx.gradients


class FusedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return FusedLoss.apply(x, self.p)


def grad_in_forward(x: Tensor) -> Tensor:
    return GradInForward.apply(x)


def masked(x: Tensor) -> tuple[Tensor, Tensor]:
    return Half2.apply(x)


def dirty(x: Tensor) -> Tensor:
    return Doubled.apply(x * 1)


def straight_through(x: Tensor) -> Tensor:
    return StraightThrough.apply(x)


def flat_view(x: Tensor) -> Tensor:
    return x.reshape(2, 8).view(4, 4)


def transposed(x: Tensor) -> Tensor:
    return x.t()


def turned(x: Tensor) -> Tensor:
    return x.flip(0).permute(1, 0)


def halves(x: Tensor) -> Tensor:
    a, b = x.split(2, -1)
    return torch.cat([b, a], -1)


def itself(x: Tensor) -> Tensor:
    return x


def twice(x: Tensor) -> Tensor:
    return x * 2


def square(x: Tensor) -> Tensor:
    return x * x


def with_argument(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x


def with_view_of_argument(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.t()


def with_row(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y[0]


def with_itself(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y


def with_turned(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y.t()


def with_detached(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y.detach()


def with_successor(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y * 3


def with_constant(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, CONSTANT


def split_in_two(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x + 1
    a, b = y.split(2)
    return a, b


def edited_inside(x: Tensor) -> Tensor:
    y = x * 2
    y[0] += 1
    return y.relu_()


def edited_view(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 1].mul_(3)
    y.t()[2].add_(x[0])
    return y


def one_of_negative(x: Tensor) -> Tensor:
    return torch.complex(x, x + 1).conj().imag


def plus(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def times(x: Tensor, y: Tensor) -> Tensor:
    return x * y


def plus_and_both(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + y, y


def beside_detached(x: Tensor, y: Tensor) -> Tensor:
    return x * y.detach() + y * 0


def joined(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x[:2], y[2:]])


def list_inside(x: Tensor) -> Tensor:
    parts = [x * 2, x + 1]
    torch._foreach_mul_(parts, 2)
    torch._foreach_add_(parts[:1], parts[1:])
    return parts[0] + parts[1]


def mapped(x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: row * 2 + row.sum())(x)


def polynomial(x: Tensor) -> Tensor:
    return x * 2 + x.relu()


class ListCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4))
        self.register_buffer("seen", ints(4, 4))
        self.register_buffer("calls", ints(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        torch._foreach_add_([self.seen, self.calls], [x.detach(), x.detach() * 2])
        torch._foreach_neg_([self.calls])
        return x * self.p + self.seen - self.calls


class ListOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4))
        self.register_buffer("last", ints(4, 4))
        self.register_buffer("before", ints(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        torch.unbind_copy(torch.stack([x.detach(), self.last]), out=[self.last, self.before])
        return x * self.p + self.before


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = self.attention(x[None], x[None], x[None])
        return y[0], weights[0]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(4, 4, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x[None])[0][0]


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.batch = nn.LayerNorm(4, dtype=torch.float64), nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.batch(self.norm(x)))


class Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = self.line(x).softmax(-1)
        return a @ x, a


def third(x: Tensor) -> Tensor:
    return x * torch.full((), 1 / 3, device=x.device)


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.25, batch_first=True, dtype=torch.float64)
