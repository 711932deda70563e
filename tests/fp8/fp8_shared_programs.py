"""Random programs of functions that train and evaluate several networks, which share layers, by several recipes.

The reference is eager FP8. ``PYTHONPATH=.:tests/helpers python tests/fp8/fp8_shared_programs.py --seeds 0:1000`` runs
many, and makes small what differs. What ``fp8_mixed_programs.py`` draws are models by themselves.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp8_comparisons import ComparedProgram, Seen
from fp8_shared_world import EVENTS, RECIPES, Event, Step, World

OFTEN = (*["function"] * 7, *["train"] * 5, *["evaluate"] * 4, *["step"] * 3, *["capture"] * 2)


@dataclass(frozen=True)
class Program(ComparedProgram):
    """What is drawn from ``seed``.

    Attributes:
        nets: numbers of the blocks of each network.
        functions: steps of each.
        events: in their order.
    """

    seed: int
    nets: tuple[tuple[int, ...], ...]
    functions: tuple[tuple[Step, ...], ...]
    events: tuple[Event, ...]

    REFUSALS = (  # of functions under delayed scaling; on a GPU captures meet what earlier calls left on other streams
        *("called with them first", "to be trained there before that"),
        *("to be evaluated there by the same recipe", "got the first call by that recipe"),
        "with the same parameters is still held",
    )

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, nets {self.nets}", *map(str, self.functions), *map(str, self.events)]
        return "\n  ".join(lines)

    @classmethod
    def draw(cls, seed: int) -> Program:
        rng = random.Random(seed)
        blocks, main = rng.choice((1, 2, 3)), rng.randrange(len(RECIPES))

        def recipe() -> int:
            return main if rng.random() < 0.65 else rng.randrange(len(RECIPES))

        nets = tuple(
            tuple(rng.sample(range(blocks), rng.randint(1, min(blocks, 2)))) for _ in range(rng.choice((1, 2, 2, 3)))
        )
        functions, are_around = [], [rng.random() < 0.3 for _ in range(rng.choice((1, 1, 2)))]
        for is_around in are_around:
            steps = []
            for _ in range(rng.randint(1, 5)):
                kind = rng.choice(("train", "train", "train inside", "evaluate", "evaluate", "step"))
                has_own = kind == "train inside" or not is_around or rng.random() < 0.3
                scale = rng.choice((1.0, 4.0, 0.25))
                steps.append(Step(kind, rng.randrange(len(nets)), recipe() if has_own else None, scale))
            functions.append(tuple(steps))
        events: list[Event] = []
        for _ in range(rng.randint(8, 16)):
            kind = rng.choice((*EVENTS, *OFTEN))
            event = Event(
                kind=kind,
                how=rng.choice(EVENTS[kind][1]),
                number=rng.randrange(6),
                recipe=recipe(),
                rows=16 if rng.random() < 0.8 else 7,
                scale=rng.choice((1.0, 1.0, 5.0, 0.2)),
                seed=rng.randrange(2**31),
                on_thread=kind != "capture" and rng.random() < 0.04,
                outer=recipe() if rng.random() < 0.06 else None,
            )
            if kind == "function" and are_around[event.number % len(functions)]:
                event = replace(event, outer=recipe())
            repeats = rng.randint(1, 3) if kind in ("function", "train") and rng.random() < 0.5 else 0
            events += [event, *(replace(event, seed=event.seed + 1 + number) for number in range(repeats))]
        return cls(seed=seed, nets=nets, functions=tuple(functions), events=tuple(events))

    def pieces(self) -> list[str]:
        """Names of what can be left out: events, steps of functions, and all blocks of a network but the first."""
        steps = [f"step {k} {j}" for k, steps in enumerate(self.functions) for j in range(len(steps))]
        blocks = [f"block {k} {j}" for k, net in enumerate(self.nets) for j in range(1, len(net))]
        return [*map(str, range(len(self.events))), *steps, *blocks]

    def only(self, pieces: Sequence[str]) -> Program:
        """The program without what is not among ``pieces``."""
        return replace(
            self,
            events=tuple(event for number, event in enumerate(self.events) if str(number) in pieces),
            functions=tuple(
                tuple(step for j, step in enumerate(steps) if f"step {k} {j}" in pieces)
                for k, steps in enumerate(self.functions)
            ),
            nets=tuple(
                tuple(block for j, block in enumerate(net) if j == 0 or f"block {k} {j}" in pieces)
                for k, net in enumerate(self.nets)
            ),
        )

    def run(self, is_graphed: bool, device: str) -> tuple[Seen, int]:
        world = World(self.nets, self.functions, self.seed, is_graphed, device, self.REFUSALS)
        return world.run(self.events), world.replays


if __name__ == "__main__":
    sys.exit(Program.main())
