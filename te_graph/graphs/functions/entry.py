"""One signature of a ``graphed`` function: how to tell it, and how to replay it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from te_graph import _C
from te_graph.graphs.arguments.signature import ResultSpec
from te_graph.graphs.functions.result_views import ResultView
from te_graph.graphs.guards.values import value_of
from te_graph.graphs.tracing.calls import Call
from te_graph.graphs.tracing.optimizer_advice import advice_on_change
from te_graph.graphs.tracing.refusals import CaptureError

CPU = torch.device("cpu")
CHANGES_STATE = (
    "{}: changes the state of Python objects at every call, which a replay would not do: {}; make it a tensor on the "
    "device, return it, or change it outside"
)


@dataclass(frozen=True)
class FoundResult:
    """A result that the function did not make: found anew at each call.

    Attributes:
        step: of the guard, to the tensor, or to the one whose ``.grad`` it is.
        view: what the result is of its memory; None: the very object.
    """

    step: int
    is_grad: bool
    view: ResultView | None

    def of(self, found: Any) -> Any:
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
        found_results: the others, as they are found.
        found_steps: their steps of the guard.
        order: of each result, the number among ``own``, then ``found_results``.
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
    found_results: list[FoundResult] = field(default_factory=list)
    found_steps: list[int] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    checks: list[Callable[[], None]] = field(default_factory=list)
    nbytes: int = 0
    nodes: int = 0
    seconds: float = 0.0
    pool: Any = None

    def __post_init__(self) -> None:
        self.device = next((device for device in self.devices if device.type == "cuda"), CPU)
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
            raise CaptureError(CHANGES_STATE.format(self.label, self.effect) + advice_on_change(self.effect))

    def replay(self, call: Call, replay_order: _C.ReplayOrder, found: list[Any]) -> Any:
        """Replay and return the results; right after ``begin`` found no change, and what is given here."""
        if self.checks:
            for check in self.checks:
                check()
            # They are the user's code, and what follows relies on what the guard has met.
            change, found = self.guard.begin(self.settings, call, self.found_steps)
            if change:
                raise RuntimeError(f"{self.label}: {change} by what was to be checked before a replay")
        others = [result.of(one) for result, one in zip(self.found_results, found, strict=True)]
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

    def take(self, tensors: list[Tensor | FoundResult]) -> None:
        """Enter the results, [...] each: the graph's own, or where others are found."""
        self.found_results = [one for one in tensors if isinstance(one, FoundResult)]
        self.found_steps = [result.step for result in self.found_results]
        own = {id(one): one for one in tensors if isinstance(one, Tensor)}
        self.own = list(own.values())
        self.special = [(n, dict(vars(one))) for n, one in enumerate(self.own) if type(one) is not Tensor or vars(one)]
        self.own_views = list(self._views_among_own())
        numbers = {key: number for number, key in enumerate([*own, *map(id, self.found_results)])}
        self.order = [numbers[id(one)] for one in tensors]


def _made_anew(attribute: Any) -> Any:
    """A container of values is the user's to change; each call makes another one."""
    is_own = isinstance(attribute, list | dict | set) and value_of(attribute) is not None
    return copy.deepcopy(attribute) if is_own else attribute
