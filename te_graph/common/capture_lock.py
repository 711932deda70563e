"""What captures take for themselves of the process: one at a time, and without garbage collection."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# A capture holds what belongs to the process: garbage collection, the default generators, the capture stream, places
# among the tools that hear of Python's events. And no two threads may watch operators at once, in a capture, the first
# call of a graphed function or the step of graph_layers: torch fails where both let Python see an operator for the
# first time in the process.
_captures = threading.RLock()
_TIMEOUT = 600.0  # seconds
_thread_of_watched_call: int | None = None


@contextlib.contextmanager
def capture_lock() -> Iterator[None]:
    """Around a capture: waits for those of other threads.

    Raises:
        RuntimeError: one did not end. It may wait for something that the caller of this one holds.
    """
    if not _captures.acquire(timeout=_TIMEOUT):
        raise RuntimeError(
            f"another thread has been capturing for {_TIMEOUT:.0f} s, and a process makes one capture at a time; "
            "where that one waits for a lock or a result of this thread, capture before the threads start, or release "
            "the lock around the capture"
        )
    try:
        yield
    finally:
        _captures.release()


def try_capture_lock() -> contextlib.AbstractContextManager[None] | None:
    """``capture_lock()``, already entered; None while another thread captures, or watches a call."""
    if not _captures.acquire(blocking=False):
        return None
    stack = contextlib.ExitStack()
    stack.callback(_captures.release)
    return stack


@contextlib.contextmanager
def watched_call() -> Iterator[None]:
    """With the lock, around a call that is watched and not captured: it may wait for what other threads call."""
    global _thread_of_watched_call
    outer, _thread_of_watched_call = _thread_of_watched_call, threading.get_ident()
    try:
        yield
    finally:
        _thread_of_watched_call = outer


def is_watched_elsewhere() -> bool:
    """Whether another thread runs a call that is watched."""
    return _thread_of_watched_call not in (None, threading.get_ident())


@contextlib.contextmanager
def garbage_collection_off() -> Iterator[None]:
    """A collection in the middle of a capture could free what must not be freed there."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
