"""Why a capture failed: CUDA has one sentence for all causes; here it comes with callable, operation and line.

What no graph can hold is noted in the last warm-up and not refused there. CUDA decides what a capture allows, and code
may ask whether one is under way, and do something else then.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from te_graph.common.dispatch import (
    argument_values,
    base_name,
    bypass_modes,
    has_subclass,
    is_operator,
    is_strided,
    storage_key,
    tensors_in,
)
from te_graph.graphs.tracing.advice import advice
from te_graph.graphs.tracing.externals import TensorWatch
from te_graph.graphs.tracing.host_access import MethodWatch
from te_graph.graphs.tracing.open_checkpoints import clear_frames
from te_graph.graphs.tracing.refusals import (
    BUILDS_ON_HOST,
    COPIES,
    LEAVES_DEVICE,
    MOVING,
    READS_VALUE,
    CaptureError,
    Refusal,
    first_line,
    host_access,
    is_about_captures,
    reason_for_no_graph,
    reason_to_refuse,
    refuse_plan,
)
from te_graph.graphs.tracing.source_lines import BACKWARD, site_of, user_site

_log = logging.getLogger("te_graph")
_MAX_NAMED = 4
_EARLIER = "due to a previous error"
# What CUDA says where a backward goes on in nodes that were made outside of the capture, such as AccumulateGrad's.
_OF_OTHER_STREAMS = ("uncaptured work in another stream", "depend on a capturing blocking stream")
_HELD_HISTORY = (
    ": a loss, or another result, of an earlier call with the same parameters is still held, and with it nodes of "
    "autograd on another stream: run its backward and drop it before the capture"
)


@dataclass
class Notes:
    """What may explain that a capture fails, by the line.

    Attributes:
        refusals: the first of each line that no graph can hold.
        operators: names of all that the line calls, in order.
    """

    refusals: dict[str, Refusal] = field(default_factory=dict)
    operators: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, operation: str, reason: str | None) -> None:
        """Enter a call at the present line."""
        site = user_site()
        self.operators.setdefault(site, {})[operation] = None
        if reason is not None and site not in self.refusals:
            self.refusals[site] = Refusal(operation, reason, site, advice())

    def refusal(self, error: Exception, site: str | None) -> Refusal | None:
        """What explains ``error``, which was raised at ``site``; None where that has to speak for itself."""
        if site is None or _EARLIER in str(error):  # what the callable did not pass on
            return next(iter(self.refusals.values()), None)
        if site == BACKWARD:
            return next((one for one in self.refusals.values() if one.site.startswith(BACKWARD)), None)
        names = list(self.operators.get(site, ()))
        if site in self.refusals or type(error) is not torch.AcceleratorError or not 0 < len(names) <= _MAX_NAMED:
            return self.refusals.get(site)
        return Refusal(names[0] if len(names) == 1 else f"one of {', '.join(names)}", first_line(error), site)


class WarmUpWatch(TensorWatch):
    """A ``TensorWatch`` that notes what no graph can hold.

    Args:
        device: of the capture.
        owned: as for ``TensorWatch``.

    Attributes:
        notes: what explains that the capture fails.
        host_reads: for a capture on a GPU: storage identity -> (tensor, [...], what read it, where) of the CPU tensors
            whose values were read by no operator.
    """

    def __init__(self, device: torch.device, owned: Sequence[Tensor] = ()) -> None:
        super().__init__(owned=owned)
        self.notes = Notes()
        self._device = device
        self._methods = _Methods(device, self.notes)

    @property
    def host_reads(self) -> dict[int, tuple[Tensor, str, str]]:
        return self._methods.host_reads

    def __enter__(self) -> WarmUpWatch:
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self._methods.__exit__(*failure)

    def note_plan(self, writes: Sequence[Tensor]) -> None:
        refuse_plan()

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not has_subclass(types):
            with bypass_modes():
                self.notes.add(str(func), _reason_to_note(func, args, kwargs, self._device))
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Methods(MethodWatch):
    """Notes methods that take a tensor to the host."""

    def __init__(self, device: torch.device, notes: Notes) -> None:
        self._device = device
        self._notes = notes
        self.host_reads: dict[int, tuple[Tensor, str, str]] = {}

    def see(self, func: Callable, args: tuple, kwargs: dict) -> None:
        found = host_access(func, args, kwargs)
        if found is None:
            return
        # Of copies on a GPU the operator tells more; on the CPU there is none.
        is_of_device = args[0].device == self._device and found[1] in (READS_VALUE, LEAVES_DEVICE)
        if self._device.type == "cpu" or (is_of_device and not _is_asynchronous(args, kwargs)):
            self._notes.add(*found)
        elif found[1].startswith(READS_VALUE):
            for tensor in tensors_in((args, kwargs)):
                if tensor.device.type == "cpu" and is_strided(tensor):
                    self.host_reads.setdefault(storage_key(tensor), (tensor.detach(), found[0], user_site()))


def _is_asynchronous(args: tuple, kwargs: dict) -> bool:
    """True where a method that copies was given ``non_blocking=True``, in whichever form."""
    return bool(kwargs.get("non_blocking")) or any(arg is True for arg in args)


def _reason_to_note(func: Any, args: tuple, kwargs: dict, device: torch.device) -> str | None:
    """Why a capture on ``device`` is likely to fail at this call; None where it is not."""
    if device.type == "cpu":
        return reason_to_refuse(func, args, kwargs)
    if not is_operator(func):
        return reason_for_no_graph(func, args, kwargs, device)
    name, tensors = base_name(func), list(tensors_in((args, kwargs)))
    if name == "lift_fresh":
        return BUILDS_ON_HOST if tensors[0].device == device else None
    if name in COPIES:
        return LEAVES_DEVICE if _waits(func, args, kwargs, tensors) else None
    # What moves a tensor, and what works on the host, is done once, and unknown to CUDA.
    if name in MOVING or (tensors and all(tensor.device.type == "cpu" for tensor in tensors)):
        return None
    return reason_for_no_graph(func, args, kwargs, device)


def _waits(func: torch._ops.OpOverload, args: tuple, kwargs: dict, tensors: list[Tensor]) -> bool:
    """True for copies between host and device that wait for the device: all but those of pinned memory that need not.

    What is copied to a new tensor on the host without waiting is pinned there.
    """
    given = {argument.name: value for argument, value in argument_values(func, args, kwargs)}
    target = torch.device(given.get("device") or tensors[0].device)
    if len({target.type, *(tensor.device.type for tensor in tensors)}) == 1:
        return False
    return not (given.get("non_blocking") and all(t.is_pinned() for t in tensors if t.device.type == "cpu"))


@contextlib.contextmanager
def explained(label: str, what: str, notes: Notes | None = None, advice: str = "") -> Iterator[None]:
    """Around ``what``, "the warm-up" or "the capture" of the callable ``label``: exceptions from it name both.

    Args:
        notes: around a capture: of its ``WarmUpWatch``.
        advice: what to say besides of what the callable raises.

    Raises:
        CaptureError: for what CUDA, or torch, says of captures; names the operation and the line.
    """
    try:
        yield
    except CaptureError as error:
        if not _names(error, label):
            error.args = (f"{label}: {error}",)
        raise
    except Exception as error:
        site = site_of(error)
        if not _names(error, label):
            if notes is not None and is_about_captures(error):
                said = first_line(error) if site is None else f"{first_line(error)}; at {site}"
                said += _HELD_HISTORY if any(words in said for words in _OF_OTHER_STREAMS) else ""
                clear_frames(error)  # what was computed would be held by cycles that torch's errors are in
                raise CaptureError(f"{label}: {notes.refusal(error, site) or said}") from error
            add_note(error, f"raised in {what} of {label}" + (f", at {site}" if site else "") + advice)
        raise


def _names(error: Exception, label: str) -> bool:
    return str(error).startswith(f"{label}: ")


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note``; before Python 3.11, which has none, the log tells it."""
    add = getattr(error, "add_note", None)
    if add is None:
        _log.warning("%s: %s", type(error).__name__, note)
    else:
        add(note)
