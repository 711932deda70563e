"""How many calls of FP8 layers a capture holds, which its report tells, and regions in which there need be none."""

from __future__ import annotations

import threading


class _Calls(threading.local):
    """Of this thread, so far."""

    captured = 0
    are_excused = False


_calls = _Calls()


def note_captured_fp8_call() -> None:
    """Called where an FP8 layer is called inside a capture, or a warm-up for one."""
    _calls.captured += 1


def excuse_region() -> None:
    """Called where a region of FP8 may well end without a product in FP8: what is captured in it may be captured later,
    or not at all, and tensors without memory have no product."""
    _calls.are_excused = True


def take_excuse() -> bool:
    """Whether this thread has been excused since it was asked last."""
    was_excused, _calls.are_excused = _calls.are_excused, False
    return was_excused


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
