"""Run programs in child processes: one that crashes or hangs is then found, and told."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .program import Program
from .run import Outcome, run
from .shrink import shrink

_SECONDS, _SHRINK_SECONDS = 20.0, 60.0
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
        for small in _of_child(lambda pair: shrink(*pair, run), [(program, outcome)], _SHRINK_SECONDS):
            return small
    return shrink(program, outcome, run_alone)


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
    """``function`` of each item as they come from a child process; they end where it ends or takes too long."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a dying allocator says
        try:
            with os.fdopen(writer, "wb", buffering=0) as pipe:
                for item in items:
                    message = pickle.dumps(function(item))
                    pipe.write(len(message).to_bytes(8, "little") + message)
        finally:
            os._exit(0)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb", buffering=0) as pipe:
            while (header := _read(pipe, 8, seconds)) is not None:
                if (message := _read(pipe, int.from_bytes(header, "little"), seconds)) is None:
                    return
                yield pickle.loads(message)
    finally:
        _end(child)


def _read(pipe: Any, count: int, seconds: float) -> bytes | None:
    parts = b""
    while len(parts) < count:
        ready, _, _ = select.select([pipe], [], [], seconds)
        part = pipe.read(count - len(parts)) if ready else b""
        if not part:
            return None
        parts += part
    return parts


def _end(child: int) -> None:
    """Wait for ``child``; kill it if it does not end by itself."""
    for _ in range(50):
        if os.waitpid(child, os.WNOHANG)[0]:
            return
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
