"""A stream beside the one of the caller, for collectives that run while something else does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class SideStream:
    """One of ``device``, made when it is used first; on a CPU everything runs at once instead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def behind_current(self) -> Iterator[None]:
        """What is launched inside goes there, behind what is on the current stream by now."""
        if self._device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Let what comes on the current stream wait for all that has been launched there."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
