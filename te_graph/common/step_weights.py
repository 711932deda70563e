"""What a ``StepState`` asks of the low-precision copies of weights that it casts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class StepWeights(ABC):
    """Copies of weights that are cast once in a step."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the copies are."""

    @property
    @abstractmethod
    def is_stale(self) -> bool:
        """True if a weight has changed since the last ``cast_``."""

    @abstractmethod
    def cast_(self) -> Any:
        """Cast all weights."""

    @abstractmethod
    def check(self) -> None:
        """Raise RuntimeError if a weight is stale or something has moved; names it."""

    @abstractmethod
    def check_places(self) -> None:
        """Raise RuntimeError if a weight or a copy lies elsewhere than before; names it."""
