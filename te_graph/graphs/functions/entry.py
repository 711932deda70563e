"""One signature of a ``graphed`` function: how to tell it, and how to replay it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from te_graph import _C
from te_graph.graphs.arguments.signature import ResultNest
from te_graph.graphs.functions.renewals import Renewal
from te_graph.graphs.functions.result_tensors import ResultTensors
from te_graph.graphs.tracing.calls import Call
from te_graph.graphs.tracing.optimizer_advice import advice_on_change

CPU = torch.device("cpu")


@dataclass(eq=False)
class FunctionEntry:
    """What is known of one signature: how to tell it, and once captured, how to replay it.

    Attributes:
        guard: over all that the function can be seen to use.
        devices: where it works.
        multiplies: it multiplies matrices.
        effect: what the first call, or one that was to be captured, has changed about Python objects, if anything.
        before: then, how everything was before it, of the first call but addresses.
        device: the GPU, if the function uses one; else the CPU.
        settings: of the process and the thread, at the first call or the capture.
        graph: None until captured.
        results: nest of the results.
        tensors: those among them.
        renewals: what each call makes anew and leaves.
        host_steps: what its ops do on the host before they launch.
        fp8_region: the number of the region around the call.
        checks: what is called before each replay: what ``before_replay`` was given in the capture, and these steps.
        nbytes: memory that belongs to the graph.
        nodes: of the graph.
        fp8_calls: of FP8 layers in it.
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
    fp8_region: int = field(init=False)
    graph: _C.CapturedGraph | None = None
    results: ResultNest | None = None
    tensors: ResultTensors = field(default_factory=ResultTensors)
    renewals: list[Renewal] = field(default_factory=list)
    host_steps: _C.HostSteps = field(default_factory=_C.HostSteps)
    checks: list[Callable[[], None]] = field(default_factory=list)
    nbytes: int = 0
    nodes: int = 0
    fp8_calls: int = 0
    seconds: float = 0.0
    pool: Any = None

    def __post_init__(self) -> None:
        self.device = next((device for device in self.devices if device.type == "cuda"), CPU)
        self.fp8_region = _C.fp8_region()
        self._steps: list[int] = []  # of the guard: what a replay needs
        self.settings = _C.Settings(self.device, with_modes=True, with_autocast_cache=True, with_autocast_dtype=True)

    def find(self, tensors: ResultTensors, renewals: list[Renewal]) -> None:
        """Let replays find what they need for ``tensors`` and ``renewals``."""
        self.tensors, self.renewals = tensors, renewals
        self._steps = [*tensors.found_steps, *(step for renewal in renewals for step in renewal.steps)]

    def change(self, call: Call) -> str:
        """How ``call`` differs from the one that this entry is for; empty when it does not."""
        change = self.guard.check(call) or self.host_steps.change() or self.settings.change()
        # Of one with a graph the host steps know whether the region matters.
        if not change and self.graph is None and self.fp8_region != _C.fp8_region():
            return "the region of te_graph.fp8_autocast changed"
        return change

    def begin(self, call: Call) -> tuple[str, list[Any]]:
        """``change``, and if there is none what a replay needs; it must follow, since versions have been moved on."""
        if self.checks and not self.renewals:  # which come in between
            return self.change(call), []
        return self.guard.begin(self.settings, call, self._steps)

    def note_undone(self, effect: str, before: _C.FunctionGuard) -> None:
        """That a call has had this effect."""
        self.effect, self.before = effect, before

    def what_is_undone(self, call: Call) -> str:
        """What such a call has changed, where that is as before it by now: ``call`` changes it again. The object may
        be another one, which had its first call still before it, so nothing tells whether each call will."""
        if self.before is None or self.before.check(call):
            return ""
        change = self.effect + advice_on_change(self.effect)
        return f"such calls change Python objects, which a replay would not do: {change}"

    def replay(self, call: Call, replay_order: _C.ReplayOrder, found: list[Any]) -> Any:
        """Replay and return the results; right after ``begin`` found no change, and what is given here."""
        if self.checks:
            for check in self.checks:
                check()
            # They are the user's code, and what follows relies on what the guard has met.
            change, found = self.guard.begin(self.settings, call, self._steps)
            if change:
                raise RuntimeError(f"{self.label}: {change} by what was to be checked before a replay")
        tensors = self.tensors
        others = None if tensors.is_lent_alone else tensors.found(found)
        # Tensors of this call alone, as in eager execution: its user may set attributes, or hooks.
        lent = replay_order.replay(self.graph, tensors.lent)
        if self.checks:
            self.host_steps.finish()
        return self.results.unflatten(lent if others is None else tensors.build(lent, others))

    def settle(self, found: list[Any]) -> None:
        """Right after the capture: let each of the ``renewals`` see who holds what it has made."""
        for renewal, roots in self._roots(found):
            renewal.settle(roots, found)

    def renew(self, call: Call, found: list[Any]) -> tuple[str, list[Any]]:
        """Before a replay: renew what each call makes and others hold. Return where that cannot be done, and what the
        guard has ``found``, or finds then."""
        are_new = False
        for renewal, roots in self._roots(found):
            held, is_new = renewal.renew(roots)
            if held:
                return held, found
            are_new |= is_new
        if not are_new:
            return "", found
        change, found = self.guard.find(call, self._steps)
        if change:
            raise RuntimeError(f"{self.label}: {change} by copies that were to take the places of what others hold")
        return "", found

    def _roots(self, found: list[Any]) -> Iterator[tuple[Renewal, list[Any]]]:
        start = len(self.tensors.found_steps)
        for renewal in self.renewals:
            end = start + len(renewal.steps)
            yield renewal, found[start:end]
            start = end
