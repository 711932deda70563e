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


def captured_fp8_calls() -> int:
    """The calls of this thread so far: those of a capture are the difference that it makes."""
    return _calls.captured
