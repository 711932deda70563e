"""Which buckets of flat gradients are reduced when, and that nothing is reduced twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.capture_state import is_captured
from te_graph.common.replay_checks import before_replay
from te_graph.common.weak_method import weak_method
from te_graph.flat.carried_gradients import CarriedGradients
from te_graph.flat.flat_buffer import FlatBuffer, gradient_of
from te_graph.flat.reduction import Reduction
from te_graph.flat.side_stream import SideStream


class BucketReductions:
    """Those of all buckets, in one order.

    Attributes:
        bucket_sizes: gradients in each bucket.
    """

    def __init__(self, buffers: Sequence[FlatBuffer], reduction: Reduction, side: SideStream) -> None:
        self._buffers, self._reduction, self._side = buffers, reduction, side
        self._device = buffers[0].data.device
        self._carried = CarriedGradients(buffers)
        self._buckets = [(buffer, place) for buffer in buffers for place in range(len(buffer.layout.buckets))]
        self.bucket_sizes = [len(buffer.layout.buckets[place].members) for buffer, place in self._buckets]

    def note_backward(self) -> None:
        """Called when a backward begins."""
        self.prepare()
        self._carried.note_begin()

    def note_end(self) -> None:
        """Called when a backward has come through."""
        self._carried.note_end()

    def prepare(self) -> None:
        """Called before more is added to what has been reduced, or it would be reduced again."""
        self._note_own_zeros()
        self._carried.forget_dropped()
        reduced = self._take_reduced()
        if not self._reduction.is_idempotent:
            self._carried.put_aside(reduced)

    @torch.no_grad()
    def run_one(self, number: int) -> None:
        """Reduce bucket ``number``, whose gradients have been written on the current stream, beside what follows."""
        with self._side.behind_current():
            self._run_bucket(number)

    @torch.no_grad()
    def run(self, first: int, adopts: bool = True) -> None:
        """Reduce the buckets from ``first`` on; those before have been, by ``run_one``.

        Args:
            adopts: gradients that are missing here, and may not be on other ranks, are there afterwards.
        """
        self._carried.forget_dropped()
        with self._side.behind_current() if first > 0 else contextlib.nullcontext():
            for number in range(first, len(self._buckets)):
                self._run_bucket(number, adopts)
        if first > 0:
            self._side.join()
        for buffer in self._buffers:
            buffer.all_gradients.note_reduced()
        self._carried.note_reduced()

    def run_as_in_backward(self, first: int, adopts: bool = True) -> None:
        """As ``run``, outside of a backward, where other ranks may be inside of one."""
        _C.set_in_backward(True)
        try:
            self.run(first, adopts)
        finally:
            _C.set_in_backward(None)

    def run_captured(self) -> None:
        """As ``run``, of all, in a capture: replays raise where something has been reduced before."""
        self._expect_none_before()
        before_replay(weak_method(self, "_expect_none_before"))
        self.run(0)
        self._take_reduced()  # nothing has been before the replay

    def expect_reduced(self, op: str) -> None:
        """Raise RuntimeError, in the name of ``op``, if more has come beside what has been reduced, or sharded ones
        are those of this rank alone, whoever set them; where that is captured, before each replay."""
        if self._reduction.is_idempotent:
            return
        expected = f"{op}: expected gradients of flat parameters that have been reduced"
        self._note_own_zeros()
        self._carried.expect_none(
            f"{expected}, but more have come since the last reduction: run the last backward outside of no_sync(), or "
            "call reduce_gradients(), or zero_grad()"
        )
        if self._reduction.is_sharded:
            self._expect_no_unreduced(expected)
        check = weak_method(self, "expect_reduced")
        before_replay(lambda: check(op))

    def note_zeros(self, parameters: Iterable[Tensor]) -> None:
        """Called when gradients of ``parameters`` [...] are set to zero; where that is captured, before each replay.
        What had been reduced is not added to them, and zeros, which ranks have alike, count as reduced."""
        parameters = list(parameters)
        self._carried.forget(parameters)
        for parameter in parameters:
            gradient_of(parameter).note_zero()
        note = weak_method(self, "note_zeros")
        before_replay(lambda: note(parameters))

    def add_back_(self) -> None:
        """Called when nothing is reduced any more: gradients are what has been, and what has come since."""
        self._note_own_zeros()
        self._carried.add_back_()

    def _note_own_zeros(self) -> None:
        """Called outside of backwards: what the user has set to zero by himself is zero, too."""
        if not is_captured(self._device) and (zeros := self._carried.forget_overwritten()):
            self.note_zeros(zeros)

    def _expect_no_unreduced(self, expected: str) -> None:
        names = [buffer.names[number] for buffer in self._buffers for number in buffer.all_gradients.unreduced()]
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RuntimeError(
                f"{expected}, got that of {names[0]}{others}, which has come, or was set, on this rank alone: run the "
                "last backward outside of no_sync(), or call flat.reduce_gradients(), or zero_grad()"
            )

    def _take_reduced(self) -> dict[FlatBuffer, list[int]]:
        """By their numbers, what has been reduced since this was asked last."""
        return {buffer: buffer.all_gradients.take_reduced() for buffer in self._buffers}

    def _expect_none_before(self) -> None:
        self.prepare()
        self._carried.expect_none(
            "FlatParameters.reduce_gradients: expected no gradients from before the last reduction in a function that "
            "is captured: call zero_grad() after each, or reduce outside of it"
        )

    def _run_bucket(self, number: int, adopts: bool = True) -> None:
        buffer, place = self._buckets[number]
        self._reduction.run_(buffer, place, self._carried.of(buffer, buffer.layout.buckets[place]), adopts)
