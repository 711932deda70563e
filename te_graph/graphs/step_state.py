"""What kernels of a step read at run time, because a graph would freeze it as an argument."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from te_graph.common.capture_state import is_captured
from te_graph.common.step_weights import StepWeights

_WORDS = 16


class StepState:
    """A block of flags and counters in device memory; one for each model, or part of one, that is captured.

    Kernels read the flags when they run, so one graph serves the first micro-batch of a step and the others. The host
    writes them, in one small launch, when they change and only then. Two models have a block each and never see each
    other's.

    Args:
        device: where it is; that of the weights if None.
        weights: what is cast when a first micro-batch begins, see ``begin_``.

    Attributes:
        block: [16] int32.
        weights: as given.
        is_first_microbatch: [1] int32, view of the block, like the following.
        skip_weight_cast: 0 at the first micro-batch, else 1: the ``noop`` of a weight cast that is captured.
        update_weight_scale_inv: the flag of ``amax_and_scale_update_inplace``.
        step: number of steps begun, counted by ``advance_``.
        microbatch: number of the micro-batch within its step, from 0; -1 before the first.

    Raises:
        ValueError: neither device nor weights, or weights elsewhere.

    Stream and capture: making one allocates 64 bytes. Writes and reads are ordered by their streams.
    """

    def __init__(self, device: torch.device | str | None = None, *, weights: StepWeights | None = None) -> None:
        if device is None and weights is None:
            raise ValueError("StepState: expected a device or weights, got neither")
        if weights is not None and not isinstance(weights, StepWeights):
            raise TypeError(f"StepState: expected weights to be Fp8Weights, got {type(weights).__name__}")
        own = torch.empty(0, device=weights.device if device is None else device).device
        if weights is not None and weights.device != own:
            raise ValueError(f"StepState: expected weights on {own}, got {weights.device}")
        self.weights = weights
        # As at a first micro-batch; no step has begun.
        self.block = torch.tensor([1, 0, 1, 0, -1] + [0] * (_WORDS - 5), dtype=torch.int32, device=own)
        self._flags = (True, True)
        self._callers: weakref.WeakSet[Any] = weakref.WeakSet()  # that ran since the weights were cast

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which no caller has run with."""
        return {name: value for name, value in self.__dict__.items() if name != "_callers"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _callers=weakref.WeakSet())

    @property
    def is_first_microbatch(self) -> Tensor:
        """[1] int32."""
        return self.block[0:1]

    @property
    def skip_weight_cast(self) -> Tensor:
        """[1] int32."""
        return self.block[1:2]

    @property
    def update_weight_scale_inv(self) -> Tensor:
        """[1] int32."""
        return self.block[2:3]

    @property
    def step(self) -> Tensor:
        """[1] int32."""
        return self.block[3:4]

    @property
    def microbatch(self) -> Tensor:
        """[1] int32."""
        return self.block[4:5]

    def set_(self, is_first_microbatch: bool, update_weight_scale_inv: bool | None = None) -> None:
        """Set the flags for what is launched from now on; ``skip_weight_cast`` is the opposite of the first.

        Args:
            is_first_microbatch: what it says.
            update_weight_scale_inv: the same as ``is_first_microbatch`` if None.

        Raises:
            TypeError: not a bool.
            RuntimeError: a capture is under way, in which every replay would set them again.

        Stream and capture: one small launch on the current stream if something changes, else none.
        """
        follows = is_first_microbatch if update_weight_scale_inv is None else update_weight_scale_inv
        for name, value in (("is_first_microbatch", is_first_microbatch), ("update_weight_scale_inv", follows)):
            if not isinstance(value, bool):
                raise TypeError(f"StepState.set_: expected {name} to be a bool, got {type(value).__name__}")
        if is_captured(self.block.device):
            raise RuntimeError(
                "StepState.set_: expected no capture under way, got one, whose replays would all set the same flags: "
                "call it outside, before the graphed call"
            )
        if (is_first_microbatch, follows) == self._flags:
            return
        torch.ops.te_graph.step_state_set_(self.block, is_first_microbatch, follows)
        self._flags = (is_first_microbatch, follows)

    def advance_(self) -> None:
        """Go to the next micro-batch: ``microbatch`` is 0 at a first one, with ``step`` one more; else one more.

        Stream and capture: one small launch, which may be captured; reads the flag on the device.
        """
        torch.ops.te_graph.step_state_advance_(self.block)

    def begin_(self, caller: Any, is_first_microbatch: bool | None = None) -> bool:
        """Make ready for a micro-batch of ``caller``, as graphed callables do before they replay.

        It is the first one of a step if the caller says so, or, where it does not say, if the weights have changed or
        it has not run since they were cast. Weights that have changed are cast then, and so they are when a caller
        that has run since the last cast says that it is at its first micro-batch again. Others of the same step find
        them cast.

        Args:
            caller: the graphed callable that runs. Not kept alive.
            is_first_microbatch: True, False, or None to go by the weights' version counters.

        Returns:
            True if the caller had not run since the weights were cast.

        Raises:
            ValueError: False, though weights have changed or were never cast. Names one.
            TypeError: something else than these, or a caller that cannot be referred to weakly, such as a number.
            RuntimeError: a capture is under way; FP8 buffers were moved.

        Stream and capture: launches nothing but the cast of the weights and the change of flags, where due.
        """
        if is_first_microbatch is not None and not isinstance(is_first_microbatch, bool):
            raise TypeError(
                f"is_first_microbatch: expected True, False or None, got {type(is_first_microbatch).__name__}"
            )
        if is_captured(self.block.device):
            raise RuntimeError(
                "StepState.begin_: expected no capture under way, got one: call it outside, before the graphed call"
            )
        has_run, weights = self._has_run(caller), self.weights
        is_stale = weights is not None and weights.is_stale
        if is_stale and is_first_microbatch is False:
            try:
                weights.check()
            except RuntimeError as error:
                raise ValueError(f"is_first_microbatch=False contradicts the weights: {error}") from None
        is_first = not has_run or is_stale if is_first_microbatch is None else is_first_microbatch
        begins_step = is_stale or (is_first and has_run)
        if weights is not None:
            if begins_step:
                weights.cast_()
            else:
                weights.check_places()
        self.set_(is_first)
        if begins_step:
            self._callers.clear()
        is_new = begins_step or not has_run
        self._callers.add(caller)
        return is_new

    def forget_(self, caller: Any) -> None:
        """Take back that ``caller`` has run: its micro-batch failed before it did anything.

        Args:
            caller: as for ``begin_``.

        Raises:
            TypeError: as for ``begin_``.
        """
        if self._has_run(caller):
            self._callers.discard(caller)

    def _has_run(self, caller: Any) -> bool:
        """Whether ``caller`` has run since the weights were cast."""
        if caller in self._callers:
            return True
        try:
            hash(weakref.ref(caller))
        except TypeError:
            raise TypeError(
                "StepState: expected caller to be the graphed callable that runs, or something else with a hash and "
                f"weak references, got {caller!r:.100}"
            ) from None
        return False


def check_step_state(step_state: Any, function: str) -> None:
    """Refuse, in the name of ``function``, what was given as ``step_state`` and is none.

    Raises:
        TypeError: neither a ``StepState`` nor None.
    """
    if step_state is not None and not isinstance(step_state, StepState):
        raise TypeError(f"{function}: expected step_state to be a StepState, got {type(step_state).__name__}")
