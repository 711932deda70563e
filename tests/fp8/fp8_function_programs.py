"""Random functions that train, evaluate and step one model, with weights of its own and others, among other events.

The reference is eager FP8. ``PYTHONPATH=.:tests/helpers python tests/fp8/fp8_function_programs.py --seeds 0:1000`` runs
many, and makes small what differs. What ``fp8_shared_programs.py`` draws are functions of several networks.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from fp8_comparisons import ComparedProgram, Seen
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import te_graph as tg

WIDTH, BATCH = 32, 16
RECIPES = (
    tg.DelayedScaling(amax_history_len=3),
    tg.DelayedScaling(amax_history_len=1),
    tg.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent", margin=1),
    tg.Float8CurrentScaling(),
)
MODELS: dict[str, Callable[[], list[nn.Module]]] = {
    "one": lambda: [tg.Linear(WIDTH, WIDTH)],
    "two": lambda: [tg.Linear(WIDTH, WIDTH), nn.GELU(), tg.Linear(WIDTH, WIDTH, bias=False)],
    "four": lambda: [tg.Linear(WIDTH, WIDTH) for _ in range(4)],
    "mlp": lambda: [tg.LayerNormMLP(WIDTH, 48)],
    "fused": lambda: [tg.LayerNormLinear(WIDTH, WIDTH), nn.GELU(), tg.Linear(WIDTH, WIDTH)],
}
_HISTORY = 8  # the column of a state where the history begins


@dataclass(frozen=True)
class Event:
    """One thing that a program does: "call" or one of ``EVENTS``, with inputs of ``scale`` drawn from ``seed``."""

    kind: str
    scale: float
    seed: int


@dataclass(frozen=True)
class Program(ComparedProgram):
    """What is drawn from ``seed``.

    Attributes:
        model: of ``MODELS``.
        recipe, other: numbers of that which it trains by, and of another one.
        is_fused: the optimizer is.
        text: what the function does, one after the other, letters of ``STEPS``.
        events: in their order.
    """

    seed: int
    model: str
    recipe: int
    other: int
    is_fused: bool
    text: str
    events: tuple[Event, ...]

    REFUSALS = (  # of functions under delayed scaling; on a GPU captures meet what earlier calls left on other streams
        *("called with them first", "to be trained there before that", "had before the capture"),
        *("one weight from its call", "to be evaluated there by the same recipe", "got the first call by that recipe"),
        "with the same parameters is still held",
    )

    @classmethod
    def draw(cls, seed: int) -> Program:
        rng = random.Random(seed)
        recipe, current = rng.randrange(len(RECIPES)), len(RECIPES) - 1
        text = rng.choice("eEt") + rng.choice(("", "E", "e"))
        if rng.random() < 0.7:
            text = "t" + "".join(rng.choice("tteEsfco") for _ in range(rng.randint(1, 5)))
        kinds = [kind for _ in range(7) for kind in ("call", *rng.choices(tuple(EVENTS), k=rng.randint(0, 3)))]
        return cls(
            seed=seed,
            model=rng.choice(tuple(MODELS)),
            recipe=recipe,
            other=rng.randrange(current) if recipe == current else current,
            is_fused=rng.random() < 0.5,
            text=text,
            events=tuple(Event(kind, 2 ** rng.uniform(-2, 2), rng.randrange(2**31)) for kind in kinds),
        )

    def pieces(self) -> list[str]:
        """Names of what can be left out: events, and letters of the text."""
        return [*map(str, range(len(self.events))), *(f"letter {number}" for number in range(len(self.text)))]

    def only(self, pieces: Sequence[str]) -> Program:
        """The program without what is not among ``pieces``."""
        events = tuple(event for number, event in enumerate(self.events) if str(number) in pieces)
        text = "".join(letter for number, letter in enumerate(self.text) if f"letter {number}" in pieces)
        return replace(self, events=events, text=text)

    def run(self, is_graphed: bool, device: str) -> tuple[Seen, int]:
        world = World(self, device)
        call: Any = tg.graphed(world.function) if is_graphed else world.function
        seen = world.run(self.events, call)
        return seen, call.info()["forward_replays"] if is_graphed else 0


class World:
    """What ``program`` works with."""

    def __init__(self, program: Program, device: str) -> None:
        torch.manual_seed(program.seed)
        self.program, self.recipe = program, RECIPES[program.recipe]
        self.model = nn.Sequential(*MODELS[program.model]()).to(device)
        self.averages = {name: parameter.detach() * 1.3 for name, parameter in self.model.named_parameters()}
        if program.is_fused:
            self.optimizer: Any = torch.optim.AdamW(
                self.model.parameters(), lr=0.03, fused=True, capturable=device == "cuda"
            )
        else:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3, momentum=0.5)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.x = torch.zeros(BATCH, WIDTH, device=device)
        self.pending: list[Tensor] = []  # losses [] of checkpoints
        self.saved: Any = None

    def function(self) -> list[Tensor]:
        """What the text says, of ``x``."""
        return [value for letter in self.program.text for value in STEPS[letter](self)]

    def run(self, events: Sequence[Event], call: Callable[[], list[Tensor]]) -> Seen:
        """What was seen after each event, and the states at the end."""
        seen: Seen = []
        for number, event in enumerate(events):
            if event.kind not in "SDpe" or set("sf") & set(self.program.text):  # a backward is to find its weights
                self.finish()
            x = torch.randn(self.x.shape, generator=torch.Generator().manual_seed(event.seed))
            self.x.copy_(x * event.scale)
            results = call() if event.kind == "call" else EVENTS[event.kind](self)
            seen += [(f"event {number}, {event.kind}: result", value.detach().clone()) for value in results]
            for name, parameter in self.model.named_parameters():
                seen.append((f"event {number}, {event.kind}: {name}", parameter.detach().clone()))
                seen.append((f"event {number}, {event.kind}: gradient of {name}", parameter.grad.clone()))
        self.finish()
        for module in self.model.modules():
            if getattr(module, "fp8", None) is not None:
                module.fp8.update_if_due()
        for name, state in tg.fp8_state_dict(self.model).items():
            if state[:, _HISTORY:].any():  # to one that is empty a capture adds its length
                seen.append((f"state of {name}", state))
        return seen

    def train(self) -> list[Tensor]:
        return self._backward(lambda: self.model(self.x))

    def train_in_checkpoint(self) -> list[Tensor]:
        return self._backward(lambda: checkpoint(self.model, self.x, use_reentrant=False))

    def _backward(self, forward: Callable[[], Tensor]) -> list[Tensor]:
        with tg.fp8_autocast(recipe=self.recipe):
            loss = forward().square().mean()
        loss.backward()
        return [loss.detach()]

    def evaluate(self) -> list[Tensor]:
        with torch.no_grad(), tg.fp8_autocast(recipe=self.recipe):
            return [self.model(self.x).sum()]

    def evaluate_by_other(self) -> list[Tensor]:
        with torch.no_grad(), tg.fp8_autocast(recipe=RECIPES[self.program.other]):
            return [self.model(self.x).sum()]

    def evaluate_averages(self) -> list[Tensor]:
        with torch.no_grad(), tg.fp8_autocast(recipe=self.recipe):
            return [functional_call(self.model, self.averages, (self.x,)).sum()]

    def train_fast_weights(self) -> list[Tensor]:
        """Weights that are a step further: the inner loop of a meta-learner."""
        fast = {n: (p.detach() * 1.5 - p.grad).requires_grad_() for n, p in self.model.named_parameters()}
        with tg.fp8_autocast(recipe=self.recipe):
            loss = functional_call(self.model, fast, (self.x,)).square().mean()
        return [grad.sum() for grad in torch.autograd.grad(loss, list(fast.values()))]

    def step(self) -> list[Tensor]:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return []

    def write(self) -> list[Tensor]:
        with torch.no_grad():
            next(self.model.parameters()).mul_(0.9)
        return []

    def write_data(self) -> list[Tensor]:
        next(self.model.parameters()).data.mul_(1.1)
        return []

    def write_averages(self) -> list[Tensor]:
        torch._foreach_mul_(list(self.averages.values()), 1.01)
        return []

    def save(self) -> list[Tensor]:
        self.saved = copy.deepcopy((self.model.state_dict(), tg.fp8_state_dict(self.model)))
        return []

    def load(self) -> list[Tensor]:
        if self.saved is not None:
            weights, scales = copy.deepcopy(self.saved)
            self.model.load_state_dict(weights)
            tg.load_fp8_state_dict(self.model, scales)
        return []

    def evaluate_copy(self) -> list[Tensor]:
        with torch.no_grad(), tg.fp8_autocast(recipe=self.recipe):
            return [copy.deepcopy(self.model)(self.x).sum()]

    def leave_pending(self) -> list[Tensor]:
        """A forward in a checkpoint, whose backward comes later."""
        with tg.fp8_autocast(recipe=self.recipe):
            self.pending.append(checkpoint(self.model, self.x.clone(), use_reentrant=False).sum())
        return []

    def finish(self) -> list[Tensor]:
        for loss in self.pending:
            loss.backward()
        self.pending = []
        return []


# What letters of functions, and events, do.
STEPS: dict[str, Callable[[World], list[Tensor]]] = {
    **{"t": World.train, "c": World.train_in_checkpoint, "f": World.train_fast_weights, "s": World.step},
    **{"e": World.evaluate, "o": World.evaluate_by_other, "E": World.evaluate_averages},
}
EVENTS: dict[str, Callable[[World], list[Tensor]]] = {
    **{letter: STEPS[letter] for letter in "tsecE"},
    **{"w": World.write, "d": World.write_data, "a": World.write_averages},
    **{"S": World.save, "L": World.load, "D": World.evaluate_copy, "p": World.leave_pending, "P": World.finish},
}


if __name__ == "__main__":
    sys.exit(Program.main())
