"""Gathers of parameters that come as late as they may, so that whatever does not wait for them finds old values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar
from unittest import mock

import torch

from te_graph.flat import parameter_gather
from te_graph.flat.pending_gather import PendingGather
from te_graph.flat.reduction import Reduction

LATE_CYCLES = 20_000_000  # ten milliseconds


class LatePending(PendingGather):
    """On a CPU, where collectives end before they return: each runs when it is waited for, with those before it.

    All ranks have to wait in the same order.
    """

    streams: ClassVar[list[Any]] = ["main"]  # the current one last

    def __init__(self, device: torch.device, count: int, is_overlapped: bool) -> None:
        super().__init__(device, count, is_overlapped)
        self.is_overlapped, self._launched = True, {}

    def launch(self, number: int, gather: Callable[[], None]) -> None:
        self._launched[number] = gather

    def _current_stream(self) -> Any:
        return self.streams[-1]

    def _wait_for(self, stream: Any, number: int) -> None:
        for launched in sorted(one for one in self._launched if one <= number):
            self._launched.pop(launched)()


@contextlib.contextmanager
def late_gathers(device: str) -> Iterator[None]:
    """Those of FlatParameters that are made inside."""
    if device == "cpu":
        with mock.patch.object(parameter_gather, "PendingGather", LatePending):
            yield
        return
    gather = Reduction.gather_

    def late(self: Reduction, *args: Any) -> None:
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda._sleep(LATE_CYCLES)
        gather(self, *args)

    with mock.patch.object(Reduction, "gather_", late):
        yield
