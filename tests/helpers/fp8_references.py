"""What the FP8 ops are to compute, in plain PyTorch on the CPU.

Torch 2.11 does not saturate when it converts to FP8, so values are clamped first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_DTYPES = (E4M3, E5M2)
FP8_MAX = {E4M3: 448.0, E5M2: 57344.0}
FP8_NAN = 0x7F
FLT_MAX = torch.finfo(torch.float32).max
ALGORITHMS = ("max", "most_recent")  # amax_compute_algo


@dataclass
class Cast:
    """Results of a cast of x [...], on the CPU.

    Attributes:
        out: [...] FP8.
        scale_inv: [1] fp32.
        amax: [1] fp32: largest magnitude of x, not counting NaN; to be maxed into what was there.
        counts: [3] int64: saturated, underflowed, not finite; to be added to what was there.
    """

    out: Tensor
    scale_inv: Tensor
    amax: Tensor
    counts: Tensor


def reference_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Cast:
    """``x`` [...] times ``scale`` [] or [1] in fp32, saturated, rounded to nearest even to ``dtype``."""
    wide, factor = x.detach().cpu().float(), scale.detach().cpu().float().reshape(())
    product = wide * factor
    out = product.clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)
    raw = out.view(torch.uint8)
    raw.masked_fill_(product.isnan(), FP8_NAN)
    saturated = wide.isfinite() & (product.abs() > FP8_MAX[dtype])
    underflowed = (wide != 0) & (factor != 0) & ((raw & 0x7F) == 0)
    counts = torch.stack([mask.sum() for mask in (saturated, underflowed, ~wide.isfinite())])
    magnitudes = torch.cat([torch.zeros(1), wide.abs().flatten()])
    amax = magnitudes.masked_fill_(magnitudes.isnan(), 0).amax().reshape(1)
    return Cast(out, reciprocal(factor).reshape(1), amax, counts)


def reciprocal(scale: Tensor) -> Tensor:
    """1 / ``scale`` [...] fp32, correctly rounded: fp64 has more than twice the bits, so rounding twice is harmless."""
    return (1 / scale.detach().cpu().double()).float()


def fp8_values(dtype: torch.dtype) -> Tensor:
    """Finite values of ``dtype`` that are not negative, by their bytes 0, 1, ..: [n] fp64, from their definition."""
    mantissa_bits, bias, count = {E4M3: (3, 7, 0x7F), E5M2: (2, 15, 0x7C)}[dtype]
    codes = torch.arange(count, dtype=torch.float64)
    exponents, mantissas = codes.div(2**mantissa_bits, rounding_mode="floor"), codes % 2**mantissa_bits
    implicit = (exponents > 0).double()
    return (implicit + mantissas / 2**mantissa_bits) * torch.exp2(exponents.clamp(min=1) - bias)


def nearest_fp8(product: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [...] uint8 of the nearest FP8 values of ``product`` [...] fp32, ties to even, found in a table."""
    values = fp8_values(dtype)
    magnitudes = product.double().abs().clamp(max=float(values[-1]))
    middles = (values[1:] + values[:-1]) / 2
    below = torch.bucketize(magnitudes, middles)  # the lower of the two neighbours of a middle
    is_tie = magnitudes == middles[below.clamp(max=len(middles) - 1)]
    codes = below + (is_tie & (below % 2 == 1))
    codes += 0x80 * product.signbit()
    return codes.masked_fill(product.isnan(), FP8_NAN).to(torch.uint8)


def reference_scale(
    amax: Tensor, dtype: torch.dtype, margin: float = 0.0, eps: float = 0.0, power_of_2: bool = False
) -> Tensor:
    """Current scaling: the scale [...] fp32 of ``amax`` [...]; 1 if that is 0, Inf or NaN; never Inf."""
    amax = amax.detach().cpu().float()
    bounded = torch.where(amax.isnan(), amax, amax.clamp(min=torch.tensor(eps).float().item()))
    scale = divided(scaled_maximum(FP8_MAX[dtype], margin), bounded)
    scale = torch.where(bounded.isfinite() & (bounded > 0), scale, torch.ones(()))
    if power_of_2:
        _, exponents = torch.frexp(scale.double())  # which are those of subnormal numbers, too
        scale = torch.ldexp(torch.full(scale.shape, 0.5, dtype=torch.float64), exponents).float()
    return scale


def reference_amax(x: Tensor) -> Tensor:
    """Largest magnitude of ``x`` [...], [1] fp32; 0 of no element, NaN if there is one."""
    return torch.cat([torch.zeros(1), x.detach().cpu().float().abs().flatten()]).amax().reshape(1)


def scaled_maximum(fp8_max: float, margin: float) -> Tensor:
    """``fp8_max * 2^-margin``, [] fp32."""
    return torch.tensor(fp8_max).float() * torch.tensor(2.0**-margin).float()


def divided(scaled_max: Tensor, amax: Tensor) -> Tensor:
    """``scaled_max`` [] / ``amax`` [...] in fp32, correctly rounded; FLT_MAX for what overflows."""
    quotient = (scaled_max.double() / amax.double()).float()
    return torch.where(quotient.isinf(), torch.full((), FLT_MAX), quotient)


@dataclass
class ScaleState:
    """State of delayed scaling of n tensors: history [H, n], scale [n], scale_inv [n], all fp32."""

    history: Tensor
    scale: Tensor
    scale_inv: Tensor

    def clone(self) -> ScaleState:
        return ScaleState(*(t.detach().clone(memory_format=torch.contiguous_format) for t in self.tensors()))

    def tensors(self) -> list[Tensor]:
        return [self.history, self.scale, self.scale_inv]


def reference_update(
    state: ScaleState,
    non_weight_mask: Tensor,
    update_weight_scale_inv: bool,
    fp8_max: float,
    margin: float = 0.0,
    amax_compute_algo: str = "max",
    skip_nonfinite: bool = False,
) -> ScaleState:
    """The state after one update, column by column; ``non_weight_mask`` [n] bool or [0]. On the CPU."""
    history, scale, scale_inv = (t.detach().cpu().clone() for t in state.tensors())
    mask = non_weight_mask.tolist() or [True] * len(scale)
    scaled_max = scaled_maximum(fp8_max, margin)
    for j in range(len(scale)):
        window = [float(value) for value in history[:, j]]
        if skip_nonfinite and not math.isfinite(window[0]):
            history[0, j] = 0
        elif window[0] != 0:
            known = [value for value in window if not math.isnan(value)]
            amax = max(known, default=0.0) if amax_compute_algo == "max" else window[0]
            if math.isfinite(amax) and amax > 0:
                scale[j] = divided(scaled_max, torch.tensor(amax))
            elif scale[j].isinf():
                scale[j] = FLT_MAX
            history[:, j] = torch.tensor([0.0, *window[2:], window[0]][: len(window)])
        if mask[j] or update_weight_scale_inv:
            scale_inv[j] = reciprocal(scale[j])
    return ScaleState(history, scale, scale_inv)


def reference_dequantize(x8: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """``x8`` [...] FP8 times ``scale_inv`` [] or [1] in fp32, then rounded to ``dtype``: [...]."""
    return (x8.detach().cpu().float() * scale_inv.detach().cpu().float().reshape(())).to(dtype)


def column_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of the columns of ``x`` [M, N] in fp64, [N], and how far a sum in fp32, in whatever order, may be off."""
    wide = x.detach().cpu().double()
    return wide.sum(0), wide.abs().sum(0) * len(x) * 2.0**-24
