"""What the FP8 ops compute, in plain torch: what others are compared with, and what torch is timed with."""

from typing import Any

import torch
from torch import Tensor

from te_graph.testing import same_bits

E4M3, LARGEST = torch.float8_e4m3fn, 448.0
FLT_MAX = torch.finfo(torch.float32).max
RELATIVE = 1e-6  # of numbers in fp32 that not everybody divides alike for
NEIGHBOURS = 0.1  # share of bytes that may be others, where scale or input are not the same in all bits
NEAR = 0.01  # by the norm of what differs


def quotient(amax: Tensor) -> Tensor:  # any shape, as what is returned
    """LARGEST / amax, rounded once: `LARGEST / amax` is the product with a rounded reciprocal."""
    return torch.full_like(amax, LARGEST) / amax


def torch_cast(op: str, x: Tensor, scale: Tensor, amax: Tensor) -> dict[str, Tensor]:
    """An operation of `parts` on `x` [M, N] in bf16, with `scale` and the `amax` so far, [1] both.

    Returns:
        out [M, N], scale_inv [1], amax [1]; but for "cast" out_t [N, M]; for "cast_transpose_dbias" dbias [N].
    """
    amax = torch.maximum(amax, x.abs().max().float())
    if op == "current":
        scale = quotient(amax)
    # Conversion of torch 2.11 does not saturate.
    out = (x.float() * scale).clamp(-LARGEST, LARGEST).to(E4M3)
    found = {"out": out, "scale_inv": scale.reciprocal(), "amax": amax}
    if op != "cast":
        found["out_t"] = out.t().contiguous()
    if op == "cast_transpose_dbias":
        found["dbias"] = x.sum(0, dtype=torch.float32).to(x.dtype)
    return found


def torch_update(history: Tensor, scale: Tensor, scale_inv: Tensor, non_weight_mask: Tensor, flag: Tensor) -> None:
    """The update of delayed scaling by the largest amax, in place.

    Args:
        history: [H, n]. scale, scale_inv: [n]. non_weight_mask: [n] bool. flag: [1], not 0 to update all scale_inv.
    """
    amax, ran = history.amax(0), history[0] != 0
    usable = ran & (amax > 0) & amax.isfinite()
    scale.copy_(torch.where(usable, quotient(amax).clamp(max=FLT_MAX), scale))
    moved = history.roll(-1, 0)
    moved[0] = 0
    history.copy_(torch.where(ran, moved, history))
    scale_inv.copy_(torch.where(non_weight_mask | (flag != 0), scale.reciprocal(), scale_inv))


def require_cast(op: str, x: Tensor, scale: Tensor, got: dict[str, Tensor]) -> None:
    """Compare `got` with `torch_cast` of x [M, N] and scale [1]. With current scaling, where everybody divides for the
    scale, amax may be missing and a few elements may be the next number.

    Raises:
        RuntimeError: something is missing or differs.
    """
    wanted = torch_cast(op, x, scale, torch.zeros_like(scale))
    if missing := set(wanted) - set(got) - ({"amax"} if op == "current" else set()):
        raise RuntimeError(f"{op}: expected {', '.join(sorted(missing))}, got none")
    for name, values in got.items():
        _require(f"{op}: {name} of plain torch", _is_alike(name, values, wanted[name], is_loose=op == "current"))


def _is_alike(name: str, got: Tensor, want: Tensor, is_loose: bool) -> bool:  # both of one shape
    if name in ("out", "out_t") and is_loose:
        return got.shape == want.shape and _are_neighbours(got, want)
    if name in ("out", "out_t"):
        return same_bits(got, want)
    if name == "dbias":
        return torch.allclose(got.float(), want.float(), rtol=2**-7, atol=1e-2)
    return torch.allclose(got, want, rtol=RELATIVE if name == "scale_inv" else 0.0, atol=0)


def _are_neighbours(got: Tensor, want: Tensor) -> bool:  # both [M, N] FP8
    """Whether bytes, but for some that are off by one, are the same."""
    steps = (got.view(torch.uint8).to(torch.int16) - want.view(torch.uint8)).abs()
    return steps.max().item() <= 1 and steps.float().mean().item() <= NEIGHBOURS


def require_made(op: str, made: Tensor, scale: Tensor, got: dict[str, Tensor]) -> None:
    """Compare `got`, out [M, N], out_t [N, M], scale_inv and amax [1], with the cast of what plain torch has `made`
    [M, N] in bf16: a few elements, of which the input was rounded otherwise, may be others.

    Raises:
        RuntimeError: something differs.
    """
    wanted = torch_cast("cast_transpose", made, scale, torch.zeros_like(scale))
    require_near(f"{op}: out", got["out"], wanted["out"])
    others = got["out"].view(torch.uint8) != wanted["out"].view(torch.uint8)
    _require(f"{op}: most bytes of out of plain torch", others.float().mean() <= NEIGHBOURS)
    _require(f"{op}: out_t as out", same_bits(got["out_t"], got["out"].t()))
    _require(f"{op}: scale_inv of plain torch", _is_alike("scale_inv", got["scale_inv"], wanted["scale_inv"], False))
    require_near(f"{op}: amax", got["amax"], wanted["amax"])


def require_near(what: str, got: Tensor, want: Tensor) -> None:
    """Raise RuntimeError unless `got` [...] is, up to the order of sums and roundings, `want` of plain torch."""
    is_near = got.shape == want.shape and (got.float() - want.float()).norm() <= NEAR * want.float().norm()
    _require(f"{what} of plain torch", is_near)


def draw_scales(count: int, device: str) -> list[Tensor]:
    """[1] each, no powers of two; of normally distributed numbers less than one in a hundred saturates in e4m3."""
    return list((100 + 60 * torch.rand(count, 1, device=device)).unbind())


def require_update(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Compare `got`, some of history [H, n], scale [n] and scale_inv [n], with `want`, all of them.

    Raises:
        RuntimeError: something differs.
    """
    for name, values in got.items():
        tolerance = 0.0 if name == "history" else RELATIVE
        alike = values.shape == want[name].shape and torch.allclose(values, want[name], rtol=tolerance, atol=0)
        _require(f"update: {name} of plain torch", alike)


def require_copy(got: Tensor, want: Tensor) -> None:  # both of any shape
    """Raise RuntimeError unless bits are the same."""
    _require("a copy", same_bits(got, want))


def as_numbers(tensor: Tensor) -> Tensor:
    """`tensor`, [...], or its bytes where it is FP8, of which torch tells little."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def require_zeros(what: str, tensors: list[Tensor]) -> None:
    """Raise RuntimeError unless all `tensors`, [...] each, are 0."""
    _require(what, not any(as_numbers(tensor).any().item() for tensor in tensors))


def _require(what: str, is_met: Any) -> None:
    if not is_met:
        raise RuntimeError(f"expected {what}, got other values")
