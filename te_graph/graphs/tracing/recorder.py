"""A CPU stand-in for a CUDA graph: records the dispatcher calls of a region and replays them on the same storages."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.capture_lock import capture_lock
from te_graph.common.capture_state import RecordingMode, is_recording
from te_graph.common.dispatch import (
    base_name,
    bypass_modes,
    call_below,
    has_subclass,
    is_in_backward,
    leaves,
    map_tensors,
    storage_key,
    tensors_in,
    written_tensors,
)
from te_graph.common.opaque import opaque
from te_graph.common.reasons import Reported
from te_graph.graphs.tracing.host_access import HostAccessWatch
from te_graph.graphs.tracing.recorded_states import RecordedStates
from te_graph.graphs.tracing.refusals import (
    CaptureError,
    GeneratorWatch,
    Refusals,
    reason_to_refuse,
    reason_to_refuse_tensors,
)
from te_graph.graphs.tracing.source_lines import user_site

_log = logging.getLogger("te_graph")
_UNINITIALISED = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
_COLLECTIVES = frozenset({"c10d", "_c10d_functional"})
# torch computes these derivatives in another way, with other rounding, wherever a dispatch mode is on.
_OTHERWISE = frozenset({"ProdBackward0", "ProdBackward1", "CumprodBackward0", "MaskedFillBackward1"})
_WRITES_LENT = (
    "it writes into memory that another library lent inside the region (torch.from_numpy), and a replay would go on "
    "from what the last one has left there: use torch.tensor"
)
_LIFTS = frozenset({"lift_fresh", "lift_fresh_copy"})


@dataclass(frozen=True)
class OpRecord:
    """One call that a replay makes.

    Attributes:
        name: operator and overload, such as ``aten.addmm.default``.
        inputs: shapes of the tensor arguments, in order.
        outputs: shapes of the tensor results, in order.
        site: the user's line, or ``backward (<node>)``.
    """

    name: str
    inputs: tuple[torch.Size, ...]
    outputs: tuple[torch.Size, ...]
    site: str


@dataclass(frozen=True, eq=False)
class FrozenTensor:
    """A tensor that the region built from Python data at ``site``: each replay sees ``value`` [...] again."""

    value: Tensor
    site: str


class _CopyResults:
    """A call with several results, or with asynchronous ones: waits, then copies each into its recorded tensor."""

    def __init__(self, call: partial, targets: list[Tensor | None], wait_tensors: bool) -> None:
        self.call = call
        self._targets = targets
        self._wait_tensors = wait_tensors

    def __call__(self) -> None:
        for result, target in zip(leaves(self.call()), self._targets, strict=True):
            _wait(result)
            if self._wait_tensors:
                result = torch.ops._c10d_functional.wait_tensor(result)
            if target is not None:
                _copy(target, result)


_Program = list[tuple[partial | _CopyResults, Tensor | None]]  # calls, and the tensors [...] that their results go to


class Recorder:
    """Records the dispatcher calls of a region on CPU tensors and replays them: what a CUDA graph is on a GPU.

    Like a CUDA graph, a recording freezes Python values, branches and addresses. A replay runs the recorded calls, in
    order, on the recorded storages: to feed it, copy into the tensors that the region read; its results are in the
    tensors that the region made. Random calls draw fresh numbers from the default generator. Each replay equals eager
    execution of the region bit for bit.

    A region must keep to dense CPU tensors. What a graph cannot hold is refused with ``CaptureError``.

    Args:
        poison: after each replay fill with NaN what only the recorder holds (floating point and complex storages).
            A CUDA graph would have given that memory to others, so a late read of it gives NaN.

    Attributes:
        frozen: tensors that the region built from Python data; their values are those of the capture.
    """

    def __init__(self, poison: bool = False) -> None:
        self._poison = poison
        self.reset()

    def reset(self) -> None:
        """Drop the recording and with it every reference to tensors. The recorder can capture again."""
        self.frozen: list[FrozenTensor] = []
        self._ops: list[OpRecord] = []
        self._program: _Program = []
        self._grad_enabled = False
        self._in_backward = False
        self._aliases: list[Tensor] = []
        self._born: dict[int, Tensor] = {}
        self._lent: dict[int, Tensor] = {}  # by other libraries, inside the region
        self._temporaries: list[Tensor] | None = None
        self._captured = False
        self._reported = Reported()

    @contextlib.contextmanager
    def capture(self, states: RecordedStates | None = None) -> Iterator[Recorder]:
        """Context manager: run the region inside, a forward or an ``autograd.grad`` backward, and record it.

        The region runs as usual on its tensors, but random calls draw from a private stream: the default generator is
        afterwards where it was before. If the region raises, or swallows a refusal, nothing stays recorded.

        Args:
            states: of that generator, which a forward notes and its backward restores; None: it may not be set.

        Returns:
            The context manager, which yields this recorder.

        Raises:
            CaptureError: the region does what a graph cannot hold (tracing/refusals.py).
            RuntimeError: this thread is capturing already, or this recorder holds a recording.
        """
        _require_no_capture("capture()")
        if self._captured:
            raise RuntimeError("Recorder.capture: expected an empty recorder, got one with a recording: call reset()")
        refusals = Refusals()
        try:
            with capture_lock(), GeneratorWatch(refusals) as generator, HostAccessWatch(refusals):
                noting = contextlib.nullcontext() if states is None else states.in_recording(self._program, generator)
                with noting, _CaptureMode(self, refusals, generator):
                    yield self
                if refusals.first is not None:
                    raise CaptureError(refusals.first)
            self._captured = True
        except BaseException:
            self.reset()
            raise

    @opaque
    def replay(self) -> None:
        """Run the recorded calls again, in order, on the recorded storages.

        Mutates every tensor that the region made or wrote, without autograd noticing: no graph is built and version
        counters of the user's tensors stay. The ambient grad mode and autocast have no effect.

        Raises:
            RuntimeError: nothing is recorded, this thread is capturing, or a call's result has another shape than at
                capture (an operator whose output shape depends on data and does not say so).
        """
        _require_no_capture("replay()")
        if not self._captured:
            raise RuntimeError("Recorder.replay: expected a recording, got an empty recorder: capture() first")
        if self._poison and self._temporaries is None:
            self.freeze_lifetimes()
        # The recorded calls ran beneath autograd and autocast; grad mode is part of the program, because some kernels
        # ask for it to decide what to keep for a backward.
        with torch.no_grad(), torch._C._AutoDispatchBelowADInplaceOrView(), torch._C._DisableAutocast():
            _C.set_in_backward(False)
            try:
                for call, target in self._program:
                    result = call()
                    if target is not None:
                        _copy(target, result)
            finally:
                _C.set_in_backward(None)
            for temporary in self._temporaries or ():
                temporary.fill_(float("nan"))

    def ops(self) -> list[OpRecord]:
        """The calls that a replay makes, in order. Views and uninitialised factories need none."""
        return list(self._ops)

    def calls(self, name: str) -> list[RecordedCall]:
        """The calls that a replay makes of one operator, in order.

        Args:
            name: of the operator and overload, such as ``aten.addmm.default``.

        Returns:
            One ``RecordedCall`` for each.

        Raises:
            RuntimeError: nothing is recorded.
        """
        if not self._captured:
            raise RuntimeError("Recorder.calls: expected a recording, got an empty recorder")
        program = self._program
        return [RecordedCall(self, program, i) for i in range(len(program)) if str(_call_at(program, i).func) == name]

    @property
    def nbytes(self) -> int:
        """Bytes of the storages born inside the region; the recorder keeps all of them alive."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._born.values())

    def freeze_lifetimes(self) -> None:
        """Decide what ``poison`` fills: storages born in the region that only this recorder holds now.

        Call it once the references that will not stay (autograd graphs of the capture) are dropped; the first replay
        does it otherwise. Later calls have no effect. Raises RuntimeError when nothing is recorded.
        """
        if not self._captured:
            raise RuntimeError("Recorder.freeze_lifetimes: expected a recording, got an empty recorder")
        if self._temporaries is not None:
            return
        own = Counter(storage_key(alias) for alias in self._aliases)
        temporaries = []
        for key, tensor in self._born.items():
            # Holding the Python wrapper of the storage adds exactly one use, whether it existed before or not.
            storage = tensor.untyped_storage()
            is_free = torch._C._storage_Use_Count(key) == own[key] + 1
            if is_free and (tensor.is_floating_point() or tensor.is_complex()):
                count = storage.nbytes() // tensor.element_size()
                empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                temporaries.append(empty.set_(storage, 0, (count,)))
        self._temporaries = temporaries

    def _alias(self, tensor: Tensor) -> Tensor:
        """An alias of ``tensor`` [...] that knows no autograd graph and has a version counter of its own. It stays
        where it is when what is lent moves, as an address in a graph does."""
        alias = _C.alias_in_place(tensor)
        self._aliases.append(alias)
        return alias

    def _reason_to_refuse(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict) -> str | None:
        if any(storage_key(tensor) in self._lent for tensor, _ in written_tensors(func, args, kwargs)):
            return _WRITES_LENT
        return None

    def _record(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict, result: Any) -> None:
        """Append a call that has just run; runs beneath autograd and with the modes bypassed."""
        inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(result))
        if not inputs and not outputs:
            return
        if any(tensor._is_zerotensor() or tensor.is_meta for tensor in outputs):
            return  # without memory that a replay could fill
        if has_subclass([type(tensor) for tensor in outputs]):
            # A wrapper was put around a tensor (the AsyncCollectiveTensor of a functional collective): no data moves.
            return
        node = torch._C._current_autograd_node()
        if node is not None and node.name() in _OTHERWISE and self._reported.is_first(node.name()):
            _log.warning("Recorder: %s is computed otherwise while it is recorded: its rounding differs", node.name())
        name = base_name(func)
        known = {storage_key(tensor) for tensor in inputs}
        if name in _LIFTS:
            self._freeze(outputs[0], str(func))
            return
        for tensor in outputs:
            key = storage_key(tensor)
            if key not in known and key not in self._born:
                self._born[key] = self._alias(tensor)
        if name in _UNINITIALISED or torch.Tag.inplace_view in func.tags:
            return
        results = list(leaves(result))
        fresh = [isinstance(leaf, Tensor) and storage_key(leaf) not in known for leaf in results]
        if outputs and not any(fresh) and not written_tensors(func, args, kwargs):
            return
        self._ops.append(
            OpRecord(str(func), tuple(t.shape for t in inputs), tuple(t.shape for t in outputs), user_site())
        )
        if torch.is_grad_enabled() != self._grad_enabled:
            self._grad_enabled = not self._grad_enabled
            self._program.append((partial(torch._C._set_grad_enabled, self._grad_enabled), None))
        # Ranks compare whether a collective was called in a backward.
        in_backward = is_in_backward()
        if func.namespace == "te_graph" and in_backward != self._in_backward:
            self._in_backward = in_backward
            self._program.append((partial(_C.set_in_backward, in_backward), None))
        # Aliases are taken after the call, because an ``out=`` tensor may have been resized by it.
        # What was one tensor stays one: kernels ask (attention does whether its query is its key).
        distinct = {id(tensor): tensor for tensor in inputs}
        aliases = {key: self._alias(tensor) for key, tensor in distinct.items()}
        args, kwargs = map_tensors(lambda tensor: aliases[id(tensor)], (args, kwargs))
        call = partial(func, *args, **kwargs)
        targets = [self._alias(leaf) if is_fresh else None for leaf, is_fresh in zip(results, fresh, strict=True)]
        if func.namespace in _COLLECTIVES or (any(fresh) and not isinstance(result, Tensor)):
            self._program.append((_CopyResults(call, targets, func.namespace == "_c10d_functional"), None))
        else:
            self._program.append((call, targets[0] if targets else None))

    def _freeze(self, tensor: Tensor, name: str) -> None:
        """Let every replay begin with the present value of ``tensor`` [...], which was built from Python data."""
        key = storage_key(tensor)
        if key in self._born:
            return
        # Memory that another library lent (torch.from_numpy) is not ours to write: it stays where and what it is.
        if not tensor.untyped_storage().resizable():
            self._lent[key] = self._alias(tensor)
            return
        live = self._born[key] = self._alias(tensor)
        value, site = live.clone(), user_site()
        self.frozen.append(FrozenTensor(value, site))
        self._ops.append(OpRecord(name, (), (tensor.shape,), site))
        self._program.append((partial(live.copy_, value), None))


class RecordedCall:
    """One call of a recording; arguments of it that are no tensors may be exchanged between replays."""

    def __init__(self, recorder: Recorder, program: _Program, index: int) -> None:
        self._recorder = recorder
        self._program = program
        self._index = index

    def get(self, argument: str) -> Any:
        """What the next replay passes as ``argument``, a name of the operator's schema."""
        call = self._call()
        if argument in call.keywords:
            return call.keywords[argument]
        position = _position_of(argument, call.func)
        return call.args[position] if position < len(call.args) else call.func._schema.arguments[position].default_value

    def set_(self, values: dict[str, Any]) -> None:
        """Let later replays pass ``values``, by names of the operator's schema, and all other arguments as before."""
        call = self._call()
        args, kwargs = list(call.args), dict(call.keywords)
        for argument, value in values.items():
            position = _position_of(argument, call.func)
            if position < len(args):
                args[position] = value
            else:
                kwargs[argument] = value
        changed = partial(call.func, *args, **kwargs)
        step, target = self._program[self._index]
        if isinstance(step, _CopyResults):
            step.call = changed
        else:
            self._program[self._index] = (changed, target)

    def _call(self) -> partial:
        if self._recorder._program is not self._program:
            raise RuntimeError("RecordedCall: expected the recording that the call was found in, got one reset since")
        return _call_at(self._program, self._index)


def _call_at(program: _Program, index: int) -> partial:
    step, _ = program[index]
    return step.call if isinstance(step, _CopyResults) else step


def _position_of(argument: str, func: torch._ops.OpOverload) -> int:
    return [declared.name for declared in func._schema.arguments].index(argument)


class _CaptureMode(RecordingMode):
    """Runs each call of the region, has it checked and recorded."""

    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder, refusals: Refusals, generator: GeneratorWatch) -> None:
        super().__init__()
        self._recorder = recorder
        self._refusals = refusals
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if has_subclass(types):
            return NotImplemented
        with bypass_modes():
            reason = reason_to_refuse(func, args, kwargs) or self._recorder._reason_to_refuse(func, args, kwargs)
            self._refuse(func, reason)
            state = self._generator.state()
        result = call_below(func, args, kwargs)
        with bypass_modes():
            self._refuse(func, reason_to_refuse_tensors(result))
            self._generator.check(str(func), state)
            for leaf in leaves(result):
                _wait(leaf)
            self._recorder._record(func, args, kwargs, result)
        return result

    def _refuse(self, func: Any, reason: str | None) -> None:
        if reason is not None:
            raise self._refusals.error(str(func), reason)


def _wait(result: Any) -> None:
    """Wait for an asynchronous result that is no tensor, such as the Work of a collective."""
    if not isinstance(result, Tensor) and hasattr(result, "wait"):
        result.wait()


def _copy(target: Tensor, result: Tensor) -> None:
    """Copy the result of a replayed call into the recorded one, [...] both."""
    if result.shape != target.shape:
        raise RuntimeError(
            f"Recorder.replay: expected a result of shape {list(target.shape)} as at capture, got {list(result.shape)}"
        )
    target.copy_(result)


def _require_no_capture(what: str) -> None:
    if is_recording():
        raise RuntimeError(f"Recorder.{what}: expected no capture under way in this thread, got one")
