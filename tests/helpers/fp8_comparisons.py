"""Random FP8 programs run eagerly and graphed: what came of each, and what it can do without."""

from __future__ import annotations

import abc
import argparse
import logging
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, Self

import pytest
from seeds import first_seed
from shrinking import fewest
from torch import Tensor

from te_graph.testing import deterministic, same_bits

Seen = list[tuple[str, Tensor]]  # what a run has seen, by name, [...] each


class ComparedProgram(abc.ABC):
    """A program that leaves the same whether its captures are made or left out.

    Attributes:
        REFUSALS: words of the errors that docs/limits.md tell of.
    """

    REFUSALS: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abc.abstractmethod
    def draw(cls, seed: int) -> Self:
        """The program of ``seed``."""

    @abc.abstractmethod
    def pieces(self) -> list[str]:
        """Names of what can be left out."""

    @abc.abstractmethod
    def only(self, pieces: Sequence[str]) -> Self:
        """The program without what is not among ``pieces``."""

    @abc.abstractmethod
    def run(self, is_graphed: bool, device: str) -> tuple[Seen, int]:
        """What was seen, and how many calls were replayed."""

    def compare(self, device: str = "cpu") -> tuple[str, str, int]:
        """A verdict ("same", "differs", "raised", "refused" as documented, "invalid"), its reason, and the replays."""
        try:
            expected, _ = self.run(False, device)
        except Exception:
            return "invalid", traceback.format_exc(), 0
        try:
            found, replays = self.run(True, device)
        except Exception as error:
            is_limit = any(words in str(error) for words in self.REFUSALS)
            return "refused" if is_limit else "raised", traceback.format_exc(), 0
        for (name, one), (other, two) in zip(expected, found, strict=False):
            if name != other:
                return "differs", f"{other}, where eager execution has {name}", replays
            if not same_bits(one, two):
                return "differs", name, replays
        if len(expected) != len(found):
            return "differs", f"{len(found)} values, where eager execution has {len(expected)}", replays
        return "same", "", replays

    def shrunk(self, device: str = "cpu") -> tuple[Self, str]:
        """The program without what its verdict does not need, and the reason for that."""
        verdict = self.compare(device)[0]

        def failure(pieces: list[str]) -> str:
            found, reason, _ = self.only(pieces).compare(device)
            return reason if found == verdict else ""

        pieces, reason = fewest(self.pieces(), failure)
        return self.only(pieces), reason

    @classmethod
    def main(cls) -> int:
        """Run many, make small what differs, and tell what came of them."""
        parser = argparse.ArgumentParser(description=cls.main.__doc__)
        parser.add_argument("--seeds", default="0:100", help="first:end")
        parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no program begins")
        parser.add_argument("--device", default="cpu")
        arguments = parser.parse_args()
        first, end = map(int, arguments.seeds.split(":"))
        logging.getLogger("te_graph").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
        tally, started = Counter[str](), time.monotonic()
        with deterministic():
            for seed in range(first, end):
                if time.monotonic() - started > arguments.seconds:
                    break
                program = cls.draw(seed)
                verdict, reason, replays = program.compare(arguments.device)
                tally[verdict] += 1
                tally["replayed"] += replays > 0
                if verdict in ("differs", "raised"):
                    program, reason = program.shrunk(arguments.device)
                if verdict not in ("same", "refused"):
                    print(f"{seed}: {verdict}: {reason}\n{program}", flush=True)
        print(dict(tally))
        return int(tally["differs"] + tally["raised"] > 0)


def check_programs(kind: type[ComparedProgram], topic: str, device: str, count: int, most_seconds: float) -> None:
    """Fail, with a small program, where one of ``count`` of ``topic`` differs or raises."""
    first, started, verdicts, replayed = first_seed(topic), time.monotonic(), Counter[str](), 0
    for seed in range(first, first + count):
        program = kind.draw(seed)
        verdict, reason, replays = program.compare(device)
        if verdict in ("differs", "raised"):
            small, small_reason = program.shrunk(device)
            pytest.fail(f"TE_GRAPH_PROGRAM_SEED={seed}: {verdict}: {reason}\n{small}\n{small_reason}")
        verdicts[verdict] += 1
        replayed += replays > 0
        if time.monotonic() - started > most_seconds and replayed:
            break
    # On a slow machine few run, of which a chance majority may change something in each step.
    assert replayed and (verdicts.total() < 10 or min(replayed, verdicts["same"]) > 0.4 * verdicts.total()), verdicts
