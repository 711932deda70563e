"""Recipes of FP8 training: which formats, and how scales are found."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import torch

# Within these 448 * 2**-margin divided by the largest float32, the smallest scale that there is, is not 0, and of
# 57344 * 2**-margin, that of an amax of 1, the inverse is no subnormal number.
_LEAST_MARGIN, _GREATEST_MARGIN = -110, 29


class Format(enum.Enum):
    """FP8 formats of a recipe: (of activations and weights, of gradients)."""

    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)

    @property
    def forward_dtype(self) -> torch.dtype:
        """Of activations and weights."""
        return self.value[0]

    @property
    def backward_dtype(self) -> torch.dtype:
        """Of gradients."""
        return self.value[1]


class Recipe:
    """What all recipes have in common. Equal ones are the same recipe, however often they are made.

    Attributes:
        fp8_format: the formats.

    Raises:
        TypeError: ``fp8_format`` is no ``Format``.
    """

    fp8_format: Format

    def __post_init__(self) -> None:
        if not isinstance(self.fp8_format, Format):
            raise TypeError(
                f"{type(self).__name__}: expected fp8_format to be a te_graph.Format, got "
                f"{type(self.fp8_format).__name__}"
            )


@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """Scales from the amaxes of earlier calls; a cast reads its tensor once.

    ``scale = largest number of the format * 2**-margin / amax``, amax being the largest of a tensor's history, or its
    newest, see ``amax_and_scale_update_inplace``. A module's history grows by one with each forward, and with each
    backward, while gradients are recorded.

    Attributes:
        margin: powers of two to stay below the largest number, -110 to 29.
        fp8_format: the formats.
        amax_history_len: number of amaxes that are kept.
        amax_compute_algo: "max" of the history, or "most_recent".
        reduce_amax: with an ``amax_reduction_group``, take the largest of all its ranks.

    Raises:
        TypeError: ``fp8_format`` is no ``Format``.
        ValueError: a ``margin`` that is no number, or one with which scales would be 0 or infinite, an
            ``amax_history_len`` that is no positive integer, or an ``amax_compute_algo`` of another name.
    """

    margin: float = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.margin, bool) or not isinstance(self.margin, int | float) or not math.isfinite(self.margin):
            raise ValueError(f"DelayedScaling: expected margin to be a finite number, got {self.margin!r}")
        if not _LEAST_MARGIN <= self.margin <= _GREATEST_MARGIN:
            raise ValueError(
                f"DelayedScaling: expected margin to be from {_LEAST_MARGIN} to {_GREATEST_MARGIN}, beyond which "
                f"scales become 0 or infinite, got {self.margin!r}"
            )
        if not isinstance(self.amax_history_len, int) or self.amax_history_len < 1:
            raise ValueError(
                f"DelayedScaling: expected amax_history_len to be a positive integer, got {self.amax_history_len!r}"
            )
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                "DelayedScaling: expected amax_compute_algo to be 'max' or 'most_recent', got "
                f"{self.amax_compute_algo!r}"
            )


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """Scales from the tensors themselves, which are read once more to find their amax.

    Attributes:
        fp8_format: the formats.

    Raises:
        TypeError: ``fp8_format`` is no ``Format``.
    """

    fp8_format: Format = Format.HYBRID
