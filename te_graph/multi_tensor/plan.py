"""A list of tensors prepared once for the multi-tensor ops."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.as_written import AsWrittenMode
from te_graph.common.capture_state import is_captured, is_capturing, is_recording
from te_graph.common.dispatch import bypass_modes, dispatch_modes
from te_graph.common.replay_checks import before_replay
from te_graph.common.uncopyable import Uncopyable
from te_graph.multi_tensor.tensor_lists import as_number, as_sequence, check_operands

_NAME = "MultiTensorPlan"


class MultiTensorPlan(Uncopyable):
    """Multi-tensor ops over a list whose table lies on the device.

    A call passes a few pointers instead of the list, and takes as long for 20000 tensors as for one but for a look at
    each of them. A captured call works on the tensors that the table names when it is replayed: ``update`` exchanges
    them between replays, without a new capture.

    The plan does not own its tensors. Before each op it looks whether they still exist where they were, and so do
    replays of ``graphed`` functions; ``make_graphed_callables``, whose replays do not, refuses it. Copying or pickling
    it is a TypeError.

    Args:
        tensors: [...] each, on one device, without gaps in memory and without overlap; float32, float64, float16 and
            bfloat16 mixed. What norm, clip, scale and zero work on, and what accumulate and copy write.
        sources: for accumulate and copy: one for each tensor, laid out like it.

    Raises:
        ValueError: an empty list, tensors on several devices, with gaps, overlapping, or with the negative bit; sources
            that do not fit or overlap tensors. From the methods: a number or flag that lies in one of the lists;
            ``zero_source`` with sources that overlap.
        RuntimeError: made in a capture.
        TypeError: dtypes other than the above; tensors that wrap others, such as DTensors.
        NotImplementedError, from methods that write: a tensor that is a result that requires a gradient, in grad mode,
            as nothing is recorded. From all: a tensor or source with a tangent.

    Stream and capture: making a plan allocates on the device and waits for the copy of the table, so it comes before a
    capture. The ops neither allocate (norms: the result) nor wait. Plans and their ops belong on one stream at a time:
    the partial of a norm lies in the plan.
    """

    def __init__(self, tensors: Iterable[Tensor], sources: Iterable[Tensor] = ()) -> None:
        if is_recording() or _C.is_stream_capturing(None):
            raise RuntimeError(
                f"{_NAME}: expected to be made before a capture, whose replays would not make it anew: make it outside "
                "and use it inside"
            )
        # What watches the first call of something that is captured later is to see the tables, not how they are made.
        with bypass_modes() if is_capturing() else contextlib.nullcontext():
            self._plan = _C.Plan(as_sequence(_NAME, "tensors", tensors), as_sequence(_NAME, "sources", sources))
        # Where a capture that uses the plan finds what it reads.
        self._device_memory = (self._plan.table, self._plan.chunks, self._plan.partial)
        for memory in self._device_memory if is_capturing() else ():
            torch.ops.aten.lift_fresh(memory)  # as what is built from Python data

    def __len__(self) -> int:
        return len(self._plan)

    def check(self) -> None:
        """Raise RuntimeError if a tensor no longer exists, moved, or changed its size, strides or dtype; it names the
        first one."""
        self._plan.check(False, False)

    def update(self, tensors: Iterable[Tensor], sources: Iterable[Tensor] = ()) -> None:
        """Take other tensors and sources.

        Launches and replays that are on the current stream already work on the old ones, later ones on the new ones.

        Args:
            tensors, sources: [...] each, as for the constructor, of the same number, sizes and dtypes as those before.

        Raises:
            ValueError: a size, dtype or number differs, or as for the constructor.
            RuntimeError: called during a capture, whose replays would set the table back.

        Stream and capture: one small launch for each 128 tensors that changed; nothing is waited for. Not inside a
            capture.
        """
        if is_captured(self._plan.table.device):
            raise RuntimeError(f"{_NAME}: expected update() outside of captures, between replays")
        self._plan.update(as_sequence(_NAME, "tensors", tensors), as_sequence(_NAME, "sources", sources))

    def norm(self, p: float = 2.0) -> Tensor:
        """Norm of all tensors together, as ``te_graph.get_total_norm``.

        Args:
            p: of the norm; 0, positive or ``inf``.

        Returns:
            [] float32, float64 with float64 tensors. New memory.

        Raises:
            ValueError, TypeError: an argument is wrong, or lies in one of the lists.
            RuntimeError: a tensor of the plan no longer exists where it was.

        Stream and capture: one launch on the current stream; allocates the result, which a replay overwrites; no host
            sync.
        """
        self._before_replay()
        return self._plan.norm(as_number(_NAME, "p", p))

    def clip_(self, total_norm: Tensor, max_norm: float, *, found_inf: Tensor | None = None) -> None:
        """Scale all tensors by ``min(1, max_norm / (total_norm + 1e-6))``; see ``te_graph.clip_grads_with_norm_``.

        Args:
            total_norm: [] or [1], float32 or float64 on the plan's device.
            max_norm: 0 or positive.
            found_inf: [] or [1] float32; as for ``te_graph.clip_grad_norm_``. Mutated.

        Raises:
            ValueError, TypeError: an argument is wrong, or lies in one of the lists.
            RuntimeError: a tensor of the plan no longer exists where it was.
            NotImplementedError: as for the class.

        Stream and capture: one launch on the current stream, no allocation, no host sync.
        """
        check_operands(_NAME, total_norm=total_norm, found_inf=found_inf)
        self._before_replay(writes_tensors=True)
        self._plan.clip_(total_norm, as_number(_NAME, "max_norm", max_norm), found_inf=found_inf)

    def clip_norm_(self, max_norm: float, p: float = 2.0, *, found_inf: Tensor | None = None) -> Tensor:
        """``norm`` and ``clip_`` with one look at the tensors, which are mutated.

        Args:
            max_norm: 0 or positive.
            p: of the norm; 0, positive or ``inf``.
            found_inf: [] or [1] float32; as for ``te_graph.clip_grad_norm_``. Mutated.

        Returns:
            The norm before clipping, [], as of ``norm``. New memory.

        Raises:
            ValueError, TypeError: an argument is wrong, or lies in one of the lists.
            RuntimeError: a tensor of the plan no longer exists where it was.
            NotImplementedError: as for the class.

        Stream and capture: two launches on the current stream; allocates the result, which a replay overwrites; no host
            sync.
        """
        check_operands(_NAME, found_inf=found_inf)
        self._before_replay(writes_tensors=True)
        return self._plan.clip_norm_(as_number(_NAME, "max_norm", max_norm), as_number(_NAME, "p", p), found_inf)

    def scale_(self, scale: Tensor, *, found_inf: Tensor | None = None) -> None:
        """Multiply all tensors by one factor: ``x *= scale``, rounded once. Mutated: the tensors.

        Args:
            scale: [] or [1], float32 or float64 on the plan's device.
            found_inf: [] or [1] float32, set to 1 if a result is not finite. Mutated.

        Raises:
            ValueError, TypeError: an argument is wrong, or lies in one of the lists.
            RuntimeError: a tensor of the plan no longer exists where it was.
            NotImplementedError: as for the class.

        Stream and capture: one launch on the current stream, no allocation, no host sync.
        """
        check_operands(_NAME, scale=scale, found_inf=found_inf)
        self._before_replay(writes_tensors=True)
        self._plan.scale_(scale, found_inf)

    def zero_(self) -> None:
        """Set all tensors to zero.

        Raises:
            RuntimeError, NotImplementedError: as for ``scale_``.

        Stream and capture: one launch on the current stream, no allocation, no host sync.
        """
        self._before_replay(writes_tensors=True)
        self._plan.zero_()

    def copy_(self, *, scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Write the sources into the tensors, of any dtypes: ``x = source * scale``. Mutated: the tensors.

        Args:
            scale: [] or [1], float32 or float64; 1 if None.
            found_inf: [] or [1] float32, set to 1 if a result is not finite. Mutated.

        Raises:
            ValueError, TypeError: an argument is wrong, or lies in one of the lists.
            RuntimeError: a tensor of the plan no longer exists where it was.
            NotImplementedError: as for the class.

        Stream and capture: one launch on the current stream, no allocation, no host sync.
        """
        check_operands(_NAME, scale=scale, found_inf=found_inf)
        self._before_replay(writes_tensors=True)
        self._plan.accumulate_(True, False, scale, None, found_inf, None)

    def accumulate_(
        self,
        *,
        store: bool = False,
        zero_source: bool = False,
        scale: Tensor | None = None,
        sum_squares: Tensor | None = None,
        found_inf: Tensor | None = None,
        noop: Tensor | None = None,
    ) -> None:
        """Add the sources into the tensors: ``x += source * scale``. Mutated: the tensors.

        Args:
            store: overwrite the tensors instead.
            zero_source: zero the sources. Mutates them.
            scale: [] or [1], float32 or float64; 1 if None.
            sum_squares: [72] int64; as for ``te_graph.update_hp_grads``. Mutated.
            found_inf: [] or [1] float32, set to 1 if a result is not finite. Mutated.
            noop: [] or [1] float32: where it is not 0, nothing is written.

        Raises:
            ValueError, TypeError: an argument is wrong, or lies in one of the lists.
            RuntimeError: a tensor of the plan no longer exists where it was.
            NotImplementedError: as for the class.

        Stream and capture: one launch on the current stream, no allocation, no host sync.
        """
        check_operands(_NAME, scale=scale, sum_squares=sum_squares, found_inf=found_inf, noop=noop)
        self._before_replay(writes_tensors=True, writes_sources=zero_source)
        self._plan.accumulate_(store, zero_source, scale, sum_squares, found_inf, noop)

    def _before_replay(self, writes_tensors: bool = False, writes_sources: bool = False) -> None:
        """Tell captures what an op uses: the table names it, not the op."""
        for mode in dispatch_modes():
            if isinstance(mode, AsWrittenMode):
                mode.note_plan(self._plan.tensors(writes_tensors, writes_sources))
        before_replay(functools.partial(self._plan.check, writes_tensors, writes_sources))
