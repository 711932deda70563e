"""What captures take for themselves of the process: one at a time, and without garbage collection."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# A capture holds what belongs to the process: garbage collection, the default generators, the capture stream.
_captures = threading.RLock()
_TIMEOUT = 600.0  # seconds


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
    """``capture_lock()``, already entered; None while another thread captures."""
    if not _captures.acquire(blocking=False):
        return None
    stack = contextlib.ExitStack()
    stack.callback(_captures.release)
    return stack


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
