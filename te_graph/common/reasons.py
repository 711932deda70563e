"""Reasons why calls do not replay, or modules are left: reported once each, and counted."""

from __future__ import annotations

from collections.abc import Sequence

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


def said_by_reason(left_out: dict[str, str]) -> list[str]:
    """One text for each reason in ``left_out`` (name -> reason), with the names of all that it holds for, in short."""
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    return [f"{_in_short(each)}: {reason}" for reason, each in names.items()]


def _in_short(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
