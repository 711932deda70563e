"""The state of autocast at a call, so that the capture runs under the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_KINDS = ("cpu", "cuda")


@dataclass(frozen=True)
class AutocastState:
    """Whether autocast is on for each kind of device, with its dtype, and whether it keeps casts of weights."""

    enabled: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    caches: bool

    @property
    def casts_once(self) -> bool:
        """Whether a weight is cast once for all its uses."""
        return self.caches and any(self.enabled)

    @classmethod
    def now(cls) -> AutocastState:
        """The present state of this thread."""
        return cls(
            tuple(torch.is_autocast_enabled(kind) for kind in _KINDS),
            tuple(torch.get_autocast_dtype(kind) for kind in _KINDS),
            torch.is_autocast_cache_enabled(),
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore it for what runs inside, as one autocast region: the end of an inner one does not clear the casts."""
        before = AutocastState.now()
        self._set()
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            torch.autocast_decrement_nesting()
            before._set()

    def _set(self) -> None:
        for kind, enabled, dtype in zip(_KINDS, self.enabled, self.dtypes, strict=True):
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.caches)
