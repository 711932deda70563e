"""What calls of a graphed callable do, and what its user sees of it: its handle, ``.te_graph``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_graph import _C
from te_graph.common.capture_lock import capture_lock, is_watched_elsewhere
from te_graph.common.capture_state import is_captured, is_capturing, is_capturing_callables
from te_graph.common.environment import is_disabled
from te_graph.common.fp8_calls import REPEATS, repeats_fp8_calls
from te_graph.common.gradient_state import main_grad_of
from te_graph.common.held_signals import signals_held
from te_graph.common.own_objects import ClosedObject
from te_graph.common.reasons import ReasonCounts, Reported
from te_graph.common.reporters import CaptureFacts, register, unregister
from te_graph.graphs.arguments.signature import Signature
from te_graph.graphs.callables.late_capture import WATCHED_ELSEWHERE, LateCaptures
from te_graph.graphs.callables.mismatch_advice import with_advice, with_circumstances
from te_graph.graphs.callables.pending_forwards import warn_of_forwards_before
from te_graph.graphs.callables.refused_captures import RefusedCaptures
from te_graph.graphs.capture.entry import CallableEntry
from te_graph.graphs.capture.group import CaptureGroup
from te_graph.graphs.capture.request import Job, check_circumstances, sample_of
from te_graph.graphs.capture.session import capture_all
from te_graph.graphs.graphed_class import plain_class, set_class
from te_graph.graphs.step_state import StepState

_log = logging.getLogger("te_graph")
_Kind = _C.ReplayMiss.Kind
_OTHER_ARGUMENTS = (_Kind.ARGUMENTS, _Kind.DISCERNIBLE)
_ALWAYS_EAGER = (_Kind.MODE, _Kind.UNLINKED, _Kind.DISCERNIBLE, _Kind.ENTANGLED)  # whatever on_mismatch= says
_CAPTURING, _FAILED = "inside another capture", "capturing again failed: "
# The entry that was replayed and its results, or (None, [], a reason to run eagerly).
_Replayed = tuple[CallableEntry | None, list[Tensor], str | None]


class Handle(ClosedObject):
    """What ``.te_graph`` of a graphed callable is.

    Args:
        job: what is graphed.
        step_state: as ``make_graphed_callables`` takes it.

    Attributes:
        label: what messages call the callable.
        fast_call: what a call needs that replays without coming here; None where that is not possible.
    """

    def __init__(self, job: Job, step_state: StepState | None = None) -> None:
        self.label, target = job.label, job.target
        self._parameters, self._gradients = job.parameters, job.gradients
        self._step_state = step_state
        self._is_module = isinstance(target, nn.Module)
        self._target = weakref.ref(target) if self._is_module else (lambda: target)
        self.own_forward: Callable[..., Any] | None = None
        self._group: CaptureGroup | None = None
        self._switching = threading.Lock()
        self._grad_mode = True  # of the capture, as is the next
        self._training: bool | None = None
        self._late: LateCaptures | None = None
        self._is_due = False  # the first call that trains captures
        self._not_graphed = "not graphed"
        self._entry: CallableEntry | None = None  # the one that was replayed last
        self._others: list[CallableEntry] = []
        self.fast_call: Any = None
        self._captures = 0  # how many succeeded after the first
        self._refused = RefusedCaptures()  # since the last one that succeeded
        self._past_replays: Counter[str] = Counter()  # of entries that were replaced or freed
        self._eager_calls = ReasonCounts()
        self._reported = Reported()
        self._is_disabled = is_disabled()
        self._is_closed = True
        register(self)

    def arm(self, entry: CallableEntry, group: CaptureGroup) -> None:
        """From now on calls replay ``entry``; where that does not fit, they do what the options of ``group`` say."""
        self._group = group
        self._grad_mode = torch.is_grad_enabled()
        self._training = self._target().training if self._is_module else None
        self._add(entry)

    def wait(self, late: LateCaptures) -> None:
        """From now on calls run eagerly until one trains: that one captures, and then replays."""
        self._late, self._is_due = late, not self._is_disabled

    def call(self, root: Any, args: tuple, kwargs: dict[str, Any], base: type[nn.Module] | None = None) -> Any:
        """Replay, or run eagerly where the graph does not apply. ``base`` is the class that a module had before."""
        state = self._step_state
        if state is None:
            return self._call(root, args, kwargs, base)
        is_first_microbatch = kwargs.pop("is_first_microbatch", None)
        if is_captured(state.block.device):  # the capturing code says when its micro-batches begin
            return self._call(root, args, kwargs, base)
        is_new = state.begin_(self, is_first_microbatch)
        try:
            return self._call(root, args, kwargs, base)
        except BaseException:
            if is_new:
                state.forget_(self)
            raise

    def _call(self, root: Any, args: tuple, kwargs: dict[str, Any], base: type[nn.Module] | None) -> Any:
        reason = self._capture_late(args, kwargs) if self._is_due else None
        reason = reason or self._reason_for_eager(root)
        if reason is not None:
            self._refuse_for_main_grads(f"{self.label}: {reason}")
        else:
            entry = self._entry
            outputs = entry.replay(root, args, kwargs)
            if type(outputs) is not list:
                entry, outputs, reason = self._replay_otherwise(outputs, root, args, kwargs)
            if reason is None:
                for attribute in entry.computed:
                    attribute.mark()
                return entry.result_of(outputs)
        self._eager_calls.add(reason)
        return self.eager_function(root, base)(*args, **kwargs)

    def _reason_for_eager(self, root: Any) -> str | None:
        if self._entry is None:
            return "TE_GRAPH_DISABLE=1" if self._is_disabled else self._not_graphed
        if self._is_module and root.training is not self._training:
            modes = ("eval", "training") if self._training else ("training", "eval")
            return f"called in {modes[0]} mode, captured in {modes[1]} mode"
        if torch.is_grad_enabled() is not self._grad_mode:
            modes = ("under no_grad", "with gradients") if self._grad_mode else ("with gradients", "under no_grad")
            return f"called {modes[0]}, captured {modes[1]}"
        if is_capturing():
            return _CAPTURING
        return "called while torch.export traces" if torch.compiler.is_exporting() else None

    def _capture_late(self, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """Capture what is called, if it trains; where not, or where that fails, a reason to run eagerly.

        Raises:
            TypeError, ValueError, RuntimeError: it failed, and the user chose an error: at this call alone.
        """
        target, late = self._target(), self._late
        if late is None:  # another thread has just captured
            return None
        reason = late.reason_to_wait(target, args, kwargs)
        if reason is not None:
            return reason
        with signals_held():
            try:
                sample = sample_of(self.label, args, kwargs)
                with capture_lock():
                    if self._is_due:  # else another thread has captured meanwhile
                        self._capture_first(late, target, sample, kwargs)
            except Exception as error:
                self._is_due = False
                self._not_graphed = f"the capture failed: {self._without_label(str(error))}"
                if late.options.on_mismatch != "eager":
                    raise
                return self._fall_back(f"{self.label}: {self._not_graphed}")
        return None

    def _capture_first(
        self, late: LateCaptures, target: Any, sample: tuple[Signature, list[Tensor]], kwargs: dict[str, Any]
    ) -> None:
        group = late.group_for(self.label, target, sample[1])
        check_circumstances(group.device)
        entry = self._capture(group, sample, kwargs)
        self.arm(entry, group)
        self._late, self._is_due = None, False

    def _replay_otherwise(self, miss: _C.ReplayMiss, root: Any, args: tuple, kwargs: dict[str, Any]) -> _Replayed:
        """What happens when the entry that was replayed last does not fit.

        Raises:
            ValueError, RuntimeError: the user chose an error, or the eager result would not be right.
        """
        entry, miss = self._replay_others(miss, root, args, kwargs)
        if type(miss) is list:
            return entry, miss, None
        kind, options = miss.kind, self._group.options
        if kind == _Kind.CAPTURING:
            self._refuse_for_main_grads(f"{self.label}: {_CAPTURING}")
            return None, [], _CAPTURING
        if kind == _Kind.MODE:
            return None, [], self._fall_back(miss.message)
        if options.on_mismatch == "capture" and self._is_mended_by_capture(miss):
            replayed = self._capture_again(miss, root, args, kwargs)
            if replayed[0] is None:
                self._entry.pass_over()
            return replayed
        may_be_eager = options.on_exhausted if kind == _Kind.EXHAUSTED else options.on_mismatch
        if may_be_eager == "raise" and kind not in _ALWAYS_EAGER:
            if kind == _Kind.ARGUMENTS:
                raise ValueError(with_advice(self.label, miss.message, self._entry.form, args, kwargs))
            if kind == _Kind.EXHAUSTED:
                raise RuntimeError(f'{miss.message}; on_exhausted="eager" lets such calls run')
            if kind == _Kind.CHECKPOINT:
                raise RuntimeError(f'{miss.message}; on_mismatch="eager" or "capture" lets such calls run, eagerly')
            raise RuntimeError(with_circumstances(self.label, miss.message, root))
        return None, [], self._fall_back(miss.message)

    def _replay_others(
        self, miss: _C.ReplayMiss, root: Any, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[CallableEntry | None, list[Tensor] | _C.ReplayMiss]:
        """Replay one of the entries beside the current one, if that has missed: it and its results, or what all miss.

        What is current by then is not asked for: other threads may have called meanwhile.
        """
        for entry in list(self._others):
            if miss.kind not in _OTHER_ARGUMENTS:
                break
            outputs = entry.replay(root, args, kwargs)
            if type(outputs) is list or outputs.kind not in _OTHER_ARGUMENTS:
                self._make_current(entry)
                return (entry if type(outputs) is list else None), outputs
            if outputs.kind == _Kind.DISCERNIBLE:
                miss = outputs
        return None, miss

    def _is_mended_by_capture(self, miss: _C.ReplayMiss) -> bool:
        lost = miss.kind == _Kind.UNLINKED and self._entry.lost_predecessor
        return lost or miss.kind in (*_OTHER_ARGUMENTS, _Kind.CIRCUMSTANCES)

    def _capture_again(self, miss: _C.ReplayMiss, root: Any, args: tuple, kwargs: dict[str, Any]) -> _Replayed:
        """Capture what is called; where that fails, a reason to run eagerly."""
        if repeats_fp8_calls():
            return None, [], self._fall_back(f"{self.label}: {REPEATS}")
        all_are_made = f"; max_captures={(most := self._group.options.max_captures)} are made"
        if self._captures >= most:
            return None, [], self._fall_back(miss.message + all_are_made)
        with contextlib.ExitStack() as alone:
            try:
                check_circumstances(self._group.device)
                sample = sample_of(self.label, args, kwargs, self._group.device)
                if reason := self._refusal(miss, sample, args, kwargs):
                    return None, [], self._fall_back(reason)
                alone.enter_context(capture_lock())
            except Exception as error:  # of the arguments, which costs little
                return None, [], self._fall_back(f"{miss.message}; {_FAILED}{self._without_label(str(error))}")
            alone.enter_context(signals_held())
            # Meanwhile another thread may have captured it, or tried to.
            entry = self._entry
            found = entry.replay(root, args, kwargs)
            if type(found) is not list:
                entry, found = self._replay_others(found, root, args, kwargs)
            if type(found) is list:
                return entry, found, None
            if not self._is_mended_by_capture(found):
                return self._replay_otherwise(found, root, args, kwargs)
            if self._captures >= most:
                return None, [], self._fall_back(found.message + all_are_made)
            if reason := self._refusal(found, sample, args, kwargs):
                return None, [], self._fall_back(reason)
            return self._capture_alone(found, root, sample, args, kwargs)

    def _refusal(self, miss: _C.ReplayMiss, sample: tuple, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """Why a call like earlier ones is not captured, if so."""
        if is_watched_elsewhere():  # which may wait for this call
            return f"{miss.message}; {WATCHED_ELSEWHERE}"
        if reason := self._refused.reason_for(miss.message, sample[1], args, kwargs):
            return reason
        reason = self._refused.reason_against_all()
        return reason and f"{self.label}: {reason}"

    def _capture_alone(
        self, miss: _C.ReplayMiss, root: Any, sample: tuple, args: tuple, kwargs: dict[str, Any]
    ) -> _Replayed:
        """Capture while no other thread does."""
        current = self._entry
        try:
            entry = self._capture(self._group, sample, kwargs)
        except Exception as error:  # of the callable's own, perhaps: the eager call raises it, with what it does before
            failed, cause = (self._without_label(text) for text in (str(error), miss.message))
            reason = f"{self.label}: {_FAILED}{failed}; tried because {cause}"
            return None, [], self._fall_back(self._refused.add(miss.message, *sample, reason))
        if miss.kind not in _OTHER_ARGUMENTS:
            self._retire(current)
        self._add(entry)
        outputs = entry.replay(root, args, kwargs)
        is_result = type(outputs) is list
        if miss.kind == _Kind.DISCERNIBLE and not is_result and outputs.kind in _ALWAYS_EAGER:
            self._retire(entry)  # for other calls of this kind the one that is there is as good
            self._make_current(current)
            reason = f"{miss.message}; {outputs.message}"
            return None, [], self._fall_back(self._refused.add(miss.message, *sample, reason))
        self._captures += 1
        self._refused.clear()
        _log.info("%s: captured again: %s", self.label, miss.message)
        if is_result:
            return entry, outputs, None
        if outputs.kind in (*_ALWAYS_EAGER, _Kind.CHECKPOINT):  # no graph could serve this call
            return None, [], self._fall_back(outputs.message)
        raise RuntimeError(outputs.message)

    def _capture(
        self, group: CaptureGroup, sample: tuple[Signature, list[Tensor]], kwargs: dict[str, Any]
    ) -> CallableEntry:
        counted = ReasonCounts(self._eager_calls)  # without those that the capture makes
        try:
            job = Job(self.label, self._target(), sample, kwargs, self._parameters, self._gradients)
            return capture_all(group, [job], is_chain=False)[0]
        finally:
            self._eager_calls = counted

    def _fall_back(self, reason: str) -> str:
        """Report ``reason`` once, if the eager result is right."""
        self._refuse_for_main_grads(reason)
        if self._reported.is_first(reason):
            _log.warning("%s (runs eagerly)", reason)
        return self._without_label(reason)

    def _without_label(self, message: str) -> str:
        return message.removeprefix(f"{self.label}: ")

    def _refuse_for_main_grads(self, reason: str) -> None:
        """Refuse an eager call whose backward would not add to ``main_grad``; inside a capture it does."""
        if not torch.is_grad_enabled() or is_capturing_callables():
            return
        is_late = self._late is not None and not self._is_disabled
        is_refused = is_late and self._late.has_main_grads(self._target())
        if is_refused or any(entry.adds_to_main_grads() for entry in self._entries):
            raise RuntimeError(f"{reason}; an eager call would leave gradients in .grad instead of main_grad")

    def _retire(self, entry: CallableEntry) -> None:
        entry.retired = True
        self._past_replays["forward"] += entry.graphed.forward_replays
        self._past_replays["backward"] += entry.graphed.backward_replays

    def _make_current(self, entry: CallableEntry | None) -> None:
        with self._switching:  # several threads may call
            if entry is self._entry:
                return
            if entry in self._others:
                self._others.remove(entry)
            if self._entry is not None and not self._entry.retired:
                self._others.insert(0, self._entry)
                self._entry.pass_over()
            self._entry, self.fast_call = entry, None
            if entry is not None:
                entry.take_up()
                if self._is_module and self._step_state is None:
                    self.fast_call = entry.fast_call(self._grad_mode)

    def _add(self, entry: CallableEntry) -> None:
        """Take ``entry`` as the current one. A parameter that another callable uses as well goes to autograd in both,
        which sums before it accumulates; only a ``main_grad`` is added to by each."""
        self._make_current(entry)
        for reference, state in zip(entry.leaves, entry.states, strict=True):
            parameter = reference()
            if main_grad_of(parameter) is None and any(user is not self for user in state.users):
                user = next(iter(state.users))
                if len(state.users) == 1 and parameter.grad is not None and user._has_forwards_before(parameter):
                    warn_of_forwards_before(user.label, self.label, parameter)
                for user in [*state.users, self]:
                    user.route_through_autograd(parameter)
            state.users.add(self)

    def eager_function(self, root: Any, base: type[nn.Module] | None) -> Callable[..., Any]:
        """What ``root`` ran before it was graphed."""
        if self.own_forward is not None:
            return self.own_forward
        return root if base is None else functools.partial(base.forward, root)

    def route_through_autograd(self, parameter: Tensor) -> None:
        """Let autograd accumulate the gradient of ``parameter`` [...], which another callable uses as well."""
        for entry in self._entries:
            for number, reference in enumerate(entry.leaves):
                if reference() is parameter:
                    entry.graphed.route_through_autograd(number)

    def _has_forwards_before(self, parameter: Tensor) -> bool:
        """Whether some wait whose backward has no way to autograd for ``parameter`` [...]."""
        is_due = any(entry.graphed.in_flight for entry in self._entries)
        return is_due and not self._group.options.is_for_autograd(parameter)

    @property
    def _entries(self) -> list[CallableEntry]:
        return [] if self._entry is None else [self._entry, *self._others]

    def graphs(self) -> list[_C.CapturedGraph]:
        """Those of all signatures that are captured now, and of all their slots: each forward, then its backward."""
        return [graph for entry in self._entries for graph in entry.graphed.graphs]

    def reset(self) -> None:
        """Free the graphs: the callable runs eagerly again, and can be given to ``make_graphed_callables`` anew.

        A backward that is still due runs; its memory goes with it. May be called again.
        """
        target = self._target()
        unregister(self)
        for entry in self._entries:
            self._retire(entry)
            for attribute in entry.computed:
                attribute.compute()
            for state in entry.states:
                state.users.discard(self)
        self._make_current(None)
        self._others, self._group = [], None
        self._late, self._is_due, self._not_graphed = None, False, "not graphed"
        if self._is_module and target is not None and vars(target).get("te_graph") is self:
            del vars(target)["te_graph"]
            set_class(target, plain_class(type(target)))
            if self.own_forward is not None:
                vars(target).setdefault("forward", self.own_forward)

    def __repr__(self) -> str:
        return CaptureFacts(**self.info()).line()

    def info(self) -> dict[str, Any]:
        """What was captured and how often it has run.

        Returns:
            ``name``; ``backend`` ("cuda", "recorder", or None when not graphed); ``signatures``; ``slots`` of each;
            ``graphs``; ``nodes``; ``fp8_calls`` of FP8 layers in a forward; ``clones`` that the graphs make of results
            and gradients which lie in memory of others; ``bytes`` of graph memory; ``capture_seconds``;
            ``recaptures``; ``in_flight`` forwards that wait for their backward; ``forward_replays``;
            ``backward_replays``; ``eager_calls``, by reason. Graphs, nodes, FP8 calls, clones, bytes and seconds are
            sums over the signatures that are captured now.
        """
        entries = self._entries

        def total(fact: str) -> Any:
            return sum(entry.statistics[fact] for entry in entries)

        facts = CaptureFacts(
            name=self.label,
            backend=entries[0].statistics["backend"] if entries else None,
            signatures=len(entries),
            slots=entries[0].statistics["slots"] if entries else 0,
            graphs=total("graphs"),
            nodes=total("nodes"),
            fp8_calls=total("fp8_calls"),
            clones=total("clones"),
            bytes=total("bytes"),
            capture_seconds=float(total("capture_seconds")),
            recaptures=self._captures,
            in_flight=sum(entry.graphed.in_flight for entry in entries),
            forward_replays=self._past_replays["forward"] + sum(e.graphed.forward_replays for e in entries),
            backward_replays=self._past_replays["backward"] + sum(e.graphed.backward_replays for e in entries),
            eager_calls=dict(self._eager_calls),
        )
        return dataclasses.asdict(facts)
