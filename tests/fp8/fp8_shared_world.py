"""What programs of fp8_shared_programs.py run in: networks that share blocks, functions over them, and events."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fp8_comparisons import Seen
from torch import Tensor, nn

import te_graph as tg

WIDTH = 32
RECIPES = (
    tg.DelayedScaling(amax_history_len=3),
    tg.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", margin=1),
    tg.Float8CurrentScaling(),
)
_HISTORY = 8  # the column of a state where the history begins


@dataclass(frozen=True)
class Step:
    """One thing that a function does.

    Attributes:
        kind: "train", "train inside" (the backward in the region, too), "evaluate" or "step".
        net: its number.
        recipe: of its region; None: it enters none.
        scale: of its input.
    """

    kind: str
    net: int
    recipe: int | None
    scale: float


@dataclass(frozen=True)
class Event:
    """One thing that a program does.

    Attributes:
        kind, how: of ``EVENTS``.
        number: of a function or a network.
        recipe: of the region that it enters.
        rows, scale, seed: of inputs.
        on_thread: it runs on a thread of its own, which is waited for.
        outer: recipe of a region around; None: there is none.
    """

    kind: str
    how: str
    number: int
    recipe: int
    rows: int
    scale: float
    seed: int
    on_thread: bool
    outer: int | None


class Block(nn.Module):
    """x [n, WIDTH] -> [n, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def region_of(recipe: int | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if recipe is None else tg.fp8_autocast(recipe=RECIPES[recipe])


def _zero_grads(net: nn.Module) -> None:
    """Gradients are there and zeros, so that what is captured adds to them."""
    for parameter in net.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _step_of(net: nn.Module, optimizer: torch.optim.Optimizer, step: Step) -> Callable[[Tensor, list[Tensor]], None]:
    """What a function does in ``step``, with an input [n, WIDTH] and results [] each."""

    def train(x: Tensor, results: list[Tensor]) -> None:
        with region_of(step.recipe):
            loss = net(x * step.scale).square().mean()
            if step.kind == "train inside":
                loss.backward()
        if step.kind == "train":
            loss.backward()
        results.append(loss.detach())

    def evaluate(x: Tensor, results: list[Tensor]) -> None:
        with torch.no_grad(), region_of(step.recipe):
            results.append(net(x * step.scale).sum())

    def update(x: Tensor, results: list[Tensor]) -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return {"evaluate": evaluate, "step": update}.get(step.kind, train)


class World:
    """Runs a program eagerly or graphed.

    Attributes:
        replays: of functions.
    """

    def __init__(
        self,
        nets: Sequence[Sequence[int]],
        functions: Sequence[Sequence[Step]],
        seed: int,
        is_graphed: bool,
        device: str,
        refusals: Sequence[str],
    ) -> None:
        torch.manual_seed(seed)
        pool = [Block().to(device) for _ in range(1 + max(block for net in nets for block in net))]
        self.nets = [nn.Sequential(*(pool[block] for block in net)) for net in nets]
        for net in self.nets:
            tg.convert_to_fp8(net, include="*")
            _zero_grads(net)
        self.optimizers = [torch.optim.SGD(net.parameters(), lr=0.3) for net in self.nets]
        self.is_graphed, self.device, self.refusals, self.replays = is_graphed, device, refusals, 0
        self._steps = functions
        self.inputs: dict[int, Tensor] = {}
        self.calls: dict[int, Callable[[Tensor], Tensor]] = {}  # what was captured of networks
        self.saved: dict[int, Any] = {}
        self.copies: list[nn.Module] = []
        self._make_functions()

    def _make_functions(self) -> None:
        """Functions over the present networks."""
        self.functions = [self._function_of(steps) for steps in self._steps]
        self.graphed: dict[int, Any] = {}

    def _function_of(self, steps: Sequence[Step]) -> Callable[[Tensor], list[Tensor]]:
        parts = [_step_of(self.nets[step.net], self.optimizers[step.net], step) for step in steps]

        def function(x: Tensor) -> list[Tensor]:  # [n, WIDTH] -> [] each
            results: list[Tensor] = []
            for part in parts:
                part(x, results)
            return results

        return function

    def run(self, events: Sequence[Event]) -> Seen:
        """What was seen after each event, and the states at the end."""
        seen: Seen = []
        for number, event in enumerate(events):
            place = f"event {number}, {event.kind} {event.how}"
            for result in self._results_of(event):
                seen.append((f"{place}: result", result.detach().clone()))
            for k, net in enumerate(self.nets):
                for name, parameter in net.named_parameters():
                    seen.append((f"{place}: {name} of {k}", parameter.detach().clone()))
                    seen.append((f"{place}: gradient of {name} of {k}", parameter.grad.clone()))
        for k, net in enumerate(self.nets):
            for module in net.modules():
                if getattr(module, "fp8", None) is not None:
                    module.fp8.update_if_due()
            for name, state in tg.fp8_state_dict(net).items():
                if state[:, _HISTORY:].any():  # to one that is empty a capture adds its length
                    seen.append((f"state of {name} of {k}", state))
        return seen

    def _results_of(self, event: Event) -> list[Tensor]:
        """[...] each."""
        results: list[Tensor] = []
        errors: list[BaseException] = []

        def act() -> None:
            with region_of(event.outer):
                results.extend(EVENTS[event.kind][0](self, event))

        def act_on_thread() -> None:
            try:
                act()
            except BaseException as error:
                errors.append(error)

        if not event.on_thread:
            act()
            return results
        thread = threading.Thread(target=act_on_thread)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results

    def _input(self, event: Event) -> Tensor:
        """[rows, WIDTH], always in one place: graphed functions read it there."""
        x = torch.randn(event.rows, WIDTH, generator=torch.Generator().manual_seed(event.seed)) * event.scale
        return self.inputs.setdefault(event.rows, torch.empty(event.rows, WIDTH, device=self.device)).copy_(x)

    def _net(self, event: Event) -> int:
        return event.number % len(self.nets)

    def _attempt(self, capture: Callable[[], Any]) -> Any:
        """What it returns; None where it is refused as documented."""
        try:
            return capture()
        except RuntimeError as error:
            if not any(words in str(error) for words in self.refusals):
                raise
            return None

    def function(self, event: Event) -> list[Tensor]:
        number, x = event.number % len(self.functions), self._input(event)
        function = self.functions[number]
        if not self.is_graphed:
            return function(x)
        if number not in self.graphed:
            self.graphed[number] = tg.graphed(function, on_mismatch=event.how)
        graphed = self.graphed[number]
        before = graphed.info()["forward_replays"]
        results = self._attempt(lambda: graphed(x))
        if results is None:
            del self.graphed[number]
            return function(x)
        self.replays += graphed.info()["forward_replays"] - before
        return [result.clone() for result in results]

    def train(self, event: Event) -> list[Tensor]:
        net, x = self._net(event), self._input(event)
        call = self.calls.get(net, self.nets[net]) if event.how == "captured" else self.nets[net]
        with region_of(event.recipe):
            loss = call(x).square().mean()
        loss.backward()
        return [loss.detach()]

    def evaluate(self, event: Event) -> list[Tensor]:
        net, x = self._net(event), self._input(event)
        call = self.calls.get(net, self.nets[net]) if event.how == "captured" else self.nets[net]
        with torch.no_grad(), region_of(event.recipe):
            return [call(x).sum()]

    def calibrate(self, event: Event) -> list[Tensor]:
        region = tg.fp8_autocast(enabled=False, calibrating=True, recipe=RECIPES[event.recipe])
        with torch.set_grad_enabled(event.how == "with gradients"), region:
            return [self.nets[self._net(event)](self._input(event)).sum()]

    def step(self, event: Event) -> list[Tensor]:
        optimizer = self.optimizers[self._net(event)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return []

    def capture(self, event: Event) -> list[Tensor]:
        """A network as it is, its blocks, or in a function, which may enter a region of its own. It has trained by the
        recipe before: docs/limits.md."""
        with region_of(event.recipe):
            loss = self.nets[self._net(event)](self._input(event)).square().mean()
        loss.backward()
        number, x = self._net(event), torch.ones(event.rows, WIDTH, device=self.device)
        net, options = self.nets[number], {"on_mismatch": "eager", "on_exhausted": "eager"}

        def call(x: Tensor) -> Tensor:  # [n, WIDTH] -> [n, WIDTH]
            with region_of(event.recipe if event.how == "own region" else None):
                return net(x)

        is_function = event.how in ("function", "own region")
        if is_function:
            self.calls[number] = call
        if not self.is_graphed:
            with region_of(None if event.how == "own region" else event.recipe):
                return []
        if is_function:
            with region_of(None if event.how == "own region" else event.recipe):
                graphed = self._attempt(lambda: tg.make_graphed_callables(call, (x,), **options))
            self.calls[number] = call if graphed is None else graphed
        elif not any(hasattr(module, "te_graph") for module in net.modules()):
            parts = (net,) if event.how == "whole" else tuple(net)
            samples = tuple((x.clone().requires_grad_(position > 0),) for position in range(len(parts)))
            with region_of(event.recipe):
                self._attempt(lambda: tg.make_graphed_callables(parts, samples, **options))
        return []

    def reset(self, event: Event) -> list[Tensor]:
        net = self._net(event)
        graphs = [
            each.te_graph
            for each in (*self.nets[net].modules(), self.calls.pop(net, None))
            if hasattr(each, "te_graph")
        ]
        for each in (*graphs, *self.graphed.values()):
            each.reset()
        return []

    def save(self, event: Event) -> list[Tensor]:
        net = self.nets[self._net(event)]
        self.saved[self._net(event)] = copy.deepcopy((net.state_dict(), tg.fp8_state_dict(net)))
        return []

    def load(self, event: Event) -> list[Tensor]:
        """Weights, scales, or both."""
        net = self._net(event)
        if net in self.saved:
            weights, scales = copy.deepcopy(self.saved[net])
            if event.how != "scales":
                self.nets[net].load_state_dict(weights)
            if event.how != "weights":
                tg.load_fp8_state_dict(self.nets[net], scales)
        return []

    def copy(self, event: Event) -> list[Tensor]:
        """A copy trains or evaluates, and is kept or not."""
        one, x = copy.deepcopy(self.nets[self._net(event)]), self._input(event)
        _zero_grads(one)
        with torch.set_grad_enabled("trains" in event.how), region_of(event.recipe):
            loss = one(x).square().mean()
        if "trains" in event.how:
            loss.backward()
            torch.optim.SGD(one.parameters(), lr=0.3).step()
        self.copies += [one] * ("kept" in event.how)
        return [loss.detach(), *(parameter.detach() for parameter in one.parameters())]

    def resume(self, event: Event) -> list[Tensor]:
        """A new network goes on with weights and scales of the old one, and functions with the new one."""
        number = self._net(event)
        old = self.nets[number]
        new = nn.Sequential(*(Block() for _ in old)).to(self.device)
        tg.convert_to_fp8(new, include="*")
        new.load_state_dict(old.state_dict())
        tg.load_fp8_state_dict(new, tg.fp8_state_dict(old))
        _zero_grads(new)
        self.nets[number], self.optimizers[number] = new, torch.optim.SGD(new.parameters(), lr=0.3)
        self.calls.pop(number, None)
        self.saved.pop(number, None)
        self._make_functions()
        return []

    def freeze(self, event: Event) -> list[Tensor]:
        """Or let train again."""
        parameters = list(self.nets[self._net(event)].parameters())
        parameter = parameters[event.seed % len(parameters)]
        parameter.requires_grad_(not parameter.requires_grad)
        return []

    def edit(self, event: Event) -> list[Tensor]:
        weight = self.nets[self._net(event)][0].up.weight
        with torch.no_grad():
            (weight.data if event.how == "data" else weight).mul_(0.7)
        return []


# What each kind of event does, and the ways in which it may.
EVENTS: dict[str, tuple[Callable[[World, Event], list[Tensor]], tuple[str, ...]]] = {
    "function": (World.function, ("eager", "capture", "capture")),
    "train": (World.train, ("captured", "")),
    "evaluate": (World.evaluate, ("captured", "")),
    "calibrate": (World.calibrate, ("with gradients", "")),
    "step": (World.step, ("",)),
    "capture": (World.capture, ("function", "own region", "own region", "whole", "blocks")),
    "reset": (World.reset, ("",)),
    "save": (World.save, ("",)),
    "load": (World.load, ("scales", "weights", "both")),
    "copy": (World.copy, ("trains", "trains, kept", "evaluates", "evaluates, kept")),
    "resume": (World.resume, ("",)),
    "freeze": (World.freeze, ("",)),
    "edit": (World.edit, ("", "data")),
}
