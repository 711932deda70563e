"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RotaryPositionEmbedding(nn.Module):
    """Angles by which queries and keys are turned: position * base^(-2 i / dim), for i < dim / 2, twice.

    Args:
        dim: features of a head that are turned, the first ones; even.
        rotary_base: see above.

    Raises:
        ValueError: ``dim`` is not even.

    Stream and capture: a call launches a few small kernels and allocates; angles may be made once and kept.
        Semantics of TransformerEngine's class.
    """

    def __init__(self, dim: int, rotary_base: float = 10000.0) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"te_graph.RotaryPositionEmbedding: expected an even dim, got {dim}")
        self.dim, self.rotary_base = dim, rotary_base

    def forward(self, max_seq_len: int, offset: int = 0, device: torch.device | str | None = None) -> Tensor:
        """The angles of positions offset, offset + 1, ...

        Args:
            max_seq_len: how many.
            offset: the first position.
            device: of the result.

        Returns:
            [max_seq_len, 1, 1, dim] float32, new.
        """
        exponents = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim
        positions = torch.arange(offset, offset + max_seq_len, device=device, dtype=torch.float32)
        angles = torch.outer(positions, self.rotary_base**-exponents)
        return torch.cat([angles, angles], dim=1)[:, None, None, :]


def apply_rotary_pos_emb(x: Tensor, angles: Tensor) -> Tensor:
    """x [seq, batch, heads, head_dim], its first features turned by ``angles`` [at least seq, 1, 1, dim]; of x's dtype.

    Feature i goes with feature i + dim / 2.

    Raises:
        ValueError: angles are of another shape.
    """
    dim = angles.shape[-1] if angles.dim() == 4 else 0
    if angles.shape[1:3] != (1, 1) or angles.shape[0] < x.shape[0] or dim % 2 or not 0 < dim <= x.shape[-1]:
        raise ValueError(
            f"te_graph.TransformerLayer: expected rotary_pos_emb of shape [at least {x.shape[0]}, 1, 1, an even number "
            f"up to {x.shape[-1]}], got {list(angles.shape)}"
        )
    angles = angles[: x.shape[0]]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    part, rest = x[..., :dim], x[..., dim:]
    first, second = part.chunk(2, dim=-1)
    result = part * cos + torch.cat([-second, first], dim=-1) * sin
    return result if rest.shape[-1] == 0 else torch.cat([result, rest], dim=-1)
