"""What makes a module or function replay: the class of graphed modules, and a proxy of functions."""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from te_graph.common.environment import is_disabled
from te_graph.common.fp8_calls import excuse_region
from te_graph.common.held_signals import signals_held
from te_graph.common.opaque import opaque
from te_graph.common.own_objects import name_of_itself
from te_graph.graphs.callables.handle import Handle
from te_graph.graphs.callables.late_capture import LateCaptures
from te_graph.graphs.capture.group import CaptureGroup
from te_graph.graphs.capture.options import Options
from te_graph.graphs.capture.request import Job
from te_graph.graphs.capture.session import capture_all
from te_graph.graphs.graphed_class import graphed_class, set_class
from te_graph.graphs.step_state import StepState


class FunctionProxy:
    """A function that replays its graph; ``te_graph`` is its handle."""

    def __init__(self, function: Callable[..., Any], handle: Handle) -> None:
        functools.update_wrapper(self, function, updated=("__dict__",) if inspect.isfunction(function) else ())
        self._function = function
        self.te_graph = handle

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.te_graph.call(self._function, args, kwargs)

    def __copy__(self) -> Callable[..., Any]:
        return copy.copy(self._function)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self._function, memo)

    def __reduce__(self) -> str | tuple:
        """By name, where this object is what the function's name stands for; else as the function itself."""
        return name_of_itself(self) or (operator.getitem, ((self._function,), 0))


@signals_held()
def capture_and_install(
    jobs: Sequence[Job], group: CaptureGroup, *, is_chain: bool, step_state: StepState | None = None
) -> tuple[nn.Module | FunctionProxy, ...]:
    """Capture the callables of ``jobs``, and let their calls replay; what replays, one each. With TE_GRAPH_DISABLE=1
    nothing is captured.

    Raises:
        TypeError, ValueError, RuntimeError: as ``make_graphed_callables``; everything is then as before.
    """
    excuse_region()
    prepare([job.target for job in jobs])
    entries = [] if is_disabled() else capture_all(group, jobs, is_chain)
    handles = [Handle(job, step_state) for job in jobs]
    try:
        for handle, entry in zip(handles, entries, strict=False):
            handle.arm(entry, group)
        return tuple(install(job.target, handle) for job, handle in zip(jobs, handles, strict=True))
    except BaseException:
        for handle in handles:
            handle.reset()
        raise


def install_late(
    jobs: Sequence[Job], options: Options, step_state: StepState | None
) -> tuple[nn.Module | FunctionProxy, ...]:
    """Let each callable of ``jobs`` capture at its first call that trains; what replays then, one each.

    Raises:
        TypeError: a module cannot take the class of graphed modules.
    """
    excuse_region()
    prepare([job.target for job in jobs])
    late = LateCaptures(options)
    graphed = []
    for job in jobs:
        handle = Handle(job, step_state)
        handle.wait(late)
        graphed.append(install(job.target, handle))
    return tuple(graphed)


def prepare(targets: list[Any]) -> None:
    """Try on each module of ``targets`` what ``install`` will do, so that it cannot fail once all are captured.

    Raises:
        TypeError: a module cannot take the class of graphed modules.
    """
    for target in targets:
        if isinstance(target, nn.Module):
            kind = type(target)
            set_class(target, graphed_class(kind))
            set_class(target, kind)


def install(target: nn.Module | Callable[..., Any], handle: Handle) -> nn.Module | FunctionProxy:
    """Make ``target`` replay through ``handle``: a module in place, a function by wrapping it."""
    if not isinstance(target, nn.Module):
        return FunctionProxy(target, handle)
    kind = graphed_class(type(target))
    handle.own_forward = vars(target).pop("forward", None)
    vars(target)["te_graph"] = handle
    set_class(target, kind)
    return target
