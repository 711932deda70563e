"""Make a failing program smaller for as long as it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from .program import Program

_SECONDS = 60.0


def shrink(program: Program, fails: Callable[[Program], bool]) -> Program:
    """A smaller program that ``fails``, as ``program`` does."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        smaller = next((one for one in _smaller(program) if time.monotonic() < end and fails(one)), None)
        if smaller is None:
            break
        program = smaller
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with something left out, the boldest first."""
    count = len(program.steps)
    size = (count + 1) // 2
    while size >= 1:
        for start in range(0, count, size):
            yield program.without(set(range(start, min(start + size, count))))
        size //= 2
    for name in program.setup.changes():
        default = type(program.setup).__dataclass_fields__[name].default
        yield replace(program, setup=replace(program.setup, **{name: default}))
    for position, step in enumerate(program.steps):
        for name in step.arguments if step.name == "backward" else ():
            rest = {key: value for key, value in step.arguments.items() if key != name}
            steps = [*program.steps]
            steps[position] = replace(step, arguments=rest)
            yield replace(program, steps=tuple(steps))
