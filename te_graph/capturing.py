"""Whether a capture of te_graph is under way: graphed callables then run eagerly, to be captured themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from te_graph import _C
from te_graph.recorder import is_recording


def is_capturing() -> bool:
    """True, on this thread, inside captures of ``make_graphed_callables`` and ``graphed`` (warm-ups too) and inside
    ``Recorder.capture()``."""
    return _C.in_session() or is_recording()


_checks: ContextVar[list[Callable[[], None]] | None] = ContextVar("checks of the graphed() capture", default=None)


def before_replay(check: Callable[[], None]) -> None:
    """Called by something that a ``graphed()`` capture uses: run ``check`` before each replay of what is captured.

    What it raises reaches the caller of the graphed function, and nothing is replayed. The capture keeps ``check``
    alive. Outside such a capture this does nothing.
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


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Around everything that one ``make_graphed_callables``, or ``graphed()``, runs to capture."""
    _C.enter_session()
    try:
        yield
    finally:
        _C.leave_session()
