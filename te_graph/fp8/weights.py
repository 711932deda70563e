"""The FP8 copies of a model's weights, cast in one launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.capture_state import is_captured
from te_graph.common.gradient_state import wait_for_parameters
from te_graph.common.replay_checks import before_replay
from te_graph.common.step_weights import StepWeights
from te_graph.common.uncopyable import Uncopyable
from te_graph.fp8.optimizer_step_watch import optimizer_step_watch
from te_graph.multi_tensor.tensor_lists import as_sequence, check_members, check_operands


class Fp8Weights(Uncopyable, StepWeights):
    """Weights in FP8, with transposed copies, in buffers that never move.

    ``cast_`` casts all of them in one launch over a table that was built once. Outside a graph it is called when the
    weights have changed, once in an optimizer step; a captured one is skipped by a flag on the device.

    Whether weights have changed is known from their version counters, and from those of what ``.data`` gave of them.
    While this object is there, each step of a ``torch.optim.Optimizer``, fused ones too, moves on those of all weights
    that share the storage of a parameter with a gradient; of any parameter, where a closure or a hook before the step
    may make gradients. Not seen, so call ``cast_`` after it: a collective of ``torch.distributed`` into a weight; a
    write by NumPy, or by a fused function of an optimizer that is called without one (``torch.optim.adamw.adamw``); a
    CUDA graph of yours that replays an optimizer. Where a module gets another parameter
    (``load_state_dict(assign=True)``, ``m.weight = nn.Parameter(...)``), this object goes on with the old one and takes
    it for current, so call ``update``.

    ``scale_inv`` is written by the cast alone, so ``data[i] * scale_inv[i]`` is always what the weight was when it was
    cast, whatever has become of ``scale`` since.

    Copying or pickling it, with a module that holds it, is a TypeError.

    Args:
        weights: [M_i, N_i] each, contiguous, on one device; float32, float16 and bfloat16 mixed. Kept alive.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        transpose: make transposed copies, too.
        scale: [n] float32, of any stride, such as ``scales[1::3]``; ones if None. Read at each cast.
        amax: [n] float32, of any stride, such as ``amax_history[0, 1::3]``; zeros if None. Each cast maxes into it.
        counts: count elements that saturate, underflow or are not finite.
        names: what messages call the weights; "weight 0" and so on if None.

    Attributes:
        data: [M_i, N_i] each, of ``dtype``.
        transposed: [N_i, M_i] each; empty without ``transpose``.
        scale, amax: [n] float32.
        scale_inv: [n] float32, of stride 4, so that ``scale_inv[i : i + 1]`` lies where ``torch._scaled_mm`` wants it,
            at a multiple of 16 bytes.
        counts: [n, 3] int64, or None.

    Raises:
        TypeError, ValueError: no weights, or such as are no matrices, on several devices, of other dtypes, or that wrap
            others (of DTensors give ``to_local()``), or were made in inference mode, whose changes cannot be seen;
            vectors that overlap; an ``amax`` that requires a gradient.

    Stream and capture: making it allocates and waits for the copy of the table, so it comes before a capture.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        *,
        dtype: torch.dtype = torch.float8_e4m3fn,
        transpose: bool = True,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
        counts: bool = False,
        names: Sequence[str] | None = None,
    ) -> None:
        listed = _listed(weights)
        if not listed:
            raise ValueError("Fp8Weights: expected at least one weight, got an empty list")
        check_operands("Fp8Weights", scale=scale, amax=amax)
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"Fp8Weights: expected dtype to be a torch.dtype, got {type(dtype).__name__}")
        for number, weight in enumerate(listed):
            if weight.dim() != 2:
                raise ValueError(
                    f"Fp8Weights: expected weights[{number}] of two dimensions, got shape {list(weight.shape)}"
                )
        count, device = len(listed), listed[0].device
        names = [f"weight {number}" for number in range(count)] if names is None else [str(name) for name in names]
        # What is made here is written outside of inference mode, too.
        with torch.inference_mode(False), torch.no_grad():
            self.data = [torch.zeros(w.shape, dtype=dtype, device=device) for w in listed]
            shapes = [w.shape[::-1] for w in listed] if transpose else []
            self.transposed = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
            self.scale = torch.ones(count, dtype=torch.float32, device=device) if scale is None else scale
            self.scale_inv = torch.ones(count, 4, dtype=torch.float32, device=device)[:, 0]
            self.amax = torch.zeros(count, dtype=torch.float32, device=device) if amax is None else amax
            self.counts = torch.zeros(count, 3, dtype=torch.int64, device=device) if counts else None
            self._table = _C.WeightTable(
                listed, self.data, self.transposed, self.scale, self.scale_inv, self.amax, self.counts, names
            )
        # Where a capture that holds a cast finds them.
        self._tables = self._table.tables()
        optimizer_step_watch().watch(self)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def device(self) -> torch.device:
        """Where all of it is."""
        return self.data[0].device

    @property
    def weights(self) -> list[Tensor]:
        """[M_i, N_i] each: what the next cast reads."""
        return self._table.weights()

    def cast_(self, *, noop: Tensor | None = None) -> None:
        """Cast all weights: ``data``, ``transposed``, ``scale_inv``, ``amax``, ``counts`` are mutated.

        Args:
            noop: [] or [1] int32, bool or float32: unless it is 0 when the kernel runs, nothing is touched. Such as
                ``StepState.skip_weight_cast``, for a call that is captured.

        Raises:
            RuntimeError: a weight or a buffer lies elsewhere, or otherwise, than before.

        Stream and capture: allocates nothing, one launch, does not synchronize. Casts of one table on several streams
            must be ordered. A replay reads the table anew. Whether weights are stale is known from calls alone: one
            that is captured, or has a ``noop``, which the host does not read, leaves them as stale as they are.
        """
        check_operands("Fp8Weights", noop=noop)
        before_replay(self._table.check_places)
        wait_for_parameters(self.weights)
        self._table.cast(noop, noop is None and not is_captured(self.scale_inv.device))

    @property
    def is_stale(self) -> bool:
        """True if a weight has changed, as far as the class says that it is known, since the last ``cast_``."""
        return bool(self._table.stale())

    def check(self) -> None:
        """Raise RuntimeError if a weight is stale or something has moved; names it."""
        self.check_places()
        if stale := self._table.stale():
            raise RuntimeError(f"Fp8Weights: {stale}: call cast_() before FP8 copies are used")

    def check_places(self) -> None:
        """Raise RuntimeError if a weight or a buffer lies elsewhere, or otherwise, than before; names it."""
        self._table.check_places()

    def update(self, weights: Iterable[Tensor]) -> None:
        """Let casts, captured ones too, read other weights, from now on on this stream.

        Args:
            weights: [M, N] each, of the same number, shapes, dtypes and device as those before.

        Raises:
            TypeError, ValueError: they are not like those before.
            RuntimeError: a capture is under way.

        Stream and capture: a small copy; waits until it is under way. Not inside a capture.
        """
        if is_captured(self.scale_inv.device):
            raise RuntimeError(
                "Fp8Weights.update: expected no capture under way, got one: call it outside, before the graphed call"
            )
        self._table.update(_listed(weights))


def _listed(weights: Iterable[Tensor]) -> list[Tensor]:
    """``weights``, of any shapes yet, each a tensor."""
    listed = list(as_sequence("Fp8Weights", "weights", weights))
    check_members("Fp8Weights", "weights", listed)
    return listed
