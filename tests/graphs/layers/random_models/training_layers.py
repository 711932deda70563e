"""Layers of random models: options of one class are those that layers of libraries have."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import register_dataclass
from torch.utils.checkpoint import checkpoint

from .outcomes import rarely

WIDTH, HEADS = 12, 3


@dataclass(frozen=True)
class LayerOptions:
    """What all layers of one model have in common.

    Attributes:
        norm: "layer", "rms" or "".
        has_lora: linear modules are frozen, and have an adapter.
        has_bias: linear modules have one.
        shares_down: the second linear module is that of the other layers.
        dropout: its probability.
        gain: how a weight is used: "function" (an autograd Function), "twice", "once", or "" (there is none).
        average: of activations, kept in a buffer: "saved", "not saved" or "".
        has_batch_norm: after the norm.
        is_in_place: activations are scaled in place.
        keeps_positions: a table for each length is made when it comes first, and kept in a dictionary.
        is_checkpointed: inside.
        result: the kind of container that a layer returns.
        inner: how many more linear modules an attention has.
        is_causal: of attention.
    """

    norm: str
    has_lora: bool
    has_bias: bool
    shares_down: bool
    dropout: float
    gain: str
    average: str
    has_batch_norm: bool
    is_in_place: bool
    keeps_positions: bool
    is_checkpointed: bool
    result: str
    inner: int
    is_causal: bool

    @staticmethod
    def draw(rng: random.Random) -> LayerOptions:
        return LayerOptions(
            norm=rng.choice(("layer", "rms", "")),
            has_lora=rarely(rng, False, True),
            has_bias=rng.random() < 0.5,
            shares_down=rarely(rng, False, True),
            dropout=rng.choice((0.0, 0.0, 0.2)),
            gain=rarely(rng, "", "function", "twice", "once"),
            average=rarely(rng, "", "saved", "not saved"),
            has_batch_norm=rarely(rng, False, True),
            is_in_place=rarely(rng, False, True),
            keeps_positions=rarely(rng, False, True),
            is_checkpointed=rarely(rng, False, True),
            result=rarely(rng, "tensor", "tuple", "pair", "dict", "nested", "dataclass"),
            inner=rng.choice((0, 2)),
            is_causal=rng.random() < 0.5,
        )


@dataclass
class Results:
    hidden: Tensor  # [batch, n, 12]
    extra: Tensor  # [batch]


register_dataclass(Results)


def packed(kind: str, hidden: Tensor) -> Any:  # [batch, n, 12]
    """What a layer returns, in a container of ``kind``."""
    if kind == "tuple":
        return (hidden,)
    if kind == "pair":
        return hidden, hidden.mean((1, 2))
    if kind == "dict":
        return {"hidden": hidden, "extra": hidden.square().mean((1, 2)), "nothing": None}
    if kind == "nested":
        return [hidden, {"extra": hidden.detach().sum((1, 2))}]
    if kind == "dataclass":
        return Results(hidden, hidden.square().mean((1, 2)))
    return hidden


def unpacked(result: Any) -> tuple[Tensor, Tensor | None]:
    """Hidden states [batch, n, 12] and what was returned besides them, [batch]."""
    if isinstance(result, Tensor):
        return result, None
    if isinstance(result, tuple):
        return result[0], result[1] if len(result) > 1 else None
    if isinstance(result, dict):
        return result["hidden"], result["extra"]
    if isinstance(result, list):
        return result[0], result[1]["extra"]
    return result.hidden, result.extra


class _Scaled(torch.autograd.Function):
    """x * gain"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:  # [batch, n, 12], [12]
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # [batch, n, 12]
        x, gain = ctx.saved_tensors
        return grad * gain, (grad * x).sum((0, 1))


class Lora(nn.Module):
    """[..., n] -> [..., m], by a frozen linear module and an adapter that can be switched off."""

    def __init__(self, base: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.is_enabled, self.scaling = True, {"default": 0.5}

    def forward(self, x: Tensor) -> Tensor:  # [..., n]
        y = self.base(x)
        return y + self.up(self.down(x)) * self.scaling["default"] if self.is_enabled else y


def linear(options: LayerOptions, width: int = WIDTH) -> nn.Module:
    """[..., 12] -> [..., width]"""
    made = nn.Linear(WIDTH, width, bias=options.has_bias)
    return Lora(made) if options.has_lora else made


class Mlp(nn.Module):
    """[batch, n, 12] -> the same, in the container that the options say.

    Args:
        options: of all layers.
        shared: a linear module for all layers.
    """

    def __init__(self, options: LayerOptions, shared: nn.Module) -> None:
        super().__init__()
        self.options = options
        self.norm = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "": nn.Identity}[options.norm](WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH) if options.has_batch_norm else None
        self.up, self.drop = linear(options), nn.Dropout(options.dropout)
        self.down = shared if options.shares_down else linear(options)
        self.gain = nn.Parameter(torch.ones(WIDTH)) if options.gain else None
        if options.average:
            self.register_buffer("average", torch.zeros(WIDTH), persistent=options.average == "saved")
        self.tables: dict[int, Tensor] = {}
        self.has_gelu, self.factor = True, 1.0

    def _scaled(self, x: Tensor) -> Tensor:  # [batch, n, 12]
        if self.options.gain == "function":
            return _Scaled.apply(x, self.gain)
        if self.gain is not None:
            x = x * self.gain
        return x * self.gain if self.options.gain == "twice" else x

    def _averaged(self, x: Tensor) -> Tensor:  # [batch, n, 12]
        if not self.options.average:
            return x
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.detach().to(self.average.dtype).mean((0, 1)), alpha=0.1)
        return x + self.average

    def _positioned(self, x: Tensor) -> Tensor:  # [batch, n, 12]
        if not self.options.keeps_positions:
            return x
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.arange(x.shape[1], dtype=torch.float32)[None, :, None] / 10
        return x + self.tables[x.shape[1]]

    def _inner(self, x: Tensor, skip: Tensor | None) -> Tensor:  # [batch, n, 12], the same or [12]
        h = self.norm(x)
        if self.batch_norm is not None:
            h = self.batch_norm(h.transpose(1, 2)).transpose(1, 2)
        h = self.up(h)
        h = F.gelu(h) if self.has_gelu else torch.tanh(h)
        if self.options.is_in_place:
            h = h.sin().mul_(1.5)
        h = self._positioned(self._averaged(self._scaled(h)))
        h = self.down(self.drop(h))
        if skip is not None:
            h = h + skip
        return x + h * self.factor

    def forward(
        self,
        x: Tensor,  # [batch, n, 12]
        mask: Tensor | None = None,  # bool [batch, n], or what is added: [batch, n, 12]
        *,
        skip: Tensor | None = None,  # [batch, n, 12] or [12]
        config: dict[str, Any] | None = None,
        flags: tuple | None = None,
        **others: Any,
    ) -> Any:
        if self.options.is_checkpointed:
            h = checkpoint(self._inner, x, skip, use_reentrant=False)
        else:
            h = self._inner(x, skip)
        if mask is not None:
            h = h.masked_fill(mask[..., None], 0.25) if mask.dtype == torch.bool else h + mask
        if config is not None:
            h = h * config["scale"]
            if config.get("bias") is not None:
                h = h + config["bias"]
        if flags:
            h = h + 1
        if others.get("alpha") is not None:
            h = h * others["alpha"]
        return packed(self.options.result, h)


class Attention(Mlp):
    """Attention before the rest."""

    def __init__(self, options: LayerOptions, shared: nn.Module) -> None:
        super().__init__(options, shared)
        self.qkv = linear(options, 3 * WIDTH)
        more = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(options.inner)])
        self.parts = nn.ModuleDict({"out": linear(options), "more": more})

    def _inner(self, x: Tensor, skip: Tensor | None) -> Tensor:  # [batch, n, 12], the same or [12]
        query, key, value = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        p = self.options.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=p, is_causal=self.options.is_causal)
        h = self.parts["out"](y.transpose(1, 2).flatten(2))
        for layer in self.parts["more"]:
            h = layer(h).relu()
        return super()._inner(x + h, skip)
