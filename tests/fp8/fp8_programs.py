"""Random trainings of models with FP8 layers: eagerly, and with some of their layers graphed.

The reference is the eager training. ``PYTHONPATH=.:tests/helpers python tests/fp8/fp8_programs.py --seeds 0:1000`` runs
many, and makes small what differs.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fp8_comparisons import ComparedProgram, Seen
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import te_graph as tg

WIDTHS = (16, 32, 48)
RECIPES: tuple[Callable[[], object], ...] = (
    lambda: tg.DelayedScaling(amax_history_len=3),
    lambda: tg.DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"),
    lambda: tg.DelayedScaling(amax_history_len=4, margin=1, fp8_format=tg.Format.E4M3),
    lambda: tg.Float8CurrentScaling(),
)


class Block(nn.Module):
    """x [n, width] -> [n, width], in one of several ways.

    Args:
        kind: which.
        width: of x.
    """

    KINDS = ("mlp", "gated", "twice", "frozen", "misfit", "plain", "no_bias", "checkpoint", "inner_off", "detached")

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind = kind
        hidden = 20 if kind == "misfit" else 2 * width
        self.norm = nn.LayerNorm(width)
        make = nn.Linear if kind == "plain" else tg.Linear
        self.up = make(width, hidden, bias=kind != "no_bias")
        self.gate = make(width, hidden) if kind == "gated" else None
        self.down = make(hidden, width, bias=kind != "no_bias")
        if kind == "frozen":
            self.up.requires_grad_(False)

    def inner(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        if self.gate is not None:
            hidden = hidden * self.gate(x)
        if self.kind == "twice":
            hidden = hidden + self.up(x * 0.5)
        return self.down(hidden)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.kind == "detached":
            y = y.detach()
        if self.kind == "checkpoint":
            return x + checkpoint(self.inner, y, use_reentrant=False)
        if self.kind == "inner_off":
            with tg.fp8_autocast(enabled=False):
                y = y + self.inner(y)
        return x + self.inner(y)


class Model(nn.Module):
    """x [n, width] -> [n, width] by blocks, some of which may be one module."""

    def __init__(self, kinds: list[str], width: int, is_tied: bool) -> None:
        super().__init__()
        blocks = [Block(kind, width) for kind in kinds]
        self.blocks = nn.ModuleList([*blocks, blocks[0]] if is_tied else blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass
class Program(ComparedProgram):
    """A training.

    Attributes:
        kinds, width, is_tied: of the model.
        dtype: of its parameters; with float32 calls are under torch.autocast of bfloat16.
        recipes: which one is in force in each step.
        graphed: numbers of the blocks that are graphed; None: the whole model is.
        options: of ``make_graphed_callables``.
        steps: for each step its events.
    """

    seed: int
    kinds: list[str]
    width: int
    is_tied: bool
    dtype: torch.dtype
    recipes: list[int]
    graphed: list[int] | None
    options: dict[str, Any]
    steps: list[list[str]] = field(default_factory=list)

    EVENTS = (
        *("train", "train", "train", "two", "evaluate", "outside", "edit", "copy", "save", "grad"),
        *("hold", "zero", "hook", "swap", "flat", "export"),  # of .grad
    )

    @classmethod
    def draw(cls, seed: int) -> Program:
        rng = random.Random(seed)
        kinds = [rng.choice(Block.KINDS) for _ in range(rng.randint(1, 4))]
        steps = [[rng.choice(cls.EVENTS) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(2, 5))]
        steps[-1].append("train")  # so that all layers have a place in the scope of the last recipe
        first = rng.randrange(len(RECIPES))
        changes = rng.random() < 0.3
        whole, is_tied = rng.random() < 0.2, rng.random() < 0.2
        if whole and kinds[0] == "inner_off":
            is_tied = False  # a documented limit: uses in FP8 and others of one parameter in a graph, with a hook
        # A graph that is replayed twice before one backward adds gradients one after the other.
        some = range(is_tied, len(kinds))
        return cls(
            seed=seed,
            kinds=kinds,
            width=rng.choice(WIDTHS),
            is_tied=is_tied,
            # A capture in the middle of a forward empties the cache of torch.autocast, by which uses share a cast.
            dtype=torch.bfloat16 if is_tied else rng.choice((torch.bfloat16, torch.float32)),
            recipes=[rng.randrange(len(RECIPES)) if changes else first for _ in steps],
            graphed=None if whole or not some else sorted(rng.sample(some, rng.randint(1, len(some)))),
            options={
                "max_in_flight": rng.choice((2, 4)),
                "on_exhausted": "eager",
                "on_mismatch": rng.choice(("capture", "eager")),
            },
            steps=steps,
        )

    def pieces(self) -> list[str]:
        """Names of what can be left out: events, and all blocks but the first."""
        events = [f"event {step} {number}" for step, events in enumerate(self.steps) for number in range(len(events))]
        return [*events, *(f"block {number}" for number in range(1, len(self.kinds)))]

    def only(self, pieces: Sequence[str]) -> Program:
        """The program without what is not among ``pieces``."""
        kept = [number for number in range(len(self.kinds)) if number == 0 or f"block {number}" in pieces]
        graphed = None if self.graphed is None else [kept.index(number) for number in self.graphed if number in kept]
        steps = [
            [event for number, event in enumerate(events) if f"event {step} {number}" in pieces]
            for step, events in enumerate(self.steps)
        ]
        return replace(self, kinds=[self.kinds[number] for number in kept], graphed=graphed, steps=steps)

    def run(self, is_graphed: bool, device: str) -> tuple[Seen, int]:
        torch.manual_seed(self.seed)
        model = Model(self.kinds, self.width, self.is_tied).to(device, self.dtype)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        self._values, self._held = torch.Generator().manual_seed(self.seed), []
        graphed: list[nn.Module] = []
        if is_graphed and self.graphed != []:
            graphed = [model] if self.graphed is None else [model.blocks[number] for number in self.graphed]
            with self._region(0, device):
                samples = tuple((self._input(model, device),) for _ in graphed)
                self._values.manual_seed(self.seed)
                tg.make_graphed_callables(tuple(graphed), samples, **self.options)
        found: Seen = []
        for number, events in enumerate(self.steps):
            for position, event in enumerate(events):
                name = f"step {number}, {position}: {event}"
                found += [(name, value) for value in self._do(event, model, number, device)]
            grads = [
                (f"step {number}: gradient of {n}", p.grad) for n, p in model.named_parameters() if p.grad is not None
            ]
            found += [(name, grad.detach().clone()) for name, grad in grads]
            optimizer.step()
            optimizer.zero_grad()
        found += [(name, value.detach().clone()) for name, value in model.named_parameters()]
        found += [(f"{number} of the gradients that are held", grad) for number, grad in enumerate(self._held)]
        # Magnitudes that no update has taken up yet may be taken up sooner on one side.
        for module in model.modules():
            if isinstance(module, tg.Linear) and module.fp8 is not None:
                module.fp8.update_if_due()
        found += list(tg.fp8_state_dict(model).items())
        replays = sum(module.te_graph.info()["forward_replays"] for module in graphed)
        return found, replays

    def _input(self, model: nn.Module, device: str) -> Tensor:
        """[5, width]."""
        x = torch.randn(5, self.width, generator=self._values) * 2 ** random.Random(self.seed).uniform(-3, 3)
        return x.to(device, torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32).requires_grad_()

    @contextlib.contextmanager
    def _region(self, step: int, device: str, enabled: bool = True) -> Iterator[None]:
        """The regions of a call: fp8_autocast, and torch.autocast around it where parameters are float32."""
        is_plain = self.dtype == torch.bfloat16
        autocast = contextlib.nullcontext() if is_plain else torch.autocast(torch.device(device).type, torch.bfloat16)
        with autocast, tg.fp8_autocast(enabled=enabled, recipe=RECIPES[self.recipes[step]]()):
            yield

    def _do(self, event: str, model: nn.Module, step: int, device: str) -> list[Tensor]:
        """What ``event`` computes, [...] each. Every one draws an input, whether or not it takes it."""
        x = self._input(model, device)
        if event in ("hold", "zero", "swap", "flat", "export"):
            self._change_grads(event, list(model.parameters()))
            return []
        return getattr(self, f"_{event}")(model, x, step, device)

    def _train(self, model: nn.Module, x: Tensor, step: int, device: str) -> list[Tensor]:
        """x: [5, width]."""
        with self._region(step, device):
            y = model(x)
        y.float().square().mean().backward()
        return [y.detach().clone(), x.grad]

    def _hook(self, model: nn.Module, x: Tensor, step: int, device: str) -> list[Tensor]:
        """x: [5, width]."""
        hooked = [p for p in model.parameters() if p.requires_grad][::3]
        seen: list[Tensor] = []
        handles = [p.register_hook(lambda grad: seen.append(grad.clone())) for p in hooked]
        results = self._train(model, x, step, device)
        for handle in handles:
            handle.remove()
        return [*results, *sorted(seen, key=lambda grad: (grad.shape, float(grad.double().sum())))]

    def _two(self, model: nn.Module, x: Tensor, step: int, device: str) -> list[Tensor]:
        """x: [5, width]."""
        other = self._input(model, device)
        with self._region(step, device):
            first = model(x)
        with self._region(step, device):
            second = model(other)
        first.float().square().mean().backward()
        second.float().square().mean().backward()
        return [first.detach().clone(), second.detach().clone(), x.grad, other.grad]

    def _grad(self, model: nn.Module, x: Tensor, step: int, device: str) -> list[Tensor]:
        """x: [5, width]."""
        if "detached" in self.kinds:
            return []  # a replay records the amaxes of gradients that nobody asks for
        with self._region(step, device):
            y = model(x)
        (grad,) = torch.autograd.grad(y.float().square().mean(), x)
        return [y.detach().clone(), grad]

    def _evaluate(self, model: nn.Module, x: Tensor, step: int, device: str) -> list[Tensor]:
        """x: [5, width]."""
        with torch.no_grad(), self._region(step, device):
            return [model(x.detach()).clone()]

    def _outside(self, model: nn.Module, x: Tensor, step: int, device: str) -> list[Tensor]:
        """x: [5, width]."""
        with self._region(step, device, enabled=False):
            y = model(x)
        y.float().square().mean().backward()
        return [y.detach().clone(), x.grad]

    def _edit(self, model: nn.Module, *_: Any) -> list[Tensor]:
        with torch.no_grad():
            for parameter in list(model.parameters())[::2]:
                parameter.mul_(0.9)
        return []

    def _copy(self, model: nn.Module, *_: Any) -> list[Tensor]:
        copy.deepcopy(model)
        return []

    def _save(self, model: nn.Module, *_: Any) -> list[Tensor]:
        tg.load_fp8_state_dict(model, tg.fp8_state_dict(model))
        return []

    def _change_grads(self, event: str, parameters: list[Tensor]) -> None:
        """Of every second parameter [...], in a way that eager code may."""
        for parameter in parameters[::2]:
            grad = parameter.grad
            if event == "swap" and parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 0.5)
            elif event == "flat" and parameter.requires_grad:
                memory = torch.zeros(parameter.numel() + 8, device=parameter.device, dtype=parameter.dtype)
                parameter.grad = memory[8:].view(parameter.shape)
                self._held.append(memory)
            elif event == "hold" and grad is not None:
                self._held.append(grad)
                parameter.grad = None
            elif event == "zero" and grad is not None:
                grad.zero_()
            elif event == "export" and grad is not None:
                self._held.append(torch.from_dlpack(grad.detach()))


if __name__ == "__main__":
    sys.exit(Program.main())
