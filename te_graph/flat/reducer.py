"""What flat gradients go through in backwards, and before anyone reads them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from torch import Tensor

from te_graph import _C
from te_graph.common.capture_state import is_captured
from te_graph.common.own_objects import OwnObject
from te_graph.common.weak_method import weak_method
from te_graph.flat.bucket_reductions import BucketReductions
from te_graph.flat.checks import check_places
from te_graph.flat.deferred_sync import DeferredSync
from te_graph.flat.flat_buffer import FlatBuffer
from te_graph.flat.frozen_parameters import FrozenParameters
from te_graph.flat.parameter_gather import ParameterGather
from te_graph.flat.reduction import Reduction
from te_graph.flat.side_stream import SideStream


class Reducer(DeferredSync, OwnObject):
    """Reduces the gradients in ``buffers`` at the end of backwards outside of ``no_sync``, and buckets that are ready
    before it where that ``overlaps``.

    Attributes:
        lock: held while gradients are reduced, clipped or looked at as a whole.
        backwards: what is told by each gradient that is about to be written.
        is_closed: parameters are no longer flat.
    """

    def __init__(
        self,
        buffers: Sequence[FlatBuffer],
        frozen: FrozenParameters,
        reduction: Reduction,
        gather: ParameterGather,
        side: SideStream,
        overlaps: bool,
    ) -> None:
        self._buffers, self._frozen, self._gather = buffers, frozen, gather
        self._device = buffers[0].data.device
        self._reductions = BucketReductions(buffers, reduction, side)
        self._reduces_early = overlaps and reduction.is_distributed
        self.is_closed = False
        self.lock = threading.RLock()
        self.backwards = _C.Backwards(
            begin=weak_method(self, "_before_backward"),
            ready=weak_method(self, "_reduce_ready"),
            end=weak_method(self, "_after_backward"),
            fail=weak_method(self, "_after_failure"),
            bucket_sizes=self._reductions.bucket_sizes,
        )

    def reduce(self) -> None:
        """Reduce what has come since the last reduction; may be captured."""
        self._gather.wait()
        self.finish_failed_backward()
        with self.lock:
            self.check_places()
            if is_captured(self._device):
                self._reductions.run_captured()
            else:
                self._reductions.prepare()
                self._reductions.run_as_in_backward(0)

    def check_gradients(self, op: str, are_zeros: bool = False) -> None:
        """Called before ``op`` reads gradients: finishes what a backward has left.

        Args:
            are_zeros: those that are there are zeros which all ranks have set by themselves.

        Raises:
            RuntimeError: a parameter has moved, or was frozen; as of ``expect_reduced``.
        """
        self._gather.wait()
        self.finish_failed_backward()
        self.check_places()
        if not are_zeros:
            self.expect_reduced(op)

    def expect_reduced(self, op: str) -> None:
        """Called before ``op`` reads gradients; where that is captured, this runs before each replay.

        Raises:
            RuntimeError: more have come beside those that have been reduced, sharded or with a ``gradient_scale``; or,
                sharded, some are those of this rank alone.
        """
        self._reductions.expect_reduced(op)

    def note_zeros(self, parameters: Iterable[Tensor]) -> None:
        """Called when gradients of ``parameters`` [...] are set to zero, which all ranks do: what had been reduced is
        not added to the next ones, and zeros need no reduction."""
        self._reductions.note_zeros(parameters)

    def finish_failed_backward(self) -> None:
        """Reduce what other ranks may have reduced in a backward that has failed since; it has to fail on all. A
        backward that another thread runs meanwhile is awaited, so ``lock`` is not held here."""
        self.backwards.finish_failed()

    def check_places(self) -> None:
        """Raise RuntimeError if a parameter is no longer where the buffers have it, or no longer frozen, naming it, or
        if this is closed."""
        if self.is_closed:
            raise RuntimeError(
                "FlatParameters: close() has been called: parameters are no longer flat, and optimizers of it step "
                "no more; make new ones"
            )
        check_places(self._buffers)
        self._frozen.check()

    def close(self) -> None:
        """Parameters will be flat no more."""
        self._reductions.add_back_()
        self.is_closed = True

    def _before_backward(self) -> bool:
        """Called before the first gradient of a backward is written. Returns whether buckets may be reduced in it."""
        with self.lock:
            if is_captured(self._device):
                raise RuntimeError(
                    "FlatParameters: a backward inside a graphed function cannot be captured, for a replay would not "
                    "know which gradients are there: graph the layers, and the function that clips and steps"
                )
            self.check_places()
            self._gather.wait()  # for what modules use that were not called: no two collectives at once
            self._reductions.note_backward()
            return self._syncs and self._reduces_early

    def _reduce_ready(self, number: int) -> None:
        """Called within a backward: all gradients of bucket ``number`` have been written, on the current stream."""
        with self.lock:
            self._reductions.run_one(number)

    def _after_backward(self, first: int) -> None:
        """Called when all gradients of a backward have been written; buckets before ``first`` have been reduced."""
        with self.lock:
            for buffer in self._buffers:
                buffer.settle_()
            if self._syncs or first > 0:
                self._reductions.run(first)
            self._reductions.note_end()

    def _after_failure(self, first: int) -> None:
        """Called before anything else is done with gradients: the last backward has failed, whose buckets were reduced
        while it went on, those before ``first`` here. Ranks may have come to others, so all reduce the rest."""
        with self.lock:
            are_dropped = all(len(one.all_gradients.missing()) == len(one.parameters) for one in self._buffers)
            self._reductions.run_as_in_backward(first, adopts=not are_dropped)
