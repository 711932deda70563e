"""Leaves out of a program that fails what it does not need to."""

from __future__ import annotations

from collections.abc import Callable


def fewest(changes: list[str], failure: Callable[[list[str]], str]) -> tuple[list[str], str]:
    """The ``changes`` without which ``failure`` of them is empty, and what it is; empty itself where it is for all."""
    error = failure(changes)
    position = 0
    while error and position < len(changes):
        fewer = changes[:position] + changes[position + 1 :]
        if found := failure(fewer):
            changes, error = fewer, found
        else:
            position += 1
    return changes, error
