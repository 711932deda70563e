"""What the objects that a ``graphed()`` capture uses want checked before each replay of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor


@dataclass
class _Collection:
    """What a ``graphed()`` capture gets from what it uses: checks, and a function to call before writes."""

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


def is_collecting() -> bool:
    """True, on this thread, inside the capture of a ``graphed()`` function."""
    return _collection.get() is not None
