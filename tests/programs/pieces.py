"""The zoo, first half: pieces that compute exactly on whole numbers. All take and give float64 tensors of [4, 4]."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .prelude import ints

CONSTANT = torch.from_numpy(np.arange(16.0).reshape(4, 4))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.p


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.line(x).relu()


class Pos(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.p


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.p + self.p.t()


class ColumnViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fused = ints(4, 8)
        self.p, self.q = nn.Parameter(self.fused[:, :3]), nn.Parameter(self.fused[:, 3:])

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([x, x], 1) * torch.cat([self.p, self.q], 1)
        return y[:, :4] + y[:, 4:]


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(1, 4).expand(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + self.p.sum()


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.p)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.complex(ints(4, 4), ints(4, 4)))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.complex(x, x.flip(0)) * self.p + self.p.conj()
        return y.real + y.conj().imag


class ConjugateView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.complex(ints(4, 4), ints(4, 4)).conj())

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.p).real + (self.p * x).imag


class ConjugateGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.complex(ints(4, 4), ints(4, 4)))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.complex(x, x + 1) + self.p.conj()
        return y.real * 2 + y.imag


class NegativeGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.complex(ints(4, 4), ints(4, 4)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.p.conj().imag


class NegativeView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.complex(ints(4, 4), ints(4, 4)).conj().imag)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.p


class Half(nn.Module):
    def __init__(self, grad_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4, 4).bfloat16())
        if grad_dtype is not None:
            self.p.grad_dtype = grad_dtype

    def forward(self, x: Tensor) -> Tensor:
        return (x.bfloat16() * self.p).double()


class SmallGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4, 4))
        self.p.grad_dtype = torch.float32

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.p


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(ints(4, 4), requires_grad=False), nn.Parameter(ints(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.p + self.q


class NoBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.bias = nn.Parameter(ints(4, 4)), None
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.p, self.bias)
        return y if self.mask is None else y * self.mask


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.factor, self.flags = nn.Parameter(ints(4)), 2.0, {"shift": True}

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.p * self.factor
        return y + 1 if self.flags["shift"] else y


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.act, self.drop = nn.Parameter(ints(4, 4)), nn.ReLU(), nn.Dropout(0.0)
        self.parts = nn.ModuleList([nn.Identity(), nn.Flatten()])

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.act(x @ self.p))
        for part in self.parts:
            y = part(y)
        return y


class ParameterRow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.row = nn.ParameterList([nn.Parameter(ints(4)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for p in self.row:
            x = x * p + p
        return x


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4))
        self.register_buffer("seen", torch.zeros(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.add_(x)
        return x * self.p + self.seen


class ReturnsBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4))
        self.register_buffer("mask", ints(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.p, self.mask


class ReturnsChangedBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4))
        self.register_buffer("mask", ints(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.mask.copy_(x * 2)
        return x * self.p, self.mask


class ReturnsParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.p, self.p.t()


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a = x @ self.p
        return a @ x, a


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(ints(4)), nn.Parameter(ints(4))

    def forward(self, x: Tensor) -> Any:
        return {"y": x * self.p, "z": [x + self.q, 3]}


class Picker(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        nest = self.inner(x)
        return nest["y"], nest["z"][0]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: (y @ self.p).relu() @ self.p, x, use_reentrant=False, preserve_rng_state=False)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4, _weight=ints(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.detach().long().remainder(5)[:, 0])


class Convolution(nn.Module):
    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1, dtype=torch.float64).to(memory_format=memory_format)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.reshape(1, 2, 2, 4)).reshape(4, 4)


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(ints(4, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x @ self.p + y


class TwoOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(ints(4, 4)), nn.Parameter(ints(4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.q + y, y @ self.p


def scaled_by(owner: nn.Module) -> Any:
    def scaled(x: Tensor) -> Tensor:
        return owner(x) * 2

    return scaled
