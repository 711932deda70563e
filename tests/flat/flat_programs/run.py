"""Programs on all ranks of a world; one that fails is made smaller for as long as it fails."""

from __future__ import annotations

import functools
import re
import traceback
import warnings
from collections.abc import Iterable

import pytest
from ranks import Rank, Ranks

from .generate import generate
from .program import Program, Step
from .shrink import shrink
from .training import Training


class ProgramError(Exception):
    """What a step of a program, or a comparison after it, has raised, behind the lines of the program."""


def run_program(rank: Rank, program: Program) -> None:
    step: Step | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            training = Training(program.seed, program.setup, rank)
            for step in program.steps:
                getattr(training, step.name)(**step.arguments)
                training.check()
            training.close()
        except (Exception, pytest.fail.Exception):
            raise ProgramError(f"{program}\n\nIn {step or 'Training'}: {traceback.format_exc()}") from None


def run_programs(rank: Rank, programs: Iterable[Program]) -> None:
    for program in programs:
        run_program(rank, program)


def failure_of(ranks: Ranks, program: Program) -> str:
    """What it raises, or nothing."""
    try:
        ranks.run(run_program, program.seed, program)
    except (ProgramError, pytest.fail.Exception) as error:
        return str(error)
    return ""


def first_failure(ranks: Ranks, seeds: Iterable[int], shrinks: bool = True) -> str:
    """Of the first of ``seeds`` whose program fails, made small, or nothing."""
    for seed in seeds:
        program = generate(seed)
        failure = failure_of(ranks, program)
        if failure and shrinks:
            kind = _kind(failure)
            program = shrink(program, functools.partial(_fails_so, ranks, kind))
            failure = failure_of(ranks, program) or failure
        if failure:
            return f"seed {seed}:\n{failure}"
    return ""


def _fails_so(ranks: Ranks, kind: str, program: Program) -> bool:
    return _kind(failure_of(ranks, program)) == kind


def _kind(failure: str) -> str:
    """The last line of the traceback as far as it is the same for other values."""
    return re.sub(r"[:\d].*", "", failure.rstrip().rpartition("\n")[2].removeprefix("AssertionError: "))
