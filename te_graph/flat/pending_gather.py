"""Buckets of parameters that are being gathered, and what waits for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from te_graph import _C
from te_graph.common.capture_state import is_recording
from te_graph.common.opaque import opaque
from te_graph.common.own_objects import OwnObject
from te_graph.common.replay_checks import before_replay, is_collecting


class PendingGather(OwnObject):
    """Gathers of buckets that run one after the other on a side stream, and how many of them have been waited for.

    Hooks of modules keep it, also when the FlatParameters is gone; so it keeps no parameters.

    Attributes:
        is_overlapped: there may be something to wait for.
    """

    def __init__(self, device: torch.device, count: int, is_overlapped: bool) -> None:
        """``count``: buckets."""
        self._device, self._count, self.is_overlapped = device, count, is_overlapped
        self._events = [torch.cuda.Event() for _ in range(count)] if is_overlapped else []
        self._stream: Any = None  # of the last step
        self._waited_count = count  # buckets that this stream has waited for

    def begin(self) -> None:
        """All buckets are about to be gathered, behind what is on the current stream."""
        self._stream, self._waited_count = self._current_stream(), 0

    def launch(self, number: int, gather: Callable[[], None]) -> None:
        """Call ``gather``, which launches that of bucket ``number`` on the current stream."""
        gather()
        self._events[number].record()

    def wait(self, count: int | None = None) -> None:
        """Let what comes on the current stream wait for the first ``count`` buckets, or all; in a capture of
        ``graphed``, before each replay.

        Raises:
            RuntimeError: other code captures, whose replays would not wait.
        """
        if not self.is_overlapped:
            return
        count = self._count if count is None else count
        if is_collecting():
            before_replay(functools.partial(self.wait, count))
        if self._is_recorded():  # which begins by waiting for the device
            self._expect_collecting()
            return
        current = self._current_stream()
        if self._stream is None or count == 0 or (current == self._stream and count <= self._waited_count):
            return
        self._wait_for(current, count - 1)  # and so for those before it
        if current == self._stream:
            self._waited_count = count

    def wait_in_call(self, count: int) -> None:
        """As ``wait``, when a module is called, which may be what is captured.

        Raises:
            RuntimeError: it is, and replays would not wait.
        """
        if self._is_recorded():
            self._expect_collecting()
        self.wait(count)

    def _is_recorded(self) -> bool:
        """Whether what is called now is for replays alone."""
        return is_recording() or _C.is_stream_capturing(self._device)

    def _expect_collecting(self) -> None:
        """Raise RuntimeError unless replays of what is being captured can be told to wait."""
        if not is_collecting():
            raise RuntimeError(
                "FlatParameters: a module in overlap_param_gather waits for its parameters when it is called, which "
                "replays of what is being captured would not do: list the modules that are graphed, not what is in "
                "them, or capture by te_graph.graphed"
            )

    def _current_stream(self) -> Any:
        return torch.cuda.current_stream(self._device) if self.is_overlapped else None

    def _wait_for(self, stream: Any, number: int) -> None:
        stream.wait_event(self._events[number])


class WaitForParameters:
    """Called before parameters are used, with whatever: by a module, or by what saves or loads it."""

    def __init__(self, pending: PendingGather | None, count: int) -> None:
        self._pending, self._count = pending, count

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self._pending is not None:
            self._pending.wait_in_call(self._count)

    def __reduce__(self) -> Any:
        """Copies of the module have parameters that are not gathered."""
        return WaitForParameters, (None, 0)
