"""What comes of random programs that run eagerly and graphed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """What came of one.

    Attributes:
        verdict: "same"; "differs"; "raised", where one run alone does, as it may not; others, of which the programs'
            own modules tell, are not wrong.
        detail: what differs first, or what was raised.
        replays: in the graphed run.
    """

    verdict: str
    detail: str = ""
    replays: int = 0

    @property
    def is_wrong(self) -> bool:
        return self.verdict in ("differs", "raised")


def tally(outcomes: Iterable[Outcome], least_replays: int = 1) -> Counter[str]:
    """How many there are of each verdict, and "replayed" at least so often among these."""
    found: Counter[str] = Counter()
    for outcome in outcomes:
        found[outcome.verdict] += 1
        found["replayed"] += outcome.replays >= least_replays
    return found
