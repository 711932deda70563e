"""Random programs of one or two models with FP8 layers that train, evaluate, load and are captured among each other.

The reference is eager FP8. ``PYTHONPATH=.:tests/helpers python tests/fp8/fp8_mixed_programs.py --seeds 0:1000`` runs
many, and makes small what differs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp8_comparisons import ComparedProgram, Seen
from fp8_mixed_models import RECIPES, Spec
from fp8_mixed_world import EVENTS, Event, World

TRAITS = (
    *("", "", "conv", "tied", "frozen", "lora", "twice", "unrecorded", "no_bias", "outside"),
    *("conv twice", "frozen conv", "tied twice", "conv unrecorded"),
    *("mlp", "residual", "layer", "mlp residual", "frozen layer", "layer twice"),
)
CHECKPOINTS = ("", "", "", "recompute", "recompute recompute")
REENTRANT = ("reentrant", "reentrant recompute", "recompute reentrant", "reentrant reentrant")
OFTEN = ("evaluate", "evaluate", "evaluate", "forward", "backward")  # what shows scales, or lets others come in between
# Of a parameter that a block uses several times it depends in which order gradients are added, which docs/limits.md
# tell of: on other losses that are held, on hooks, and on accumulate_grads=False.
SEVERAL_USES = ("twice", "tied", "outside")


@dataclass(frozen=True)
class Program(ComparedProgram):
    """What is drawn from ``seed``.

    Attributes:
        is_whole: one region is around all of it.
    """

    seed: int
    is_whole: bool
    specs: tuple[Spec, ...]
    events: tuple[Event, ...]

    REFUSALS = (  # of functions under delayed scaling; on a GPU captures meet what earlier calls left on other streams
        *("called with them first", "to be trained there before that"),
        "with the same parameters is still held",
    )

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, is_whole={self.is_whole}", *map(str, self.specs), *map(str, self.events)]
        return "\n  ".join(lines)

    @classmethod
    def draw(cls, seed: int) -> Program:
        rng = random.Random(seed)
        is_whole, recipe, count = rng.random() < 0.15, rng.randrange(len(RECIPES)), rng.choice((1, 1, 2))
        recipes = [recipe if is_whole or rng.random() < 0.5 else rng.randrange(len(RECIPES)) for _ in range(count)]
        specs = tuple(_draw_spec(rng, one) for one in recipes)
        events: list[Event] = []
        for _ in range(rng.randint(6, 11)):
            model = rng.randrange(count)
            if rng.random() < 0.5:
                events += [_draw_event(rng, "train", model, specs) for _ in range(rng.choice((1, 1, 2)))]
                events += [_draw_event(rng, "step", model, specs)] if rng.random() < 0.8 else []
            else:
                kinds = [
                    kind for kind in (*EVENTS, *OFTEN) if kind not in ("train", "step") and _may(kind, specs[model])
                ]
                events.append(_draw_event(rng, rng.choice(kinds), model, specs))
        for model in range(count):
            place = rng.choice((0, 0, rng.randrange(len(events)), rng.randrange(len(events))))
            events.insert(place, _draw_event(rng, "capture", model, specs))
            events += [_draw_event(rng, kind, model, specs) for kind in ("train", "step", "train")]
        return cls(seed=seed, is_whole=is_whole, specs=specs, events=tuple(events))

    def pieces(self) -> list[str]:
        """Names of what can be left out: events, blocks, and words of blocks."""
        blocks = [f"{model} {number}" for model, spec in enumerate(self.specs) for number in range(len(spec.blocks))]
        words = [f"{name} {word}" for name in blocks for word in dict.fromkeys(self._block(name).split())]
        return [*map(str, range(len(self.events))), *blocks, *words]

    def _block(self, name: str) -> str:
        model, number = map(int, name.split())
        return self.specs[model].blocks[number]

    def only(self, pieces: Sequence[str]) -> Program:
        """The program without what is not among ``pieces``."""

        def rest(model: int, spec: Spec) -> Spec:
            names = [f"{model} {number}" for number in range(len(spec.blocks)) if f"{model} {number}" in pieces]
            words = [[word for word in self._block(name).split() if f"{name} {word}" in pieces] for name in names]
            return replace(spec, blocks=tuple(map(" ".join, words)) or ("",))

        events = tuple(event for number, event in enumerate(self.events) if str(number) in pieces)
        return replace(self, specs=tuple(map(rest, range(len(self.specs)), self.specs)), events=events)

    def run(self, is_graphed: bool, device: str) -> tuple[Seen, int]:
        world = World(self.specs, self.seed, self.is_whole, is_graphed, device)
        return world.run(self.events), sum(one.replays() for one in world.models)


def _draw_spec(rng: random.Random, recipe: int) -> Spec:
    mode = rng.choice(("callable", "callable", "blocks", "chain", "layers", "function", "function", "function"))
    checkpoints = CHECKPOINTS + REENTRANT * (mode == "function")  # captures of modules refuse reentrant ones
    count = rng.choice((1, 2, 2, 3))
    blocks = tuple(f"{rng.choice(TRAITS)} {rng.choice(checkpoints)}".strip() for _ in range(count))
    repeats = any(word in block for block in blocks for word in SEVERAL_USES)
    is_bf16 = rng.random() < 0.2
    return Spec(
        blocks=blocks,
        mode=mode,
        style=" ".join(word for word in ("around", "accumulates", "steps", "evaluates") if rng.random() < 0.3),
        recipe=recipe,
        optimizer=rng.choice(("sgd", "fused") if mode == "function" else ("sgd", "adamw", "foreach")),
        rows=rng.choice((16, 7)),
        is_bf16=is_bf16,
        is_autocast=not is_bf16 and rng.random() < 0.25,
        options=(
            ("on_mismatch", rng.choice(("eager", "capture"))),
            ("max_in_flight", rng.choice((1, 2))),
            ("accumulate_grads", repeats or rng.random() < 0.8),
            ("on_exhausted", "eager"),
        ),
    )


def _draw_event(rng: random.Random, kind: str, model: int, specs: Sequence[Spec]) -> Event:
    return Event(
        kind=kind,
        how=rng.choice(EVENTS[kind][1]),
        model=model,
        rows=specs[model].rows if rng.random() < 0.8 else rng.choice((16, 7, 24)),
        scale=rng.choice((1.0, 1.0, 5.0, 0.2)),
        number=rng.randrange(20),
        seed=rng.randrange(2**31),
    )


def _may(kind: str, spec: Spec) -> bool:
    """Whether docs/limits.md promise the bits of eager execution."""
    if kind in ("forward", "retain", "fail"):  # on a GPU an error may hold a loss for a while
        return not spec.has(*SEVERAL_USES)
    if kind == "grad":  # of a captured module it finds the parameters alone whose gradients autograd gets
        is_found = spec.mode == "function" or not dict(spec.options)["accumulate_grads"]
        return is_found and not spec.has("reentrant")
    return not (kind == "hook" and spec.has("outside"))


if __name__ == "__main__":
    sys.exit(Program.main())
