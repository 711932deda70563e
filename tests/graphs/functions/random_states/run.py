"""Run a random program eagerly and graphed, and compare all that can be seen after each step."""

from __future__ import annotations

import re
import sys
import types
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from program_outcomes import Outcome
from sequences import counts

import te_graph as tg

from .pictures import difference, picture
from .program import Program

_CALLS = 8


@dataclass
class _Run:
    """What one run of a program has seen.

    Attributes:
        seen: pictures, with what they are of.
        captures: the numbers of calls that captured.
        error: where one was raised, and that.
        left: what a call that was refused has left behind.
    """

    seen: list[tuple[str, Any]] = field(default_factory=list)
    captures: set[int] = field(default_factory=set)
    error: tuple[str, BaseException] | None = None
    left: str = ""
    replays: int = 0

    def call(self, program: Program, names: dict[str, Any], step: Any, number: int) -> bool:
        """One call and what is around it; whether no error came."""
        at = f"before call {number}"
        try:
            if program.batch.is_new:
                names["batch"] = eval(program.batch.made, names)
            if program.keeps_batches:
                names["log"].append(names["batch"])
            names["before"](number)
            names["x"].fill_(number)
            before, at = picture(names["roots"]()), f"call {number}"
            captured = _captures(step)
            result = step(names["tr"], names["batch"], program.alternates and number % 2 == 0)
            if _captures(step) != captured:
                self.captures.add(number)
            is_apart = number in self.captures
            self.seen.append((at, picture([names["roots"](), None if is_apart else result])))
            self.seen.append((f"result of {at}", picture(result) if is_apart else None))
            at = f"after call {number}"
            if program.keeps_results and not is_apart:
                names["log"].append(result)
            names["after"](number)
        except Exception as error:
            self.error = at, error.with_traceback(None)  # which would hold objects of the program
            if at == f"call {number}":
                self.left = difference(before, picture(names["roots"]()))
            return False
        del result
        self.seen.append((at, picture(names["roots"]())))
        return True


def _captures(step: Any) -> int:
    """Of a function; 0 of one that is not graphed."""
    return counts(step)[0] if hasattr(step, "info") else 0


def run(program: Program, device: str = "cpu") -> Outcome:
    """Run both ways. Not wrong are "refused", by an error that has left nothing, and "both raised"."""
    graphed = _run(program, device, True, set())
    eager = _run(program, device, False, graphed.captures)
    for (what, expected), (_, got) in zip(eager.seen, graphed.seen, strict=False):
        if expected != got:
            return Outcome("differs", f"{what}: {difference(expected, got)}", graphed.replays)
    return _outcome_of_errors(eager, graphed)


def _outcome_of_errors(eager: _Run, graphed: _Run) -> Outcome:
    """Where nothing differs until one of the runs ends."""
    errors = [one.error and (one.error[0], type(one.error[1]).__name__) for one in (eager, graphed)]
    told = "; ".join(
        f"{at}: {type(error).__name__}: {error}" for at, error in filter(None, (eager.error, graphed.error))
    )
    if errors[0] == errors[1]:
        return Outcome("both raised" if errors[0] else "same", told, graphed.replays)
    is_refused = graphed.error is not None and isinstance(graphed.error[1], tg.CaptureError) and not graphed.left
    return Outcome("refused" if is_refused else "raised", told + graphed.left, graphed.replays)


def _run(program: Program, device: str, is_graphed: bool, captures: set[int]) -> _Run:
    """``captures``: those of the graphed run. What such a call returns of the state may be a copy (docs/limits.md)."""
    module = types.ModuleType(f"random_state_{program.seed}")
    module.__file__ = f"/random_states/{module.__name__}.py"
    sys.modules[module.__name__] = module  # for dataclasses
    names = vars(module)
    names["graphed"] = tg.graphed if is_graphed else lambda function: function
    found = _Run(captures=set(captures))
    try:
        exec(compile(program.text().replace("DEVICE", repr(device)), "<program>", "exec"), names)
        step = names["graphed"](names["step"])
        for number in range(_CALLS):
            if not found.call(program, names, step, number):
                break
        found.replays = counts(step)[1] if is_graphed else 0
        return found
    finally:
        del sys.modules[module.__name__]


def shrink(program: Program, outcome: Outcome, device: str = "cpu") -> tuple[Program, Outcome]:
    """The smallest program, by leaving out things one by one, that is wrong in the same way."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in program.smaller():
            found = run(smaller, device)
            if found.verdict == outcome.verdict:
                program, outcome, is_smaller = smaller, found, True
                break
    return program, outcome


def report(program: Program, outcome: Outcome, device: str = "cpu") -> str:
    """A failure, with a program that is as small as it goes."""
    small, found = shrink(program, outcome, device)
    return f"{outcome.verdict}: {outcome.detail}\n{small}\n# {found.verdict}: {found.detail}"


def refusals(outcomes: Iterable[Outcome]) -> Counter[str]:
    """How often there was which reason, without names and numbers."""
    told = (one.detail.partition(": CaptureError: ")[2] for one in outcomes if one.verdict == "refused")
    return Counter(re.sub(r"(argument|global variable|class|default of) \S+|\d+", r"\1 #", one)[:150] for one in told)
