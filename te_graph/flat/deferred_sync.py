"""Backwards of which only the last one of a step has consequences beyond its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class DeferredSync:
    """What acts on gradients once a step, at the end of its last backward."""

    _syncs = True  # whether a backward is one of these

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around the backwards of all micro-batches but the last one, which add to the gradients and no more: nothing
        is reduced, or handed over, before the next backward outside of it.

        What counts is where ``backward()`` is called, not the forward.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before
