"""Run programs in child processes: one that crashes or hangs is then found, and told."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from .program import Program
from .run import Outcome, run
from .shrink import shrink

_SECONDS, _SHRINK_SECONDS = 20.0, 60.0
_START_SECONDS = 60.0  # until the server has imported torch
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "te_graph", __name__])  # whose folder a server may not find
_DEAD = Outcome("crashed", "the process died", "it ended by a signal, or hung")


def run_apart(programs: Iterable[Program], device: str) -> Iterator[tuple[Program, Outcome]]:
    """(program, outcome) of each of ``programs``; a child runs them until it dies, then another one goes on.

    A child process cannot use CUDA once its parent did; there all run in this process.
    """
    if device != "cpu":
        yield from ((program, run(program)) for program in programs)
        return
    waiting = list(programs)
    while waiting:
        done = 0
        for outcome in _of_child(run, waiting, _SECONDS):
            yield waiting[done], outcome
            done += 1
        if done < len(waiting):
            yield _who_killed(waiting[: done + 1])
            done += 1
        waiting = waiting[done:]


def shrink_apart(program: Program, outcome: Outcome) -> tuple[Program, Outcome]:
    """``shrink`` in a child process; where programs kill it, with a child for each of them."""
    if program.device != "cpu":
        return shrink(program, outcome, run)
    if outcome.verdict == "failed":
        for small in _of_child(_shrink, [(program, outcome)], _SHRINK_SECONDS):
            return small
    return shrink(program, outcome, run_alone)


def _shrink(pair: tuple[Program, Outcome]) -> tuple[Program, Outcome]:
    return shrink(*pair, run)


def run_alone(program: Program) -> Outcome:
    """The outcome of ``program`` in a child process of its own."""
    return next(iter([*_of_child(run, [program], _SECONDS), _DEAD]))


def _who_killed(programs: Sequence[Program]) -> tuple[Program, Outcome]:
    """The last of ``programs``, or one before it that hurt the process: the one that dies when it runs alone."""
    for suspect in programs[:-12:-1]:
        if run_alone(suspect).verdict == "crashed":
            return suspect, _DEAD
    return programs[-1], Outcome("crashed", "several programs killed the process", f"from {programs[0].seed} on")


def _of_child(function: Callable[[Any], Any], items: Sequence[Any], seconds: float) -> Iterator[Any]:
    """``function`` of each item as they come from a child process; they end where it ends or takes too long.

    Children are forked by a server of their own: autograd does not work in children of a process that has used it.
    """
    receiver, sender = _context.Pipe(duplex=False)
    child = _context.Process(target=_work, args=(sender, function, list(items), dict(os.environ)), daemon=True)
    child.start()
    sender.close()
    try:
        for number in range(len(items)):
            if not receiver.poll(seconds + (0 if number else _START_SECONDS)):
                return
            yield receiver.recv()
    except (EOFError, ConnectionResetError):
        return
    finally:
        receiver.close()
        child.join(0.1)
        child.kill()
        child.join()


def _work(sender: Connection, function: Callable[[Any], Any], items: list[Any], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a dying allocator says
    torch.set_num_threads(1)
    for item in items:
        sender.send(function(item))
