"""How many calls of FP8 layers a capture holds, which its report tells."""

from __future__ import annotations

import threading


class _Calls(threading.local):
    """Of this thread, so far."""

    captured = 0


_calls = _Calls()


def note_captured_fp8_call() -> None:
    """Called where an FP8 layer is called inside a capture, or a warm-up for one."""
    _calls.captured += 1


class CapturedFp8Calls:
    """Of this thread, while it is entered.

    Attributes:
        count: how many there were.
    """

    count = 0

    def __enter__(self) -> CapturedFp8Calls:
        self._before = _calls.captured
        return self

    def __exit__(self, *failure: object) -> None:
        self.count = _calls.captured - self._before
