"""What others ask of calls of FP8 layers: how many a capture holds, in which region they are, in which there need be
none, and whether a checkpoint makes them again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from te_graph import _C
from te_graph.common.dispatch import is_in_backward

REPEATS = "called where a checkpoint computes FP8 layers again"  # why a call is not captured


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


_repeats: list[Callable[[], bool]] = []


def tell_repeats_by(test: Callable[[], bool]) -> None:
    """Let ``repeats_fp8_calls`` go by ``test``."""
    _repeats.append(test)


def repeats_fp8_calls() -> bool:
    """Whether a checkpoint in which FP8 layers were called is computed again: their scales are those of then, and no
    region is entered, so that a capture made now would be of something else."""
    return is_in_backward() and any(test() for test in _repeats)


_regions: list[Callable[[], Any]] = []


def tell_region_by(current: Callable[[], Any]) -> None:
    """Let ``Fp8RegionState`` go by ``current``: the region that this thread is in, with its ``again()``, or None."""
    _regions.append(current)


@dataclass(frozen=True)
class Fp8RegionState:
    """The region of FP8 at a call, so that the capture runs in the same.

    Attributes:
        number: of all equal regions; 0 where the call is in none.
        region: one of these, or None.
    """

    number: int
    region: Any = field(compare=False)

    @classmethod
    def now(cls) -> Fp8RegionState:
        """That of this thread."""
        return cls(_C.fp8_region(), next((region for current in _regions if (region := current()) is not None), None))

    def again(self) -> contextlib.AbstractContextManager[None]:
        """What runs inside is in that region."""
        return contextlib.nullcontext() if self.region is None else self.region.again()


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
