"""Blocks that models are built of, for random training scripts: each maps [batch, tokens, WIDTH] to the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS = 8, 2


class Attention(nn.Module):
    """Pre-norm attention with dropout; the mask is causal unless one is given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        shape = (batch, tokens, 3, HEADS, width // HEADS)
        query, key, value = self.qkv(self.norm(x)).view(shape).permute(2, 0, 3, 1, 4)
        p = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=p, is_causal=mask is None)
        return x + self.dropout(self.out(y.transpose(1, 2).reshape(batch, tokens, width)))


class Rotary(nn.Module):
    """Attention written out, with rotary positions from a buffer, and RMS norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.register_buffer("frequencies", 1.0 / (100.0 ** (torch.arange(0, 4, 2) / 4)), persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[1], device=x.device).float(), self.frequencies)
        cos, sin = (torch.cat([f(angles)] * 2, -1).to(x.dtype) for f in (torch.cos, torch.sin))
        query, key, value = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        query, key = (t * cos + torch.cat([-t[..., 2:], t[..., :2]], -1) * sin for t in (query, key))
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        weights = F.dropout(scores.float().softmax(-1).to(x.dtype), 0.1, self.training)
        return x + (weights @ value).transpose(1, 2).flatten(2)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = (nn.Linear(WIDTH, WIDTH, bias=b) for b in (True, False, True))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(F.silu(self.gate(x)) * self.up(x))


class Convolution(nn.Module):
    """Batch norm over channels, with running statistics; activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=False), nn.BatchNorm1d(WIDTH)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x.transpose(1, 2)))
        y += x.transpose(1, 2)
        return self.act(y).transpose(1, 2)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x)[0]


class Experts(nn.Module):
    """Each token by two of four experts; the balance of the load is a second result."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.weight = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.router(x).float().softmax(-1)
        values, chosen = chances.topk(2, -1)
        gates = torch.zeros_like(chances).scatter(-1, chosen, values).to(x.dtype)
        load = (chosen[..., None] == torch.arange(4, device=x.device)).float().mean((0, 1, 2))
        return x + torch.einsum("bte,btd,edf->btf", gates, x, self.weight), (load * chances.mean((0, 1))).sum()


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank one beside it, that can be merged."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(2, WIDTH) * 0.3), nn.Parameter(torch.zeros(WIDTH, 2))
        self.is_merged = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return x + (y if self.is_merged else y + F.linear(F.linear(x, self.a), self.b))

    def merge(self) -> None:
        with torch.no_grad():
            self.base.weight += (self.b @ self.a) * (-1 if self.is_merged else 1)
        self.is_merged = not self.is_merged


class Noisy(nn.Module):
    """Draws in the forward, and keeps a moving average in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, 2 * WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.line(x).chunk(2, -1)
        if self.training:
            mean = mean + torch.randn_like(mean) * F.softplus(spread) * 0.1
            with torch.no_grad():
                self.average.lerp_(mean.detach().mean((0, 1)).to(self.average.dtype), 0.1)
                self.calls += 1
            mean = mean * (torch.rand(len(x), 1, 1, device=x.device) < 0.7)
        return x + mean - self.average.to(x.dtype)


class Normed(nn.Module):
    """A parametrized weight."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.line = wrap(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.line(x))


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.inner, x, use_reentrant=False) if self.training else self.inner(x))


class Tied(nn.Module):
    """One weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(F.leaky_relu(self.one(x), 0.1))


class Two(nn.Module):
    """A head that not every loss uses, in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"main": x + self.main(x).sigmoid(), "side": self.side(x)}


def torch_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention,
    "rotary": Rotary,
    "gated": Gated,
    "convolution": Convolution,
    "recurrent": Recurrent,
    "experts": Experts,
    "adapter": Adapter,
    "noisy": Noisy,
    "weight_norm": lambda: Normed(parametrizations.weight_norm),
    "spectral_norm": lambda: Normed(parametrizations.spectral_norm),
    "recomputed": Recomputed,
    "tied": Tied,
    "two": Two,
    "torch": torch_layer,
}
TAKE_MASKS = (Attention, Rotary)
CHANGE_SOMETHING = {"convolution", "noisy", "spectral_norm"}  # in their forwards
