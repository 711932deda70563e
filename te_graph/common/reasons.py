"""Reasons why calls do not replay: reported once each, and counted."""

from __future__ import annotations

_MAX_REASONS = 32  # shapes and values in messages may go on for ever


class Reported:
    """Reasons that one object has reported."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()

    def is_first(self, reason: str) -> bool:
        """Whether ``reason`` is to be reported now."""
        if reason in self._reasons or len(self._reasons) >= _MAX_REASONS:
            return False
        self._reasons.add(reason)
        return True


class ReasonCounts(dict[str, int]):
    """How many calls have run eagerly for each reason."""

    def add(self, reason: str) -> None:
        """Count one call."""
        known = reason if reason in self or len(self) < _MAX_REASONS else "other reasons"
        self[known] = self.get(known, 0) + 1
