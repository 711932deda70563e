"""graphed: a function whose calls replay a graph, as long as they are the call that was captured."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from te_graph import _C
from te_graph.common.capture_lock import try_capture_lock, watched_call
from te_graph.common.dispatch import function_modes
from te_graph.common.environment import is_disabled
from te_graph.common.held_signals import signals_held
from te_graph.common.own_objects import name_of_itself
from te_graph.common.reasons import ReasonCounts, Reported
from te_graph.common.reporters import CaptureFacts, register, unregister
from te_graph.graphs.functions.entry import FunctionEntry
from te_graph.graphs.functions.function_capture import capture, run_first
from te_graph.graphs.guards.readers.guarded_sources import Inlined
from te_graph.graphs.guards.readers.source_walker import SourceWalker
from te_graph.graphs.tracing.calls import Call, call_of, make_call
from te_graph.graphs.tracing.names import Names
from te_graph.graphs.tracing.pool_and_stream import check_pool, check_stream

_log = logging.getLogger("te_graph")
_ON_MISMATCH = ("capture", "eager", "raise")
_MAX_ENTRIES = 8
_MAX_MISSES = 16  # calls in a row that are like none before; after that few are looked at any more, which costs time
_CALLS_BEFORE_WARNING = 4  # calls in a row, after which the log says why
_LONG_WALK_SECONDS = 1.0  # where a walk takes longer, misses are looked at until then
_MAX_WAIT_SECONDS = 5.0  # that a call waits for a replay on another thread
_CAPTURING_ELSEWHERE = "called while another thread captures or is watched"
_ADVICE = {
    " changed from ": "a number that changes at every call must be a tensor (of an optimizer with fused=True or "
    "capturable=True: lr=torch.tensor(...))",
    " moved to other memory": "tensors are read in place: copy what is new at every call into one that stays "
    "(gradients: zero_grad(set_to_none=False))",
}


class GraphedFunction(Inlined):
    """What ``graphed`` returns; described there. ``__wrapped__`` is the function.

    Its own state is in slots. Attributes are the user's: code of the function that names it reads and sets them here.
    """

    __slots__ = (
        *("_calls_since_replay", "_captured", "_captures", "_eager_calls", "_is_disabled", "_label", "_lock"),
        *("_on_mismatch", "_pool", "_replay_orders", "_replays", "_reported", "_runs_python", "_seen", "_stream"),
        *("_thread", "_walker"),
    )

    def __init__(
        self, function: Callable[..., Any], on_mismatch: str, pool: Any, stream: torch.cuda.Stream | None
    ) -> None:
        functools.update_wrapper(self, function, updated=("__dict__",) if inspect.isfunction(function) else ())
        self._label = _label_of(function)
        self._on_mismatch = on_mismatch
        self._pool = pool
        self._stream = stream
        self._is_disabled = is_disabled()
        # Before the first call nothing has run: what installed packages do in it is known after it.
        self._walker = SourceWalker(Names(is_all_seen=hasattr(sys, "monitoring")))
        self._replay_orders: dict[torch.device, _C.ReplayOrder] = {}  # one for each device: they order replays
        self._captured: list[FunctionEntry] = []  # the one used last comes first
        self._seen: list[FunctionEntry] = []  # of calls that ran as they are, once each
        self._captures = self._replays = 0
        self._eager_calls = ReasonCounts()
        self._lock = threading.Lock()  # of everything here, and of the guards of the entries
        self._thread: int | None = None  # that has it
        self._runs_python = False  # of the user's: it may go on for long, and wait for others
        self._calls_since_replay = 0  # calls since the last replay
        self._reported = Reported()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: the instance is the first argument."""
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        reason = "TE_GRAPH_DISABLE=1" if self._is_disabled else _reason_to_be_plain()
        if reason is None and not self._enter():
            reason = "called while another call runs"
        if reason is not None:
            self._eager_calls.add(reason)
            return self.__wrapped__(*args, **kwargs)
        try:
            return self._call(call_of(self.__wrapped__, args, kwargs))
        finally:
            self._thread = None
            self._lock.release()

    def _enter(self) -> bool:
        """Whether this call may look at the captures: no other one does, on this thread or on another.

        While another thread runs the function itself, it may wait for this one; while it replays, this one waits.
        """
        thread = threading.get_ident()
        if self._thread == thread or self._runs_python:
            return False
        if not self._lock.acquire(blocking=False) and not self._lock.acquire(timeout=_MAX_WAIT_SECONDS):
            return False
        self._thread = thread
        return True

    def _call(self, call: Call) -> Any:
        change = ""
        for number, entry in enumerate(self._captured):
            difference, found = entry.begin(call)
            if not difference:
                if number:
                    self._captured.insert(0, self._captured.pop(number))
                return self._replay(entry, call, found)
            change = change or difference
        changes = []
        for entry in self._seen:
            changes.append(entry.change(call))
            if not changes[-1]:
                return self._capture_and_replay(entry, call)
        return self._replay_nothing(call, change, next(iter(changes), ""))

    def _replay(self, entry: FunctionEntry, call: Call, found: list[Any]) -> Any:
        if entry.renewals:
            held, found = entry.renew(call, found)
            if held:
                return self._run_to_make(call, held)
        self._calls_since_replay = 0
        result = entry.replay(call, self._replay_orders[entry.device], found)
        self._replays += 1
        return result

    def _run_to_make(self, call: Call, held: str) -> Any:
        """A call like one that was captured, which must leave something else where others have what is ``held``."""
        reason = (
            f"{held} gets from each call what a replay cannot put there, something new where others hold the last one, "
            "or an argument"
        )
        if self._on_mismatch == "raise":
            raise RuntimeError(f"{self._label}: {reason}")
        return self._run_as_it_is(call, reason)

    def _capture_and_replay(self, first: FunctionEntry, call: Call) -> Any:
        if torch.is_inference_mode_enabled():
            return self._run(call, "called under torch.inference_mode(), where nothing is captured")
        if undone := first.what_is_undone(call):  # no guard of a capture would tell that it is
            return self._run_as_it_is(call, undone)
        alone = try_capture_lock()
        if alone is None:  # the next such call captures
            return self._run(call, _CAPTURING_ELSEWHERE)
        with alone, signals_held():  # until it replays: handlers may change what the capture has found
            with self._python():
                entry = capture(first, call, self._walker, self._pool, self._stream)
            if isinstance(entry, FunctionEntry):
                return self._replay_new(first, entry, call)
        return self._run_as_it_is(call, entry)

    def _replay_new(self, first: FunctionEntry, entry: FunctionEntry, call: Call) -> Any:
        """Replay ``entry``, the capture that a call like ``first`` has just made."""
        self._seen.remove(first)
        self._captured = [entry, *self._captured[: _MAX_ENTRIES - 1]]
        self._replay_orders.setdefault(entry.device, _C.ReplayOrder(entry.device))
        self._captures += 1
        _log.info("%s: captured, %.1f MiB", self._label, entry.nbytes / 2**20)
        # Its guard has not looked yet, and a replay needs what it finds.
        change, found = entry.begin(call)
        if change and change == entry.host_steps.change():  # of what this call, not the capture, has found otherwise
            if self._on_mismatch == "raise":
                raise RuntimeError(f"{self._label}: {change} since capture")
            return self._run(call, f"{change} since capture")
        if change:
            raise RuntimeError(f"{self._label}: {change} during the capture")
        if entry.renewals:
            entry.settle(found)
        return self._replay(entry, call, found)

    def _replay_nothing(self, call: Call, change: str, change_since_seen: str) -> Any:
        """A call that no capture is for; ``change`` tells how it differs from the last one that was replayed, the other
        how from the last one that was seen, which a capture needs twice."""
        register(self)
        reason = f"not captured: {change_since_seen} since the last call" if change_since_seen else "not captured yet"
        if change:
            reason = f"{change} since capture"
        if change:
            if self._on_mismatch == "raise":
                raise RuntimeError(f"{self._label}: {reason}")
            self._warn_once(f"{reason} (runs eagerly)")
            if self._on_mismatch == "eager":
                return self._run(call, reason)
        calls = self._calls_since_replay + 1
        if calls == _CALLS_BEFORE_WARNING and self._seen:
            change = change or change_since_seen
            advice = [f"; {what}" for words, what in _ADVICE.items() if words in change]
            undone = next(filter(None, (entry.what_is_undone(call) for entry in self._seen)), "")
            advice += [f"; {undone}"] if undone else []
            times = f"{_CALLS_BEFORE_WARNING} times in a row"
            self._warn_once(f"has run eagerly {times}, the last time since {change}{''.join(advice)}")
        if not self._is_looked_at(calls):
            self._calls_since_replay = calls
            return self._run(call, reason)
        alone = try_capture_lock()
        if alone is None:  # a next such call is looked at: this one does not count
            return self._run(call, _CAPTURING_ELSEWHERE)
        with alone, watched_call(), signals_held(), self._python():
            self._calls_since_replay = calls
            result, entry = run_first(self._label, call, self._walker)
        self._eager_calls.add(reason)
        if not isinstance(entry, FunctionEntry):
            if entry is not None:
                self._warn_once(f"{entry} (runs eagerly)")
            return result
        self._seen = [entry, *self._seen[: _MAX_ENTRIES - 1]]
        return result

    def _is_looked_at(self, calls: int) -> bool:
        """Whether the last of so many calls in a row is watched, so that a next one like it is captured: of many that
        were like none before, few are; where that takes long, ever fewer."""
        if self._walker.seconds > _LONG_WALK_SECONDS:
            return calls <= _CALLS_BEFORE_WARNING or calls.bit_count() == 1  # powers of two
        is_seldom = calls > _MAX_MISSES or self._walker.has_too_many_sources
        return not (is_seldom and calls % _MAX_MISSES)

    def _run_as_it_is(self, call: Call, reason: str) -> Any:
        """``_run``, and the log says so."""
        self._warn_once(f"{reason} (runs eagerly)")
        return self._run(call, reason)

    def _run(self, call: Call, reason: str) -> Any:
        self._eager_calls.add(reason)
        with self._python():
            return make_call(call)

    @contextlib.contextmanager
    def _python(self) -> Iterator[None]:
        """Around what may wait for other threads."""
        self._runs_python = True
        try:
            yield
        finally:
            self._runs_python = False

    def _warn_once(self, change: str) -> None:
        reason = change.partition(" changed from ")[0]
        if self._reported.is_first(reason):
            _log.warning("%s: %s", self._label, change)

    def __copy__(self) -> GraphedFunction:
        return GraphedFunction(self.__wrapped__, self._on_mismatch, None, self._stream)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedFunction:
        """One that knows no capture, around a copy of the function. (Python does not copy functions, but methods.)"""
        return GraphedFunction(copy.deepcopy(self.__wrapped__, memo), self._on_mismatch, None, self._stream)

    def __reduce__(self) -> str | tuple:
        """Where a name in a module stands for this object, that name; else the function, and how it was graphed."""
        return name_of_itself(self) or (_graphed_as, (self.__wrapped__, self._on_mismatch))

    def reset(self) -> None:
        """Free the graphs and their memory. Results of replays stay what they are. The next call is a first call."""
        self._captured, self._seen, self._replay_orders, self._calls_since_replay = [], [], {}, 0
        unregister(self)

    def __repr__(self) -> str:
        return CaptureFacts(**self.info()).line()

    def info(self) -> dict[str, Any]:
        """What was captured and how often it has run: the keys of ``.te_graph.info()`` of a graphed callable.

        Returns:
            ``forward_replays`` counts the replays, the one that follows each capture included; ``recaptures`` are
            captures that are gone by now; ``eager_calls`` are counted by reason, those that no capture was for by what
            has changed. A function has no slots, forwards in flight or replays of a backward: they are 0.
        """
        entries = self._captured
        facts = CaptureFacts(
            name=f"graphed {self._label}",
            backend=("cuda" if entries[0].device.type == "cuda" else "recorder") if entries else None,
            signatures=len(entries),
            slots=0,
            graphs=len(entries),
            nodes=sum(entry.nodes for entry in entries),
            fp8_calls=sum(entry.fp8_calls for entry in entries),
            clones=0,
            bytes=sum(entry.nbytes for entry in entries),
            capture_seconds=float(sum(entry.seconds for entry in entries)),
            recaptures=max(0, self._captures - len(entries)),
            in_flight=0,
            forward_replays=self._replays,
            backward_replays=0,
            eager_calls=dict(self._eager_calls),
        )
        return dataclasses.asdict(facts)

    def release(self) -> None:
        """``reset()``, by its old name."""
        _warn_of_old_name("release()", "reset()")
        self.reset()

    def stats(self) -> dict[str, int]:
        """Part of ``info()``, by old names: ``captures``, ``replays``, ``misses``, ``eager_calls``, ``bytes``."""
        _warn_of_old_name("stats()", "info()")
        misses = sum(count for reason, count in self._eager_calls.items() if reason.endswith(" since capture"))
        return {
            "captures": self._captures,
            "replays": self._replays,
            "misses": misses,
            "eager_calls": sum(self._eager_calls.values()),
            "bytes": sum(entry.nbytes for entry in self._captured),
        }

    def graphs(self) -> list[_C.CapturedGraph]:
        """One for each signature that is captured now, the one that was replayed last first."""
        return [entry.graph for entry in self._captured]

    def pool(self) -> Any:
        """The memory pool of the graph that was replayed last, for ``pool=`` of other graphs; None without a GPU."""
        return self._pool or (self._captured[0].pool if self._captured else None)


def _graphed_as(function: Callable[..., Any], on_mismatch: str) -> GraphedFunction:
    return GraphedFunction(function, on_mismatch, None, None)


def _label_of(function: Callable[..., Any]) -> str:
    """What messages call ``function``; a method by the class of its object, not by the one that defines it."""
    if inspect.ismethod(function) and not isinstance(function.__self__, type):
        return f"{type(function.__self__).__name__}.{function.__name__}"
    return getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]


def _warn_of_old_name(old: str, new: str) -> None:
    sentence = f"graphed: {old} is now called {new}; the old name will be removed in the next release"
    warnings.warn(sentence, DeprecationWarning, stacklevel=3)


def _reason_to_be_plain() -> str | None:
    """Why a call runs the function itself: inside other captures, and where a mode or a compiler sees operations."""
    if torch.compiler.is_compiling() or _C.is_observed():
        return "called inside a capture, or where operations are observed"
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        return "called under torch.autograd.detect_anomaly"  # it asks each operation of a backward for NaN
    modes = function_modes()
    return "called under a function mode" if modes and not all(map(_sets_default_device, modes)) else None


def _sets_default_device(mode: Any) -> bool:
    """True for what ``torch.set_default_device`` and ``with torch.device(...)`` enter, which guards compare."""
    loaded = sys.modules.get("torch.utils._device")
    return loaded is not None and isinstance(mode, loaded.DeviceContext)


def graphed(
    fn: Callable[..., Any] | None = None,
    *,
    on_mismatch: str = "capture",
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
    on_change: str | None = None,
) -> Any:
    """Let calls of a function that launches a short sequence of kernels replay a graph of them.

    For what surrounds forward and backward: accumulating gradients, their norm, clipping, a whole optimizer step. The
    first call with a given signature runs as it is; the second one captures, and replays; later ones replay. In each
    case the effects of the function happen once. Usable as a decorator, on methods too.

    The signature is: addresses, shapes, strides and dtypes of the tensors that the function uses; lengths and keys of
    containers; values of numbers, strings, bools, None and dtypes; which modules, optimizers and other objects there
    are. They are looked for in the arguments, the bound object, closure variables, defaults and globals used, and in
    what these hold, with optimizer state and ``.grad`` and ``.main_grad`` of parameters. All of it is compared at every
    call, in C++. Containers (of arguments ``UserDict``, too), dataclasses, functions may be made anew each time if they
    hold the same. Python numbers that change at every step (a learning rate) are a change; as tensors on the device
    they are not. (torch's optimizers take such a learning rate with ``fused=True`` or, on a GPU, ``capturable=True``.)

    Args:
        fn: called with any arguments. On CUDA tensors its work is captured into a CUDA graph, on the device alone;
            where all tensors are on the CPU a ``Recorder`` takes its place.
        on_mismatch: what a call does that is like none captured so far: "capture" runs it as it is, and captures if the
            next one is like it; "eager" runs it as it is, the captures stay; "raise" names the change. The eight
            signatures used last are kept.
        pool: memory pool for what the graphs make (``torch.cuda.graph_pool_handle()``); one for each graph if None.
            Sharing one with other graphs follows torch's rule: same order, no overlap.
        stream: to capture on; the one of ``torch.cuda.graph`` if None.
        on_change: the old name of ``on_mismatch``, and "recapture" that of "capture"; warns.

    Returns:
        What replays. Arguments are read in place. Results that the function computed lie in the same memory at every
        replay: the next one overwrites them, as it does the in-place effects, and moves their version counters on, so
        that autograd raises if it had saved one. Results that are arguments, or views of them, stay such. ``info()``
        counts captures, replays, bytes and eager calls by reason; ``pool()`` is the memory pool of the last graph;
        ``reset()`` frees the graphs, and the next call is a first one. The user's tensors and objects are not kept
        alive, except by a recorder, whose recording holds the memory that it reads.

        Calls on several threads are right, and come one after the other; while one runs the function itself, or
        captures, those of other threads run eagerly. While another function captures, or runs its first call, first
        calls and those that would capture do so, too. Copies, deep copies and pickled ones have no capture.
        Generators of ``nn.Module`` (``parameters()``) are drained before the call; with other iterators among the
        arguments every call is eager.

        Inside other captures, under dispatch and function modes, where ``torch.autograd.detect_anomaly`` looks for NaN,
        with ``TE_GRAPH_DISABLE=1`` calls run the function as it is. A graphed function that is called by another one is
        part of that one's graph.

    Raises:
        TypeError, ValueError: an argument is wrong.
        CaptureError: from the second call, which then leaves no trace in tensors and in what is compared: the function
            does what a replay could not repeat. It reads a tensor on the host, works on CPU tensors while it uses a
            GPU, leaves a tensor that it computed in an attribute, a list or a ``.grad``, changes a number or a
            container at every call, uses a tensor that cannot be found, returns one that requires a gradient. Names the
            operation and the line, or the attribute.
        RuntimeError: ``on_mismatch="raise"`` and something has changed; or what is used (a plan, prepared weights) is
            no longer what it was.

    Stream and capture: a capture synchronizes the device. Replays go to the current stream and wait for the last replay
        of this object if that was on another. They do not synchronize. The capture error mode is "thread_local".
    """
    if on_change is not None:
        _warn_of_old_name("on_change=", "on_mismatch=")
        on_mismatch = "capture" if on_change == "recapture" else on_change
    if on_mismatch not in _ON_MISMATCH:
        raise ValueError(f"graphed: expected on_mismatch in {_ON_MISMATCH}, got {on_mismatch!r}")
    check_pool("graphed", pool)
    check_stream("graphed", stream)
    if fn is None:
        return functools.partial(graphed, on_mismatch=on_mismatch, pool=pool, stream=stream)
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(f"graphed: expected fn to be a function, got {type(fn).__name__}")
    return GraphedFunction(fn, on_mismatch, pool, stream)
