"""What the objects that a ``graphed()`` capture uses want checked before each replay of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_checks: ContextVar[list[Callable[[], None]] | None] = ContextVar(
    "of the graphed() capture on this thread", default=None
)


def before_replay(check: Callable[[], None]) -> None:
    """Called by something that a ``graphed()`` capture uses: run ``check`` before each replay of what is captured.

    What it raises reaches the caller of the graphed function, and nothing is replayed. The capture keeps ``check``
    alive. Outside such a capture this does nothing.

    Args:
        check: takes nothing, raises if a replay would be wrong.
    """
    checks = _checks.get()
    if checks is not None:
        checks.append(check)


@contextlib.contextmanager
def collecting_checks() -> Iterator[list[Callable[[], None]]]:
    """Around the capture of one ``graphed()`` function: the list of what ``before_replay`` was given inside."""
    checks: list[Callable[[], None]] = []
    token = _checks.set(checks)
    try:
        yield checks
    finally:
        _checks.reset(token)


def is_collecting() -> bool:
    """True, on this thread, inside the capture of a ``graphed()`` function."""
    return _checks.get() is not None
