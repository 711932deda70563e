"""Random programs of training: a model, a loop, and what happens between its steps.

PYTHONPATH=tests/helpers python -m tests.graphs.layers.random_models.training_programs  # or with seeds: 0:200
"""

from __future__ import annotations

import contextlib
import random
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from program_outcomes import Outcome
from torch import Tensor, nn

import te_graph as tg

from .outcomes import graph, outcome_of, rarely, replays_of, run_many
from .training_events import EVENTS, MASKS
from .training_layers import WIDTH, LayerOptions
from .training_model import TOKENS, Model, ModelOptions

_STEPS = 7
_OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "adam foreach": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, foreach=True),
}
_GRAPH_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"chain": False},
    {"max_in_flight": 2},
    {"on_mismatch": "eager"},
    {"hooks": "captured"},
    {"accumulate_grads": False},
)


@dataclass(frozen=True)
class Loop:
    """How a model is captured and trained.

    Attributes:
        optimizer: a name of ``_OPTIMIZERS``.
        captured_at: the step before which layers are captured.
        form: what ``graph_layers`` is given: "dict", "tuple", or a function: "step".
        autocast: around forwards.
        micro_batches: of a step.
        clip: "torch", "te_graph" or "".
        set_to_none: by ``zero_grad``.
        mask: one of ``MASKS``.
        has_gradients: when layers are captured.
        options: of ``graph_layers``.
        frozen: "layer", "embedding" or "".
        evaluates_norm: batch norms are always in eval mode.
        dtype: of weights.
    """

    optimizer: str
    captured_at: int
    form: str
    autocast: bool
    micro_batches: int
    clip: str
    set_to_none: bool
    mask: str
    has_gradients: bool
    options: dict[str, Any]
    frozen: str
    evaluates_norm: bool
    dtype: torch.dtype

    @staticmethod
    def draw(rng: random.Random) -> Loop:
        names = {"layers": "layers.*"} if rarely(rng, False, True) else {}
        return Loop(
            optimizer=rng.choice(tuple(_OPTIMIZERS)),
            captured_at=rng.choice((0, 0, 1, 2)),
            form=rng.choice(("dict", "tuple", "step", "step")),
            autocast=rarely(rng, False, True),
            micro_batches=rng.choice((1, 1, 2, 3)),
            clip=rng.choice(("", "", "torch", "te_graph")),
            set_to_none=rng.random() < 0.7,
            mask=rarely(rng, *MASKS),
            has_gradients=rarely(rng, False, True),
            options={**rarely(rng, *_GRAPH_OPTIONS), **names},
            frozen=rarely(rng, "", "layer", "embedding"),
            evaluates_norm=rarely(rng, False, True),
            dtype=rarely(rng, torch.float32, torch.float64),
        )


@dataclass
class Program:
    """A model, a loop, and of each step the events before it, with a number for each."""

    seed: int
    layer: LayerOptions = field(init=False)
    model: ModelOptions = field(init=False)
    loop: Loop = field(init=False)
    events: list[list[tuple[str, int]]] = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.layer, self.model, self.loop = LayerOptions.draw(rng), ModelOptions.draw(rng), Loop.draw(rng)
        counts = [rng.choice((0, 0, 1, 1, 2)) for _ in range(_STEPS)]
        self.events = [[(rng.choice(tuple(EVENTS)), rng.randrange(100)) for _ in range(count)] for count in counts]
        self._avoid_limits()

    def _avoid_limits(self) -> None:
        """Leave out what docs/limits.md say rounds otherwise, or raises an error."""
        names = {name for events in self.events for name, _ in events}
        if self.model.autocast == "on" or self.loop.autocast or "toggle_autocast" in names:
            # Eager execution casts a weight once for all that use it in a region, and adds gradients of the cast.
            self.layer = replace(self.layer, shares_down=False)
            self.model = replace(self.model, uses_first_again=False, is_tied=False)
            if self.model.skip == "weight" or self.model.config in ("weight", "tensors"):
                self.model = replace(self.model, skip="", config="")
        if self.model.between == "in place" and self.layer.result in ("dict", "dataclass"):
            # What is changed is needed for the gradient of the other result, also where that one gets none.
            self.layer = replace(self.layer, result="pair")
        if self.model.between == "permuted":
            # How the gradient of a result lies is seen in a step with a backward alone, and is to stay so.
            self.loop = replace(self.loop, form="step")
            self.events = [[one for one in events if one[0] != "scale_results"] for events in self.events]

    def outcome(self) -> Outcome:
        return outcome_of(lambda is_graphed: Training(self, is_graphed).run())


class Training:
    """One run of a program, which events change.

    Args:
        program: what is run.
        is_graphed: by ``graph_layers``.

    Attributes:
        model, optimizer: those that are trained.
        generator: of batches, and of what events draw.
        rows, length, mask, extra: what batches are like.
        has_autocast: forwards run under it.
        number: of the step.
        habits: what the present step does besides: see training_events.py.
        seen: all that is compared.
        saved: a state of the model.
        replays: the most that there were.
    """

    def __init__(self, program: Program, is_graphed: bool) -> None:
        torch.manual_seed(program.seed)
        self.program, self.is_graphed, self.loop = program, is_graphed, program.loop
        self.model = Model(program.model, program.layer).to(self.loop.dtype)
        if self.loop.frozen == "layer":
            self.model.each()[0].requires_grad_(False)
        elif self.loop.frozen == "embedding":
            self.model.embed.requires_grad_(False)
            self.model.positions.requires_grad_(False)
        self.train_mode()
        self.renew_optimizer()
        self.generator = torch.Generator().manual_seed(program.seed + 1)
        self.rows, self.length, self.mask, self.extra = 3, 6, self.loop.mask, None
        self.has_autocast, self.number, self.habits = self.loop.autocast, 0, set[str]()
        self.report: Any = None
        self.seen: list[Any] = []
        self.saved: dict[str, Tensor] = {}
        self.replays = 0

    def train_mode(self) -> None:
        self.model.train()
        for module in self.model.modules():
            if self.loop.evaluates_norm and isinstance(module, nn.BatchNorm1d):
                module.eval()

    def renew_optimizer(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = _OPTIMIZERS[self.loop.optimizer](trained)

    def batch(self) -> dict[str, Any]:
        def tokens() -> Tensor:
            return torch.randint(TOKENS, (self.rows, self.length), generator=self.generator)

        def noise(*shape: int) -> Tensor:
            return (torch.rand(*shape, generator=self.generator) * 0.1).to(self.loop.dtype)

        batch = {"ids": tokens(), "labels": tokens(), "mask": None, "extra": self.extra}
        if self.mask == "bool":
            batch["mask"] = torch.rand(self.rows, self.length, generator=self.generator) < 0.2
        elif self.mask == "expanded":
            batch["mask"] = noise(1, self.length, 1).expand(self.rows, -1, WIDTH)
        elif self.mask == "strided":
            batch["mask"] = noise(self.rows, self.length, 2 * WIDTH)[..., ::2]
        return batch

    def autocast(self) -> AbstractContextManager:
        return torch.autocast("cpu", torch.bfloat16) if self.has_autocast else contextlib.nullcontext()

    def out(self, model: nn.Module, batch: dict[str, Any] | None = None) -> dict[str, Tensor]:
        """What ``model`` gives for ``batch``, or a new one."""
        with self.autocast():
            return model(**(self.batch() if batch is None else batch))

    def note(self, what: str, *values: Any) -> None:
        """Keep copies of ``values`` for the comparison."""
        copied = torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), values)
        self.seen.append((f"step {self.number}: {what}", *copied))

    def gradients(self, model: nn.Module) -> dict[str, Tensor | None]:
        return {name: p.grad for name, p in model.named_parameters()}

    def capture(self) -> None:
        batch = self.batch()
        if not self.is_graphed:
            return

        def step() -> None:
            self.out(self.model, batch)["loss"].backward()

        given = {"dict": batch, "tuple": tuple(batch.values()), "step": step}[self.loop.form]
        with self.autocast() if self.loop.form != "step" else contextlib.nullcontext():
            self.report = graph(self.model, given, **self.loop.options)

    def reset(self) -> None:
        """Free the graphs."""
        if self.report is not None:
            self.report.reset()

    def run(self) -> tuple[list[Any], int]:
        """What was seen, and how often forwards replayed."""
        for number, events in enumerate(self.program.events):
            self.number = number
            self.habits.clear()
            if self.number == self.loop.captured_at:
                if self.loop.has_gradients:
                    self.out(self.model)["loss"].backward()
                self.capture()
            for name, value in events:
                EVENTS[name](self, value)
            for _ in range(self.loop.micro_batches):
                self._train()
            self._update()
            self.replays = max(self.replays, replays_of(self.model))
        return self.seen, self.replays

    def _train(self) -> None:
        """Forward and backward of one micro-batch."""
        out = self.out(self.model)
        scale = 0.125 if "scale_loss" in self.habits else 1.0
        retains = "retain_graph" in self.habits
        outside = [p for p in (self.model.embed.weight, self.model.positions) if p.requires_grad]
        if "autograd_grad" in self.habits and outside:
            self.note("grad", torch.autograd.grad(out["loss"], outside, retain_graph=True, allow_unused=True))
        if "backward_to_inputs" in self.habits and outside:
            out["loss"].backward(inputs=outside, retain_graph=True)
        other = self.out(self.model) if "two_forwards" in self.habits else None
        (out["loss"] * scale).backward(retain_graph=retains)
        if other is not None:
            (other["loss"] * scale).backward()
            self.note("second forward", other)
        elif retains:
            (out["loss"] * 0.5).backward()
        self.note("forward", out)

    def _update(self) -> None:
        self.note("gradients", self.gradients(self.model))
        if self.loop.clip:
            clip = tg.clip_grad_norm_ if self.loop.clip == "te_graph" else nn.utils.clip_grad_norm_
            self.note("norm", clip(self.model.parameters(), 1.0))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.loop.set_to_none)
        self.note("state", self.model.state_dict(), dict(self.model.named_buffers()), torch.get_rng_state())
        self.note("flags", {name: p.requires_grad for name, p in self.model.named_parameters()})


def main(seeds: str = "0:50") -> None:
    run_many(Program, seeds)


if __name__ == "__main__":
    main(*sys.argv[1:])
