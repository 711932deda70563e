"""One signature of a ``graphed`` function: its first call, its capture, its replays."""

from __future__ import annotations

import contextlib
import copy
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.capture_state import capturing, collecting_checks, one_at_a_time
from te_graph.common.dispatch import storage_key
from te_graph.graphs.arguments.signature import ResultSpec
from te_graph.graphs.capture.autocast import own_casts
from te_graph.graphs.capture.request import check_circumstances
from te_graph.graphs.capture.session import garbage_collection_off
from te_graph.graphs.functions.histories import OuterHistories
from te_graph.graphs.functions.region_watch import DeviceAccessMode, GradReads, RegionWatch
from te_graph.graphs.functions.result_views import ResultView
from te_graph.graphs.guards.function_guard import FunctionGuard, without_source
from te_graph.graphs.guards.guarded_sources import GuardedSource, is_opaque
from te_graph.graphs.guards.rollback import Bindings, ContainerState
from te_graph.graphs.guards.source_walker import SourceWalker
from te_graph.graphs.guards.values import random_state, set_random_state, value_of
from te_graph.graphs.tracing.backends import CudaBackend, RecorderBackend
from te_graph.graphs.tracing.calls import Call, make_call
from te_graph.graphs.tracing.code_watch import CodeWatch
from te_graph.graphs.tracing.explanations import Notes, explained
from te_graph.graphs.tracing.optimizer_advice import advice_on_change
from te_graph.graphs.tracing.recorder import CaptureError

_CPU = torch.device("cpu")
_CHANGES_STATE = (
    "{}: changes the state of Python objects at every call, which a replay would not do: {}; make it a tensor on the "
    "device, return it, or change it outside"
)


@dataclass(frozen=True)
class ResultSource:
    """A result that the function did not make: found anew at each call.

    Attributes:
        step: of the guard, to the tensor, or to the one whose ``.grad`` it is.
        view: what the result is of its memory; None: the very object.
    """

    step: int
    is_grad: bool
    view: ResultView | None

    def result(self, found: Any) -> Any:
        """The result, where the guard's step has ``found`` a tensor [...] or another object."""
        tensor = found.grad if self.is_grad else found
        return tensor if self.view is None else self.view.of(tensor)


@dataclass(eq=False)
class FunctionEntry:
    """What is known of one signature: how to tell it, and once captured, how to replay it.

    Attributes:
        guard: over all that the function can be seen to use.
        devices: where it works.
        multiplies: it multiplies matrices.
        effect: what the first call has changed about Python objects, if anything.
        before: then, how everything but addresses was before it.
        device: the GPU, if the function uses one; else the CPU.
        settings: of the process and the thread, at the first call or the capture.
        graph: None until captured.
        results: nest of the results.
        own: those that the graph made, [...] each.
        own_views: of those, (number, number of the one that it is a view of, how).
        special: numbers of those that are more than a plain tensor, and their attributes.
        found_sources: where the others are found.
        found_steps: their steps of the guard.
        order: of each result, the number among ``own``, then ``found_sources``.
        checks: what ``before_replay`` was given in the capture.
        nbytes: memory that belongs to the graph.
        nodes: of the graph.
        seconds: that the capture took.
        pool: that memory, on a GPU.
    """

    label: str
    guard: _C.FunctionGuard
    devices: set[torch.device]
    multiplies: bool = False
    effect: str = ""
    before: _C.FunctionGuard | None = None
    device: torch.device = field(init=False)
    settings: _C.Settings = field(init=False)
    graph: _C.CapturedGraph | None = None
    results: ResultSpec | None = None
    own: list[Tensor] = field(default_factory=list)
    own_views: list[tuple[int, int, ResultView]] = field(default_factory=list)
    special: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    found_sources: list[ResultSource] = field(default_factory=list)
    found_steps: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    checks: list[Callable[[], None]] = field(default_factory=list)
    nbytes: int = 0
    nodes: int = 0
    seconds: float = 0.0
    pool: Any = None

    def __post_init__(self) -> None:
        self.device = next((device for device in self.devices if device.type == "cuda"), _CPU)
        self.settings = _C.Settings(self.device, with_modes=True)

    def change(self, call: Call) -> str:
        """How ``call`` differs from the one that this entry is for; empty when it does not."""
        return self.guard.check(call) or self.settings.change()

    def begin(self, call: Call) -> tuple[str, list[Any]]:
        """``change``, and if there is none what a replay needs; it must follow, since versions have been moved on."""
        if self.checks:  # which come in between
            return self.change(call), []
        return self.guard.begin(self.settings, call, self.found_steps)

    def refuse_if_undone(self, call: Call) -> None:
        """Raise CaptureError if what the first call has changed is as before it by now: each call would change it."""
        if self.before is not None and not self.before.check(call):
            raise CaptureError(_CHANGES_STATE.format(self.label, self.effect) + advice_on_change(self.effect))

    def replay(self, call: Call, replay_order: _C.ReplayOrder, found: list[Any]) -> Any:
        """Replay and return the results; right after ``begin`` found no change, and what is given here."""
        if self.checks:
            for check in self.checks:
                check()
            # They are the user's code, and what follows relies on what the guard has met.
            change, found = self.guard.begin(self.settings, call, self.found_steps)
            if change:
                raise RuntimeError(f"{self.label}: {change} by what was to be checked before a replay")
        others = [source.result(one) for source, one in zip(self.found_sources, found, strict=True)]
        # Tensors of this call alone, as in eager execution: its user may set attributes, or hooks.
        made = replay_order.replay(self.graph, self.own)
        for number, base, view in self.own_views:
            made[number] = view.of(made[base])
        for number, attributes in self.special:
            made[number] = Tensor._make_subclass(type(self.own[number]), made[number], False)
            vars(made[number]).update({key: _made_anew(value) for key, value in attributes.items()})
        pool = [*made, *others]
        return self.results.unflatten([pool[number] for number in self.order])

    def _views_among_own(self) -> Iterator[tuple[int, int, ResultView]]:
        """The results, numbers of ``own``, that autograd knows as views of other ones."""
        special, numbers = {number for number, _ in self.special}, {id(one): n for n, one in enumerate(self.own)}
        for number, one in enumerate(self.own):
            base = numbers.get(id(one._base))
            if base is None or special & {number, base}:
                continue
            if (view := ResultView.between(one, self.own[base])) is not None:
                yield number, base, view

    def take(self, tensors: list[Tensor | ResultSource]) -> None:
        """Enter the results, [...] each: the graph's own, or where others are found."""
        self.found_sources = [one for one in tensors if isinstance(one, ResultSource)]
        self.found_steps = [source.step for source in self.found_sources]
        own = {id(one): one for one in tensors if isinstance(one, Tensor)}
        self.own = list(own.values())
        self.special = [(n, dict(vars(one))) for n, one in enumerate(self.own) if type(one) is not Tensor or vars(one)]
        self.own_views = list(self._views_among_own())
        numbers = {key: number for number, key in enumerate([*own, *map(id, self.found_sources)])}
        self.order = [numbers[id(one)] for one in tensors]


def _made_anew(attribute: Any) -> Any:
    """A container of values is the user's to change; each call makes another one."""
    is_own = isinstance(attribute, list | dict | set) and value_of(attribute) is not None
    return copy.deepcopy(attribute) if is_own else attribute


def _is_itself(source: GuardedSource) -> bool:
    """True for objects, no tensors, that are results as they are: code can tell them from what holds the same."""
    if (
        source.is_end
        or source.is_given
        or source.parent is None
        or source.same_as is not None
        or isinstance(source.obj, Tensor)
    ):
        return False
    return source.value is None or source.value.is_mutable


def run_first(label: str, call: Call, walker: SourceWalker) -> tuple[Any, FunctionEntry | None]:
    """Run the function as it is; return its result and an entry that recognises the next such call, if that can be."""
    sources = walker.explore(call)
    if walker.has_too_many_sources:
        return make_call(call), None
    before = FunctionGuard(sources, used=set(), is_strict=False).guard
    watch, reads, code = RegionWatch(), GradReads(), CodeWatch(listens=walker.asks_for_names)
    with capturing(), reads, watch, code:
        result = make_call(call)
    walker.note(code)
    used = {*watch.externals, *watch.produced_storages}
    sources = walker.explore(call)
    if walker.has_too_many_sources:
        return result, None
    function_guard = FunctionGuard(sources, used, asked=reads.asked, runs_backward=watch.runs_backward)
    effect = before.check(call)
    entry = FunctionEntry(
        label, function_guard.guard, watch.devices, watch.multiplies, effect, before if effect else None
    )
    return result, entry


def capture(first: FunctionEntry, call: Call, walker: SourceWalker, pool: Any, stream: Any) -> FunctionEntry:
    """Capture the function, without effect on tensors; return the entry that replays it.

    Raises:
        CaptureError, RuntimeError: the function does what a replay would get wrong. Tensors, attributes and containers
            are as before.
    """
    start = time.perf_counter()
    label, device = first.label, first.device
    others = sorted(str(other) for other in first.devices if other not in (_CPU, device))
    if others or device.type not in ("cpu", "cuda"):
        raise CaptureError(f"{label}: expected tensors on the CPU or one GPU, got some on {device} {' '.join(others)}")
    check_circumstances(device, f"graphed({label})")
    backend = CudaBackend(device, "thread_local", stream) if device.type == "cuda" else RecorderBackend()
    pool = pool or backend.new_pool()
    attempt = _Attempt(label, call, walker, device)
    with explained(label, "the capture", Notes()):
        graph, checks, entry = _capture(attempt, first, backend, pool)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        entry.graph = _C.CapturedGraph(graph)
    entry.checks, entry.pool = checks, pool
    entry.nbytes, entry.nodes = backend.nbytes([[graph]])[0], backend.nodes(graph)
    entry.seconds = time.perf_counter() - start
    return entry


def _capture(
    attempt: _Attempt, first: FunctionEntry, backend: Any, pool: Any
) -> tuple[Any, list[Callable[[], None]], FunctionEntry]:
    """The graph, the checks before its replays, and the entry that it belongs to."""
    with one_at_a_time(), garbage_collection_off(), backend.session(), capturing(), attempt.undone_unless_right():
        if first.multiplies and first.device.type == "cuda":
            _make_workspace(first.device)
        with (
            backend.watch_generator(first.label),
            collecting_checks(attempt.watch.keep) as checks,
            backend.capture(pool) as graph,
            attempt.watched(),
            own_casts(),
        ):
            attempt.run()
        return graph, checks, attempt.entry(first.devices)


def _make_workspace(device: torch.device) -> None:
    """Let cuBLAS take its workspace for the present stream now: inside a capture it would be in the graph's pool."""
    one = torch.ones(1, 1, device=device)
    torch.mm(one, one)


class _Attempt:
    """The run of a function inside a capture, and what it is checked for afterwards.

    Attributes:
        watch: sees its tensors, and puts back those that a recorder has written.
    """

    def __init__(self, label: str, call: Call, walker: SourceWalker, device: torch.device) -> None:
        self._label = label
        self._call = call
        self._walker = walker
        is_gpu = device.type == "cuda"
        self._is_gpu = is_gpu
        # A recorder runs what it captures: that is undone, and the replay that follows does it, as on a GPU.
        self.watch = RegionWatch(device if is_gpu else None, restorable=not is_gpu)
        self._reads = GradReads()
        self._before = walker.explore(call, everything=True)
        self._state_before = FunctionGuard(self._before, used=None, is_strict=False)
        self._containers = ContainerState(
            source
            for source in self._before
            if isinstance(source.obj, dict | list | set | deque) or not is_opaque(source.obj)
        )
        self._bindings = Bindings(self._before)
        self._result: Any = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        on_gpu = DeviceAccessMode(self.watch.refusals) if self._is_gpu else contextlib.nullcontext()
        for source in self._before:
            if isinstance(source.obj, Tensor):
                self.watch.keep_grads(source.obj)
        outer = OuterHistories(self._label, self._before)
        with (
            outer,
            on_gpu,
            self._reads,
            self.watch,
            torch.autograd.set_detect_anomaly(False),
        ):  # it reads values on the host
            yield

    def run(self) -> None:
        before, code = random_state(), CodeWatch(listens=self._walker.asks_for_names)
        try:
            with code:
                self._result = make_call(self._call)
        finally:
            self._walker.note(code)
            after = random_state()
            set_random_state(before)
        if after != before:
            raise CaptureError(
                f"{self._label}: draws random numbers from Python's random or numpy.random, which a replay would not "
                "do: draw them with torch, or pass them"
            )

    @contextlib.contextmanager
    def undone_unless_right(self) -> Iterator[None]:
        """Put back what the run wrote into tensors; if an exception comes, what it left in attributes as well."""
        try:
            yield
        except BaseException:
            self._containers.restore()
            self._bindings.restore()
            self.watch.restore_grads()
            raise
        finally:
            self.watch.restore()

    def entry(self, devices: set[torch.device]) -> FunctionEntry:
        """Check what the run did; return an entry without its graph."""
        everything = self._walker.explore(self._call, everything=True)
        self._check_effects(everything)
        sources = self._walker.explore(self._call)
        if without_source(self.watch.externals, sources) is not None:
            sources = everything  # code that does not name what it reads
            self._check_sources(sources)
        written = {key for key, external in self.watch.externals.items() if external.written}
        used, is_backward = set(self.watch.externals), self.watch.runs_backward
        reads_addresses = self._walker.reads_addresses
        function_guard = FunctionGuard(
            sources, None if reads_addresses else used, written, self._reads.asked, is_backward
        )
        kept = {id(source.obj): source for source in sources if _is_itself(source)}
        try:
            results, found = ResultSpec.of(self._label, self._result, kept)
        except TypeError as error:
            raise CaptureError(str(error)) from None
        entry = FunctionEntry(self._label, function_guard.guard, devices, results=results)
        at = {key: ResultSource(function_guard.step_of(source), False, None) for key, source in kept.items()}
        ends = [at.get(id(one)) or self._source_of(n, one, sources, function_guard) for n, one in enumerate(found)]
        entry.take(ends)
        return entry

    def _check_effects(self, sources: list[GuardedSource]) -> None:
        for source in sources:
            if source.is_strided_tensor and storage_key(source.obj) in self.watch.produced_storages:
                raise CaptureError(
                    f"{self._label}: leaves a tensor that it computed in {source.name}; a replay would not run that "
                    "assignment: return the tensor, or write in place into one that is there"
                )
        change = self._state_before.guard.check(self._call)
        if change:
            raise CaptureError(_CHANGES_STATE.format(self._label, change) + advice_on_change(change))

    def _check_sources(self, sources: list[GuardedSource]) -> None:
        lost = without_source(self.watch.externals, sources)
        if lost is not None:
            raise CaptureError(
                f"{self._label}: {lost.op} uses a tensor of shape {list(lost.tensor.shape)} that is neither an "
                "argument nor an attribute, variable, parameter, gradient or optimizer state that the function can be "
                f"seen to hold, so a replay could not tell when it moves: pass it as an argument; at {lost.site}"
            )

    def _source_of(
        self, number: int, tensor: Tensor, sources: list[GuardedSource], function_guard: FunctionGuard
    ) -> Tensor | ResultSource:
        name = f"result {number}"
        if tensor.layout != torch.strided:
            raise CaptureError(f"{self._label}: expected dense results, got {name} of layout {tensor.layout}")
        key = storage_key(tensor)
        if tensor.grad_fn is not None or (tensor.requires_grad and key in self.watch.produced_storages):
            raise CaptureError(
                f"{self._label}: {name} requires a gradient, which a replay does not record: compute it under "
                "torch.no_grad(), or use make_graphed_callables"
            )
        if key in self.watch.produced_storages:
            return tensor
        known = [source for source in sources if source.is_strided_tensor and storage_key(source.obj) == key]
        source = next((one for one in known if one.obj is tensor), known[0] if known else None)
        if source is None:
            raise CaptureError(f"{self._label}: {name} is neither computed nor an argument: return a clone")
        view = None
        if source.obj is not tensor:
            found = next((one for one in known if one.obj is tensor._base), source)
            views = ((one, ResultView.between(tensor, one.obj)) for one in (found, *known))
            source, view = next(((one, view) for one, view in views if view is not None), (None, None))
            if source is None:
                raise CaptureError(
                    f"{self._label}: {name} reads {found.name} as another dtype or as a conjugate or negative view, "
                    "which cannot be made anew at each call: return a clone"
                )
        return ResultSource(function_guard.step_of(source.parent if source.is_grad else source), source.is_grad, view)
