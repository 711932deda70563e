"""Many programs, and what came of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .generate import generate
from .isolate import run_apart, shrink_apart
from .program import Program
from .run import Outcome, quiet_collector

_CHUNK = 40


@dataclass
class Failure:
    """A program that failed, made small. ``signature`` tells root causes apart, roughly."""

    program: Program
    outcome: Outcome

    @property
    def signature(self) -> str:
        graphed = {number for group in self.program.groups for number in group.pieces}
        pieces = sorted(piece.name for piece in self.program.pieces if piece.number in graphed)
        steps = sorted({step.kind for step in self.program.steps if not step.kind.startswith(("see", "call", "leaf"))})
        return f"{self.outcome.kind} | {', '.join(pieces)} | {', '.join(steps)}"

    def source(self) -> str:
        return self.program.source(f"{self.outcome.detail}\n\nSeed {self.program.seed}. {self.signature}".rstrip())


@dataclass
class Tally:
    """Counts of a campaign. ``failures``: the first of each signature; ``often``: how many there were of each."""

    verdicts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    replayed: int = 0
    failures: dict[str, Failure] = field(default_factory=dict)
    often: Counter[str] = field(default_factory=Counter)

    @property
    def ran(self) -> int:
        return sum(self.verdicts.values())

    def __str__(self) -> str:
        lines = [f"{self.ran} programs ran, {self.replayed} replayed forward and backward: {dict(self.verdicts)}"]
        lines += [f"  {count:5d} x {kind}" for kind, count in self.refusals.most_common(40)]
        lines += [f"  {count:5d} x FAILED {signature}" for signature, count in self.often.most_common()]
        return "\n".join(lines)


def campaign(
    seeds: Iterable[int],
    device: str,
    seconds: float = float("inf"),
    shrinks_per_kind: int = 3,
    most_failures: int = 999,
    avoid: str = "",
) -> Tally:
    """Run the programs of ``seeds`` for at most ``seconds``; failures are made small.

    Args:
        shrinks_per_kind: how many failures of one kind, before they are made small, are worth the time.
        most_failures: end after this many signatures.
        avoid: pattern of pieces and kinds of steps that are left out.
    """
    quiet_collector()
    tally, end, kinds = Tally(), time.monotonic() + seconds, Counter()
    for chunk in _chunks(seeds):
        programs = filter(None, (generate(seed, device).avoiding(avoid) for seed in chunk))
        for program, outcome in run_apart(programs, device):
            tally.verdicts[outcome.verdict] += 1
            tally.replayed += min(outcome.replays) > 0
            if outcome.verdict in ("refused", "eager raised", "lenient", "rounded"):
                tally.refusals[f"{outcome.verdict}: {outcome.kind}"] += 1
            elif outcome.verdict in ("failed", "crashed"):
                kinds[outcome.kind] += 1
                if kinds[outcome.kind] <= shrinks_per_kind:
                    _note(tally, program, outcome)
                else:
                    tally.often[outcome.kind + " | not made small"] += 1
        if time.monotonic() > end or len(tally.failures) >= most_failures:
            break
    return tally


def _note(tally: Tally, program: Program, outcome: Outcome) -> None:
    failure = Failure(*shrink_apart(program, outcome))
    tally.often[failure.signature] += 1
    tally.failures.setdefault(failure.signature, failure)


def _chunks(seeds: Iterable[int]) -> Iterator[list[int]]:
    chunk: list[int] = []
    for seed in seeds:
        chunk.append(seed)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk
