"""Whether a capture of te_graph is under way: graphed callables then run eagerly, to be captured themselves."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_dispatch_stack_at

from te_graph import _C


class RecordingMode(TorchDispatchMode):
    """A dispatch mode that records for a replay."""


def is_recording() -> bool:
    """True while this thread is inside ``Recorder.capture()``."""
    depth = torch._C._len_torch_dispatch_stack()
    return depth > 0 and any(isinstance(_get_dispatch_stack_at(level), RecordingMode) for level in range(depth))


def is_capturing() -> bool:
    """True, on this thread, inside captures of ``make_graphed_callables`` and ``graphed`` (warm-ups too) and inside
    ``Recorder.capture()``."""
    return _C.in_session() or is_recording()


def is_capturing_callables() -> bool:
    """True, on this thread, inside captures of ``make_graphed_callables``, which see where gradients belong."""
    return _C.in_session() and _collection.get() is None


def is_captured(device: torch.device | None = None) -> bool:
    """True where what is called now is captured, by te_graph or, on the current stream of ``device`` (None: of the
    current GPU), by other code."""
    return is_capturing() or _C.is_stream_capturing(device)


@dataclass
class _Collection:
    """What a ``graphed()`` capture learns from what it uses: checks, and the function that is told of writes."""

    checks: list[Callable[[], None]]
    on_write: Callable[[Tensor], None]


_collection: ContextVar[_Collection | None] = ContextVar("of the graphed() capture on this thread", default=None)


def before_replay(check: Callable[[], None], writes: Callable[[], Sequence[Tensor]] = tuple) -> None:
    """Called by something that a ``graphed()`` capture uses: run ``check`` before each replay of what is captured.

    What it raises reaches the caller of the graphed function, and nothing is replayed. The capture keeps ``check``
    alive. Outside such a capture this does nothing.

    Args:
        check: takes nothing, raises if a replay would be wrong.
        writes: names the tensors, [...] each, that it is about to write without naming them to the dispatcher. A
            recorder runs what it captures, and puts these back.
    """
    collection = _collection.get()
    if collection is not None:
        collection.checks.append(check)
        for tensor in writes():
            collection.on_write(tensor)


@contextlib.contextmanager
def collecting_checks(on_write: Callable[[Tensor], None]) -> Iterator[list[Callable[[], None]]]:
    """Around the capture of one ``graphed()`` function: the list of what ``before_replay`` was given inside.
    ``on_write`` gets the tensors, [...] each, before they are written."""
    collection = _Collection([], on_write)
    token = _collection.set(collection)
    try:
        yield collection.checks
    finally:
        _collection.reset(token)


# A capture holds what belongs to the process: garbage collection, the default generators, the capture stream.
_captures = threading.RLock()
_TIMEOUT = 600.0  # seconds


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Around a capture: waits for those of other threads.

    Raises:
        RuntimeError: one did not end. It may wait for something that the caller of this one holds.
    """
    if not _captures.acquire(timeout=_TIMEOUT):
        raise RuntimeError(
            f"another thread has been capturing for {_TIMEOUT:.0f} s, and a process makes one capture at a time; "
            "where that one waits for a lock or a result of this thread, capture before the threads start, or let go "
            "of the lock around the capture"
        )
    try:
        yield
    finally:
        _captures.release()


def try_to_be_alone() -> contextlib.AbstractContextManager[None] | None:
    """As ``one_at_a_time``, already entered; None while another thread captures."""
    if not _captures.acquire(blocking=False):
        return None
    stack = contextlib.ExitStack()
    stack.callback(_captures.release)
    return stack


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Around everything that one ``make_graphed_callables``, or ``graphed()``, runs to capture."""
    _C.enter_session()
    try:
        yield
    finally:
        _C.leave_session()
