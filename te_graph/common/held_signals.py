"""Handlers of signals wait for the end of a capture: Python would run them in the middle of captured code."""

from __future__ import annotations

import _thread
import contextlib
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

from te_graph import _C

_PATIENCE = 60.0  # seconds that a handler waits: it may be there to end what hangs


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Around a capture, or a function that captures: Python's handlers of what arrives meanwhile run at the end, once
    for each signal.

    ``KeyboardInterrupt`` comes at once, and no handler waits for more than a minute. On other threads than the main
    one nothing is held: Python runs no handlers there.
    """
    if threading.get_ident() != threading.main_thread().ident:
        yield
        return
    with _HeldSignals():
        yield


class _HeldSignals:
    """Context, and what stands for all handlers meanwhile."""

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, types.FrameType | None], Any]] = {}
        self._due: dict[int, float] = {}  # signals that have arrived, in this order: when they cannot wait any longer
        self._is_over = False

    def __enter__(self) -> None:
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._let_go)
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler) and handler is not signal.default_int_handler:
                    self._handlers[number] = handler
                    _C.exchange_signal_handler(number, self)
            on_failure.pop_all()

    def __exit__(self, *failure: object) -> None:
        self._let_go()

    def __call__(self, number: int, frame: types.FrameType | None) -> None:
        now = time.monotonic()
        if not self._is_over and number not in self._due:
            self._due[number] = now + _PATIENCE
            _thread.start_new_thread(self._remind, (number, self._due[number]))  # takes no lock that code may have
        elif self._is_over or now >= self._due[number]:  # code may have kept this as the handler that was there
            self._due.pop(number, None)
            self._handlers[number](number, frame)

    def _remind(self, number: int, due: float) -> None:
        """On a thread of its own: send the signal again, which wakes the main thread where that waits for something."""
        time.sleep(_PATIENCE)
        if self._due.get(number) == due:
            signal.pthread_kill(threading.main_thread().ident, number)

    def _let_go(self) -> None:
        self._is_over = True
        arrived, self._due = self._due, {}
        with contextlib.ExitStack() as calls:
            for number in reversed(arrived):
                calls.callback(self._handlers[number], number, sys._getframe())
            for number, handler in self._handlers.items():
                if signal.getsignal(number) is self:
                    _C.exchange_signal_handler(number, handler)
