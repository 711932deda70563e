"""Capture of a ``graphed`` function: its first run, which is watched, and the run inside the capture."""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from te_graph import _C
from te_graph.common.before_capture import make_ready
from te_graph.common.capture_lock import capture_lock, garbage_collection_off
from te_graph.common.capture_state import capturing
from te_graph.common.captured_backward import capturing_backward
from te_graph.common.dispatch import PACKAGE, has_lost_history, is_leaf, is_strided, layout_name, storage_key
from te_graph.common.fp8_calls import CapturedFp8Calls
from te_graph.common.kept_state import state_kept
from te_graph.common.replay_checks import collecting_checks
from te_graph.graphs.arguments.signature import ResultNest
from te_graph.graphs.capture.autocast import own_casts
from te_graph.graphs.capture.request import check_circumstances
from te_graph.graphs.functions.entry import CPU, FunctionEntry
from te_graph.graphs.functions.histories import OuterHistories
from te_graph.graphs.functions.made_objects import is_stateless_alone, objects_in
from te_graph.graphs.functions.parted import PartedError
from te_graph.graphs.functions.region_watch import DeviceAccessMode, GradUses, RegionWatch
from te_graph.graphs.functions.renewals import renewals
from te_graph.graphs.functions.result_tensors import Alias, FoundResult, result_tensors, root_of
from te_graph.graphs.functions.result_views import ResultView
from te_graph.graphs.functions.spots import SpotsBefore, objects_of, spots
from te_graph.graphs.guards.effects.random_generators import HostRandom
from te_graph.graphs.guards.effects.rollback import Bindings, ContainerState, with_contents
from te_graph.graphs.guards.function_guard import FunctionGuard, without_source
from te_graph.graphs.guards.readers.function_reader import FunctionReader
from te_graph.graphs.guards.readers.guarded_sources import GuardedSource
from te_graph.graphs.guards.readers.source_walker import SourceWalker
from te_graph.graphs.guards.sources import tells_tensors_apart
from te_graph.graphs.tracing.backends import CudaBackend, RecorderBackend
from te_graph.graphs.tracing.calls import Call, make_call
from te_graph.graphs.tracing.code_watch import CodeWatch
from te_graph.graphs.tracing.explanations import Notes, explained
from te_graph.graphs.tracing.optimizer_advice import advice_on_change
from te_graph.graphs.tracing.refusals import CaptureError

_TOO_MANY = "refers to more sources than can be compared"
_CHANGES_STATE = (
    "{}: changes the state of Python objects at every call, which a replay would not do: {}; make it a tensor on the "
    "device, return it, or change it outside"
)


def _found_as_they_are(sources: list[GuardedSource], step_of: Callable[[GuardedSource], int]) -> dict[int, FoundResult]:
    """Objects, no tensors, that are results as they are, by identity: code can tell them from what holds the same."""
    found = {id(source.obj): FoundResult(step_of(source)) for source in sources if _is_itself(source)}
    for spot in spots(sources):
        if spot.path and not is_stateless_alone(spot.obj):
            found.setdefault(id(spot.obj), FoundResult(step_of(spot.source), path=spot.path))
    return found


def _is_itself(source: GuardedSource) -> bool:
    """True where one of these is."""
    if (
        source.is_end
        or source.is_given
        or source.parent is None
        or source.again is not None
        or isinstance(source.obj, Tensor)
    ):
        return False
    return source.value is None or source.value.is_mutable


def _reader_of(call: Call, everything: bool = False) -> Callable[..., FunctionReader]:
    return functools.partial(FunctionReader, call, everything)


def run_first(label: str, call: Call, walker: SourceWalker) -> tuple[Any, FunctionEntry | str | None]:
    """Run the function as it is; return its result and an entry that recognises the next such call, or why there is
    none; None if a next call may find fewer sources."""
    sources = walker.explore(_reader_of(call))
    if walker.has_too_many_sources:
        return _run_to_see(call, walker)
    if named := next((source for source in sources if source.is_strided_tensor and source.obj.has_names()), None):
        return make_call(call), f"{named.name} has names of dimensions, which cannot be captured"
    before = FunctionGuard(sources, used=set(), is_strict=False).guard
    watch, grads, code = RegionWatch(), GradUses(), CodeWatch()
    with capturing(), grads, watch, code:
        result = make_call(call)
    if watch.nested is not None:
        return result, f"{watch.nested}"
    walker.note(code)
    used = {*watch.externals, *watch.produced_storages}
    sources = walker.explore(_reader_of(call))
    if walker.has_too_many_sources:
        return result, _TOO_MANY
    function_guard = FunctionGuard(
        sources,
        used,
        asked=grads.used,
        runs_backward=watch.runs_backward,
        tells_apart=tells_tensors_apart(walker.names, sources),
    )
    entry = FunctionEntry(label, function_guard.guard, watch.devices, watch.multiplies)
    if effect := before.check(call):
        entry.note_undone(effect, before)
    return result, entry


def _run_to_see(call: Call, walker: SourceWalker) -> tuple[Any, str | None]:
    """Run the function as it is, to see which code of all that it can get to runs. A next call is looked at as well, if
    that says something new; return its result and, if not, why there is no entry."""
    known, code = walker.known, CodeWatch()
    with capturing(), code:
        result = make_call(call)
    walker.note(code)
    walker.has_too_many_sources = walker.known == known
    return result, _TOO_MANY if walker.has_too_many_sources else None


def capture(first: FunctionEntry, call: Call, walker: SourceWalker, pool: Any, stream: Any) -> FunctionEntry | str:
    """Capture the function, without effect on tensors; return the entry that replays it. Where the function raises an
    exception of its own, which it may do in eager execution, too, or parts what was one object, all is as before, and
    the reason is returned why it is to run as it is.

    Raises:
        CaptureError, RuntimeError: the function does what a replay would get wrong. Tensors, attributes and containers
            are as before.
    """
    start = time.perf_counter()
    label, device = first.label, first.device
    others = sorted(str(other) for other in first.devices if other not in (CPU, device))
    if others or device.type not in ("cpu", "cuda"):
        advice = ", as forward-mode derivatives make them: compute these outside" if "meta" in others else ""
        got = f"{device} {' '.join(others)}{advice}"
        raise CaptureError(f"{label}: expected tensors on the CPU or one GPU, got some on {got}")
    check_circumstances(device, f"graphed({label})")
    backend = CudaBackend(device, "thread_local", stream) if device.type == "cuda" else RecorderBackend()
    pool = pool or backend.new_pool()
    try:
        with state_kept():
            attempt = _Attempt(label, call, walker, device)
            with explained(label, "the capture", Notes()):
                graph, checks, entry = _capture(attempt, first, backend, pool)
    except PartedError as parted:
        first.note_undone(parted.change, parted.before)
        return first.what_is_undone(call)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or not _is_own(error):
            raise
        return f"raised {type(error).__name__} where it was to be captured"
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        entry.graph = _C.CapturedGraph(graph)
    entry.checks = [*checks, *([entry.host_steps.run] if len(entry.host_steps) else [])]
    entry.pool = pool
    entry.nbytes, entry.nodes = backend.nbytes([[graph]])[0], backend.nodes(graph)
    entry.seconds = time.perf_counter() - start
    return entry


def _is_own(error: BaseException) -> bool:
    """Whether the code of a function raised ``error``: not te_graph, whose modes call operators."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return not isinstance(error, CaptureError) and not frame.f_code.co_filename.startswith(PACKAGE)


def _capture(
    attempt: _Attempt, first: FunctionEntry, backend: Any, pool: Any
) -> tuple[Any, list[Callable[[], None]], FunctionEntry]:
    """The graph, the checks before its replays, and the entry that it belongs to."""
    with (
        capture_lock(),
        garbage_collection_off(),
        backend.session(),
        capturing(),
        attempt.undone_unless_right(),
    ):
        if first.multiplies and first.device.type == "cuda":
            _make_workspace(first.device)
        with (
            backend.watch_generator(first.label),
            collecting_checks() as checks,
            backend.capture(pool) as graph,
            attempt.watched(),
            own_casts(),
        ):
            attempt.run()
        return graph, checks, attempt.entry(first.devices)


def _make_workspace(device: torch.device) -> None:
    """Let cuBLAS take its workspace for the present stream now: inside a capture it would be in the graph's pool."""
    one = torch.ones(1, 1, dtype=torch.float32, device=device)
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
        self.watch = RegionWatch(device if is_gpu else None, restorable=not is_gpu, is_capture=True)
        self._grads = GradUses()
        self._before = walker.explore(_reader_of(call, everything=True), learns=False)
        if make_ready(source.obj for source in self._before):
            self._before = walker.explore(_reader_of(call, everything=True), learns=False)
        self._host_steps = _C.HostSteps()
        self._fp8_calls = 0
        self._state_before = FunctionGuard(self._before, used=None, is_strict=False)
        # Made now, too: it compares with what the sources hold when it is made.
        self._apart_before = FunctionGuard(self._before, used=None, is_strict=False, tells_shared=False)
        tensors = (source for source in self._before if isinstance(source.obj, Tensor) and not source.obj._is_view())
        self._histories = [(source.name, source.obj, source.obj.grad_fn) for source in tensors]
        self._containers = ContainerState(with_contents(self._before))
        self._bindings = Bindings(self._before)
        self._spots = SpotsBefore(self._before)
        self._generators = HostRandom(self._before, with_torch=True)
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
            self._grads,
            self.watch,
            torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False),
        ):  # looking for NaN reads values on the host; code may ask for the mode
            yield

    def run(self) -> None:
        code = CodeWatch()
        try:
            in_backward = capturing_backward(self._host_steps)
            with code, self._host_steps, in_backward, CapturedFp8Calls() as self._fp8_calls:
                self._result = make_call(self._call)
        finally:
            self._walker.note(code)
        drawn_from, set_ = self._generators.drawn_from() or code.drawn, self._generators.set_by(code.states)
        if drawn_from is not None:
            raise CaptureError(
                f"{self._label}: draws random numbers from {drawn_from}, which a replay would not do: draw them with "
                "torch, or pass them"
            )
        if set_ is not None:
            raise CaptureError(f"{self._label}: sets the state of {set_}, which a replay would not do: set it outside")

    @contextlib.contextmanager
    def undone_unless_right(self) -> Iterator[None]:
        """Put back what the run wrote into tensors, and states of generators; if an exception comes, what it left in
        attributes as well."""
        try:
            yield
        except BaseException:
            self._containers.restore()
            self._bindings.restore()
            self.watch.restore_grads()
            raise
        finally:
            self.watch.restore()
            self._generators.restore()

    def entry(self, devices: set[torch.device]) -> FunctionEntry:
        """Check what the run did; return an entry without its graph."""
        everything = self._walker.explore(_reader_of(self._call, everything=True), learns=False)
        self._check_effects(everything)
        sources = self._walker.explore(_reader_of(self._call))
        if without_source(self.watch.externals, sources) is not None:
            sources = everything  # code that does not name what it reads
            self._check_sources(sources)
        if moved := self._spots.moved(sources):  # what stays elsewhere does not tell replays where it is now
            raise self._refusal_of_change(f"{moved} gets an object that was elsewhere")
        used, is_backward = set(self.watch.externals), self.watch.runs_backward
        names = self._walker.names
        function_guard = FunctionGuard(
            sources,
            None if names.reads_addresses or names.calls_extensions else used,
            self.watch.told_writes,
            self._grads.used,
            is_backward,
            tells_tensors_apart(names, sources),
        )
        kept = _found_as_they_are(sources, function_guard.step_of)
        try:
            results, found = ResultNest.of(self._label, self._result, kept)
        except TypeError as error:
            raise CaptureError(str(error)) from None
        entry = FunctionEntry(self._label, function_guard.guard, devices, results=results, host_steps=self._host_steps)
        ends = [kept.get(id(one)) or self._source_of(n, one, sources, function_guard) for n, one in enumerate(found)]
        entry.fp8_calls = self._fp8_calls.count
        takes_out = self._takes_out(objects_of(sources))
        entry.find(result_tensors(self._label, ends), renewals(self._spots, sources, function_guard.step_of, takes_out))
        return entry

    def _takes_out(self, still_there: dict[int, Any]) -> bool:
        """Whether the run has changed, or returns, an object that something else has taken the place of."""
        if self._containers.first_changed(but=still_there.keys()):
            return True
        returned = objects_in(self._result)
        return any(key in self._spots.known and key not in still_there for key in returned)

    def _check_effects(self, sources: list[GuardedSource]) -> None:
        for source in sources:
            if source.is_strided_tensor and storage_key(source.obj) in self.watch.produced_storages:
                raise CaptureError(
                    f"{self._label}: leaves a tensor that it computed in {source.name}; a replay would not run that "
                    "assignment: return the tensor, or write in place into one that is there"
                )
        for name, tensor, grad_fn in self._histories:
            if tensor.grad_fn is not grad_fn:  # by a function of autograd's or an operator's, where no watch sees it
                raise CaptureError(
                    f"{self._label}: adds to what autograd knows of {name}, which each call would do and a replay does "
                    "not: write a detached value (value.detach(), torch.no_grad()), or return the result"
                )
        if change := self._state_before.guard.check(self._call):
            if not self._apart_before.guard.check(self._call):
                raise PartedError(change, self._state_before.guard)
            raise self._refusal_of_change(change)

    def _refusal_of_change(self, change: str) -> CaptureError:
        return CaptureError(_CHANGES_STATE.format(self._label, change) + advice_on_change(change))

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
    ) -> Tensor | FoundResult | Alias:
        name = f"result {number}"
        if not is_strided(tensor):
            raise CaptureError(f"{self._label}: expected dense results, got {name} of layout {layout_name(tensor)}")
        key = storage_key(tensor)
        known = [source for source in sources if source.is_strided_tensor and storage_key(source.obj) == key]
        source = next((one for one in known if one.obj is tensor), None)
        if (not has_lost_history(tensor) and tensor.grad_fn is not None) or (tensor.requires_grad and source is None):
            raise CaptureError(
                f"{self._label}: {name} requires a gradient, which a replay does not record: return it detached "
                "(loss.detach()), compute it under torch.no_grad(), or use make_graphed_callables"
            )
        if source is None:
            self._check_attributes(name, tensor)
        if key in self.watch.produced_storages:
            return tensor
        if not known:
            raise CaptureError(f"{self._label}: {name} is neither computed nor an argument: return a clone")
        alias = None if source is not None else self._found_of(tensor, known)
        found = source or alias
        if found is None:
            raise CaptureError(
                f"{self._label}: {name} reads {known[0].name} as another dtype or as a conjugate or negative view, or "
                "with names of dimensions, which cannot be made anew at each call: return a clone"
            )
        at = FoundResult(function_guard.step_of(found.parent if found.is_grad else found), found.is_grad)
        return at if source is not None else Alias(tensor, found.obj, at)

    def _check_attributes(self, name: str, tensor: Tensor) -> None:
        """Refuse a result [...] with an attribute that the next replay overwrites: nothing would tell autograd."""
        borne = {"grad": tensor.grad if is_leaf(tensor) else None, **vars(tensor)}
        for attribute, value in borne.items():
            within = (one for one in tree_leaves(value) if isinstance(one, Tensor) and is_strided(one))
            if any(storage_key(one) in self.watch.produced_storages for one in within):
                raise CaptureError(
                    f"{self._label}: {name} has an attribute {attribute} with a tensor that the function computed, "
                    "which the next replay would overwrite: return that one beside it"
                )

    def _found_of(self, tensor: Tensor, known: list[GuardedSource]) -> GuardedSource | None:
        """Of ``known`` tensors in the memory of ``tensor`` [...], one that it can be made of."""
        root = root_of(tensor)
        of_root = [one for one in known if root_of(one.obj) is root]  # autograd knows them as views of the same
        wanted = tensor if of_root else root
        return next((one for one in of_root or known if ResultView.between(wanted, one.obj) is not None), None)
