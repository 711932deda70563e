"""Captures of the layers that a step called: together where possible, and without those that cannot be captured."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from te_graph.common.gradient_state import main_grad_of
from te_graph.graphs.callables.install import capture_and_install, prepare
from te_graph.graphs.capture.call_form import parameters_of
from te_graph.graphs.capture.group import CaptureGroup
from te_graph.graphs.capture.options import Options
from te_graph.graphs.capture.request import Job, check_callable, common_device, sample_of
from te_graph.graphs.graphed_class import plain_class
from te_graph.graphs.layers.layer_calls import LayerCall
from te_graph.graphs.layers.watched_step import Use
from te_graph.graphs.step_state import StepState
from te_graph.graphs.tracing.open_checkpoints import clear_frames
from te_graph.graphs.tracing.refusals import CaptureError

_MAX_ALIKE = 3  # modules of one class that could not be captured for one reason: the others are not tried


@dataclass
class LayerCaptures:
    """Captures layers and keeps account of it.

    Args:
        names: of all modules of the model.
        uses: of parameters, as a ``StepWatch`` saw them.
        options: for all captures.
        step_state: as ``make_graphed_callables`` takes it.

    Attributes:
        captured: the calls whose layers are captured.
        chains: those that were captured as a chain, chain by chain.
        left_out: modules that could not be captured -> why.
        errors: modules among these -> what was raised, where an error is the reason.
    """

    names: dict[nn.Module, str]
    uses: dict[int, list[Use]]
    options: Options
    step_state: StepState | None
    captured: list[LayerCall] = field(default_factory=list)
    chains: list[list[LayerCall]] = field(default_factory=list)
    left_out: dict[nn.Module, str] = field(default_factory=dict)
    errors: dict[nn.Module, Exception] = field(default_factory=dict)
    _jobs: dict[LayerCall, Job] = field(default_factory=dict)
    _devices: dict[LayerCall, torch.device] = field(default_factory=dict)
    _alike: Counter[tuple[type, str]] = field(default_factory=Counter)

    def capture(self, calls: Sequence[LayerCall]) -> list[LayerCall]:
        """Capture the layers of ``calls``, in the order of the calls; returns those that could not be."""
        fit = [call for call in calls if self._prepare_or_leave_out(call)]
        for segment in self._segments(fit):
            self._capture_chain(segment)
        rest = [call for call in fit if call not in self.captured and call.module not in self.left_out]
        groups: dict[tuple, list[LayerCall]] = {}
        for call in rest:
            groups.setdefault(self._conditions(call), []).append(call)
        for group in groups.values():
            self._capture_apart(group)
        return [call for call in calls if call.module in self.left_out]

    def _prepare_or_leave_out(self, call: LayerCall) -> bool:
        """Whether the layer of ``call`` can be tried; where not, ``left_out`` says why."""
        obstacle = call.obstacle or self._obstacle_of_parameters(call)
        if obstacle is not None:
            self.left_out[call.module] = obstacle
            return False
        try:
            self._prepare(call)
        except (TypeError, ValueError, RuntimeError) as error:
            self._leave_out([call], call, error)
            return False
        return True

    def _prepare(self, call: LayerCall) -> None:
        """Make what the capture of the layer needs.

        Raises:
            TypeError, ValueError, RuntimeError: it cannot be captured.
        """
        module, label = call.module, self._label(call.module)
        check_callable(module, self.names[module])
        prepare([module])
        args, kwargs = call.arguments.samples()
        sample = sample_of(label, args, kwargs)
        self._devices[call] = common_device((label,), (module,), [sample[1]])
        self._jobs[call] = Job(label, module, sample, kwargs, parameters_of(module), call.seen_gradients())

    def _label(self, module: nn.Module) -> str:
        return f"{self.names[module]} ({_kind(module).__name__})"

    def _conditions(self, call: LayerCall) -> tuple:
        """Device and modes, which all layers of one capture have in common."""
        return self._devices[call], call.autocast, call.fp8_region, call.grad_enabled

    def _segments(self, calls: Sequence[LayerCall]) -> Iterator[list[LayerCall]]:
        """Those of ``calls`` of which each feeds the next, two or more."""
        segment: list[LayerCall] = []
        for call in calls if self.options.chain else ():
            if segment and segment[-1] in call.fed_by and self._conditions(segment[-1]) == self._conditions(call):
                segment.append(call)
                continue
            if len(segment) > 1:
                yield segment
            segment = [call]
        if len(segment) > 1:
            yield segment

    def _capture_chain(self, calls: list[LayerCall]) -> None:
        """Capture ``calls``, which feed each other; where one fails, those before and those after it."""
        if len(calls) < 2:
            return
        number = self._try(calls, is_chain=True)
        if number is None:
            self.chains.append(calls)
            return
        self._capture_chain(calls[:number])
        self._capture_chain(calls[number + 1 :])

    def _capture_apart(self, calls: list[LayerCall]) -> None:
        while calls and self._try(calls, is_chain=False) is not None:
            calls = [call for call in calls if call.module not in self.left_out]

    def _try(self, calls: list[LayerCall], is_chain: bool) -> int | None:
        """Capture ``calls`` together; where that fails, which of them is to blame: accounted for here, since a caller
        that had the error in a variable would make a cycle of it and its traceback, with all that the layers computed.
        """
        options = replace(self.options, chain=is_chain, autograd_params=self._for_autograd(calls))
        jobs = [self._jobs[call] for call in calls]
        group = CaptureGroup(self._devices[calls[0]], options)
        try:
            first = calls[0]
            with first.autocast.again(), first.fp8_region.again(), torch.set_grad_enabled(first.grad_enabled):
                capture_and_install(jobs, group, is_chain=is_chain, step_state=self.step_state)
        except Exception as error:
            labels = [job.label for job in jobs]
            number = labels.index(group.at_work) if group.at_work in labels else 0
            self._note_failure(calls, number, error, is_chain)
            clear_frames(error)  # torch's own make cycles of errors of CUDA
            return number
        self.captured += calls
        return None

    def _for_autograd(self, calls: list[LayerCall]) -> tuple[weakref.ref[Tensor], ...]:
        """The parameters whose gradients go through autograd: also those that are used outside of their layer."""
        shared = [
            weakref.ref(parameter)
            for call in calls
            for parameter in call.module.parameters()
            if main_grad_of(parameter) is None and self._uses_of(parameter, call.module)[1]
        ]
        return (*self.options.autograd_params, *shared)

    def _uses_of(self, parameter: Tensor, module: nn.Module) -> tuple[list[Use], list[Use]]:
        """Inside and outside of ``module``."""
        uses = self.uses.get(id(parameter), ())
        inside = [use for use in uses if module in use.inside]
        return inside, [use for use in uses if module not in use.inside]

    def _obstacle_of_parameters(self, call: LayerCall) -> str | None:
        """Why autograd would sum the gradients of a parameter in another order, or precision, around a graph."""
        for name, parameter in call.module.named_parameters():
            inside, outside = self._uses_of(parameter, call.module)
            casts = sum(use.is_cast for use in inside)
            count = len(inside) - max(casts - 1, 0) if call.autocast.casts_once else len(inside)
            if count > 1 and outside:
                return (
                    f"its {name} is used several times inside, and outside as well, and autograd adds the gradients of "
                    "all these uses one by one"
                )
            is_cast = [any(use.is_cast for use in uses) for uses in (inside, outside)]
            if all(is_cast) and call.autocast.casts_once:
                return f"its {name} is used outside as well, and autocast casts it once for all uses"
        return None

    def _note_failure(self, calls: list[LayerCall], number: int, error: Exception, is_chain: bool) -> None:
        """The capture of ``calls`` has failed, of which number ``number`` is to blame. Of a chain that one is tried
        apart, unless enough alike have failed: then none of the class is tried any more."""
        bad = calls[number]
        key = (_kind(bad.module), self._reason(bad, error))
        self._alike[key] += 1
        if self._alike[key] >= _MAX_ALIKE:
            self._leave_out(calls[number:] if is_chain else calls, bad, error)
        elif not is_chain:
            self._leave_out([bad], bad, error)

    def _leave_out(self, calls: Sequence[LayerCall], bad: LayerCall, error: Exception) -> None:
        """Of ``calls`` those that are of the class of ``bad``, which could not be captured because of ``error``."""
        for module in [call.module for call in calls if _kind(call.module) is _kind(bad.module)]:
            if module not in self.left_out:
                self.left_out[module] = self._reason(bad, error)
                self.errors[module] = error

    def _reason(self, call: LayerCall, error: Exception) -> str:
        said = str(error).removeprefix("make_graphed_callables: ").removeprefix(f"{self._label(call.module)}: ")
        is_ours = type(error) in (TypeError, ValueError, RuntimeError, CaptureError) or said != str(error)
        return said if is_ours else f"{type(error).__name__}: {said}"


def _kind(module: nn.Module) -> type:
    """The class that a module has when it is not graphed."""
    return plain_class(type(module))
