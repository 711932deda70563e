"""Make a failing program smaller for as long as it fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from .program import Program
from .run import Outcome

_SECONDS = 15.0


def shrink(program: Program, outcome: Outcome, run: Callable[[Program], Outcome]) -> tuple[Program, Outcome]:
    """A smaller program that fails as ``program`` did with ``outcome``, and what it does."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        for smaller in _smaller(program):
            result = run(smaller)
            if (result.verdict, result.kind) == (outcome.verdict, outcome.kind):
                program, outcome = smaller, result
                break
            if time.monotonic() > end:
                return program, outcome
        else:
            return program, outcome
    return program, outcome


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with something left out, the boldest first."""
    for piece in program.pieces:
        if len(program.pieces) > 1:
            yield program.without_piece(piece.number)
    count = len(program.steps)
    size = count // 2
    while size >= 1:
        for start in range(0, count, size):
            yield program.without(set(range(start, min(start + size, count))))
        size //= 2
    yield from filter(None, map(program.bypassing, range(count)))
    for number, group in enumerate(program.groups):
        rest = [g for n, g in enumerate(program.groups) if n != number]
        for piece in group.pieces:
            fewer = replace(group, pieces=tuple(p for p in group.pieces if p != piece))
            groups = rest + ([fewer] if fewer.pieces else [])
            if groups:
                yield replace(program, groups=tuple(groups))
        for option in group.options:
            without = replace(group, options=tuple(o for o in group.options if o != option))
            yield replace(program, groups=(*rest, without))
