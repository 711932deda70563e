"""Random programs over a graphed function that reads Python state, beside the same program in eager execution.

A program is text: a function, what it reads, and steps, each a call or a change of the state. It is run twice, in two
namespaces of its own, with ``target = graphed(fn)`` and ``target = fn``.
"""

from __future__ import annotations

import random
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sequences import counts
from stress_sources import NUMBERS, SOURCES, Source
from torch import Tensor
from torch.utils import _pytree as pytree

import te_graph as tg

_HEADER = """
import array, enum, functools, math, threading, weakref
from collections import ChainMap, OrderedDict, UserDict, defaultdict, deque, namedtuple
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial, wraps
from types import MappingProxyType, SimpleNamespace
import numpy as np
import te_graph as tg
import torch
from sequences import counts
from torch import nn
from torch.utils.checkpoint import checkpoint
import CFG

def tensor(seed):
    return torch.arange(1.0, 4.0) * seed

def number(value):
    kind = 0.25 if isinstance(value, bool) else 0.5 if isinstance(value, int) else 0.0
    return float(value) + kind + math.copysign(0.125, value)

def fold(values):
    total = 0.0
    for value in values:
        total = total * 2 + number(value)
    return total

def tensors(values):
    total = torch.zeros(3)
    for value in values:
        total = total * 2 + value.sum()
    return total

def fill(module, value=1):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)

X = [tensor(1), tensor(2), tensor(3)]
TOTALS = [torch.zeros(3), torch.ones(3)]
WEIGHT = torch.ones(3, requires_grad=True)

def wait():  # keeps a graph of autograd, which saves what the function writes
    global LOSS
    LOSS = (WEIGHT * TOTALS[0]).square().sum() + (WEIGHT * TOTALS[1]).sum()

def finish():
    try:
        LOSS.backward()
    except RuntimeError as error:
        return str(error).partition(":")[0]  # without the versions, which captures count, too
    return WEIGHT.grad
"""
# What the function writes in place.
_WRITES = (
    "TOTALS[0].mul_(0.5).add_(out)",
    "torch._foreach_mul_(TOTALS, 0.5)",
    "torch._foreach_lerp_(TOTALS, [out, out * 2], 0.5)",
    "torch._foreach_addcmul_(TOTALS[:1], [out], TOTALS[1:])",
    "torch.unbind_copy(torch.stack(TOTALS) + out, out=TOTALS)",
    "TOTALS[0].copy_(TOTALS[1]); TOTALS[1].zero_()",
)
_ARGUMENTS = ("$", "[$, ($, $)]", "{'a': $, 'b': [$]}", "Decimal($)", "np.float32($)", "(0.0, $)", "{$: 1.0}", "{$}")
_COMPARED = "number(v) if isinstance(v, (int, float)) else len(str(v)) * 0.5"


@dataclass(frozen=True)
class Program:
    """Text that can be run and be made smaller.

    Attributes:
        sources: setup statements and the expression that reads them, of each.
        writes: statements by which the function writes tensors in place.
        steps: statements; ``call(...)`` calls the function, ``race(...)`` on several threads.
    """

    sources: tuple[tuple[str, str], ...]
    writes: tuple[str, ...]
    steps: tuple[str, ...]

    def text(self) -> str:
        body = ["def fn(x, given=None, *rest, **named):", "    out = x * 1.0"]
        for _, read in self.sources:
            body.append(f"    v = {read}")
            body.append("    out = out + (v if isinstance(v, torch.Tensor) else number(v))")
        body.append("    out = out * (1.0 + len(repr(given)) * 0.5)")
        body += [f"    {write}" for write in self.writes]
        body.append("    return {'out': out, 'same': x, 'row': x[:2]}")
        setups = [setup for setup, _ in self.sources]
        return "\n".join([_HEADER, *setups, *body])


def generate(seed: int) -> Program:
    rng = random.Random(seed)
    chosen: list[tuple[int, Source]] = list(enumerate(rng.choices(SOURCES, k=rng.randint(1, 5))))
    steps: list[str] = []
    given = "None"
    writes = tuple(rng.sample(_WRITES, rng.choice((0, 0, 1, 2))))
    for _ in range(rng.randint(8, 24)):
        roll = rng.random()
        if roll < 0.35:
            number, source = rng.choice(chosen)
            steps.append(_filled(rng.choice(source.changes), number, rng))
        elif roll < 0.42:
            given = _filled(rng.choice(_ARGUMENTS), 0, rng).replace("Decimal(", "Decimal(1 * ")
        elif roll < 0.47 and not writes:
            steps.append(f"race({rng.randint(1, 3)})")
        elif roll < 0.55 and writes:
            steps.append(rng.choice(("wait()", "finish()")))
        else:
            x = f"X[{rng.choice((0, 0, 0, 1))}]"
            call = rng.choice(
                (f"call({x}, {given})", f"call({x}, {given})", f"call(x={x}, given={given})", f"call({x})")
            )
            steps += [call] * rng.randint(1, 3)
    sources = tuple((_filled(source.setup, n, rng), source.read.replace("#", str(n))) for n, source in chosen)
    return Program(sources, writes, tuple(steps))


def _filled(template: str, number: int, rng: random.Random) -> str:
    parts = template.replace("#", str(number)).split("$")
    return parts[0] + "".join(rng.choice(NUMBERS) + part for part in parts[1:])


class _Side:
    """One run of a program."""

    def __init__(self, program: Program, name: str, wrap: Callable[[Any], Any]) -> None:
        self.config, module = (types.ModuleType(f"stress_{what}_{name}") for what in ("config", "program"))
        for one in (self.config, module):
            one.__file__ = f"/stress/{one.__name__}.py"
            sys.modules[one.__name__] = one
        self.names = vars(module)
        self._run(program.text())
        self.names["call"] = wrap(self.names["fn"])
        self.names["race"] = self._race

    def _run(self, text: str) -> None:
        exec(compile(text.replace("CFG", self.config.__name__), "<program>", "exec"), self.names)

    def do(self, step: str) -> list[Any]:
        """Run the step; return what it gives, every tensor that the program has, and which ones it has written."""
        self.names["result"] = None
        versions = [total._version for total in self.names["TOTALS"]]
        self._run(f"result = {step}" if step.startswith(("call", "race", "finish")) else step)
        written = [total._version > version for total, version in zip(self.names["TOTALS"], versions, strict=True)]
        state = [value for value in self.names.values() if isinstance(value, Tensor | list | dict)]
        found = pytree.tree_leaves([self.names["result"], written, [one for one in state if one is not self.names]])
        return [leaf for leaf in found if isinstance(leaf, Tensor | float | int | str)]

    def _race(self, calls: int) -> list[Any]:
        """The last result on each of three threads; what a thread does not have (a thread-local value) is an error."""
        results: list[Any] = [None] * 3

        def work(number: int) -> None:
            x = self.names["X"][number]
            for _ in range(calls):
                try:
                    results[number] = self.names["call"](x)["out"].clone()
                except Exception as error:
                    results[number] = f"{type(error).__name__}: {error}".split(" at 0x")[0]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        facts = [(t.dtype, t.shape, t.stride(), t.requires_grad) for t in (a, b)]
        return facts[0] == facts[1] and a.detach().numpy().tobytes() == b.detach().numpy().tobytes()
    return type(a) is type(b) and repr(a) == repr(b)


def run(program: Program) -> tuple[str, int, int]:
    """(what differed between the two sides, if anything; replays; calls)."""
    replayed = None

    def graphed(function: Any) -> Any:
        nonlocal replayed
        replayed = tg.graphed(function)
        return replayed

    sides = [_Side(program, "graphed", graphed), _Side(program, "eager", lambda function: function)]
    difference = ""
    for number, step in enumerate(program.steps):
        found = [_outcome(side, step) for side in sides]
        if isinstance(found[0], str) or isinstance(found[1], str):
            if found[0] != found[1]:
                difference = f"step {number}, {step}: graphed {found[0]}, eager {found[1]}"
        elif len(found[0]) != len(found[1]) or not all(map(_same, *found)):
            pairs = [(a, b) for a, b in zip(*found, strict=False) if not _same(a, b)]
            difference = f"step {number}, {step}: graphed, eager: {pairs[:2]}"
        if difference:
            break
    _, replays, _, eager_calls = counts(replayed)
    replayed.reset()
    return difference, replays, replays + eager_calls


def _outcome(side: _Side, step: str) -> list[Any] | str:
    try:
        return side.do(step)
    except Exception as error:  # of the program: both sides must raise it
        return f"{type(error).__name__}: {error}".split(" at 0x")[0]


def shrink(program: Program) -> Program:
    """The smallest program, by leaving out steps and sources, that still fails."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for field in ("steps", "sources", "writes"):
            for number in reversed(range(len(getattr(program, field)))):
                rest = getattr(program, field)
                less = replace(program, **{field: rest[:number] + rest[number + 1 :]})
                if _fails(less):
                    program, is_smaller = less, True
    return program


def _fails(program: Program) -> bool:
    return bool(run(program)[0])


def report(seed: int, program: Program, difference: str) -> str:
    small = shrink(program)
    text = small.text().removeprefix(_HEADER)
    steps = "\n".join(small.steps)
    return f"seed {seed}: {difference}\n{text}\n# steps\n{steps}\n# {run(small)[0]}"


if __name__ == "__main__":
    import logging

    logging.getLogger("te_graph").setLevel(logging.ERROR)
    first, count = int(sys.argv[1]), int(sys.argv[2])
    replays = calls = failures = 0
    for seed in range(first, first + count):
        program = generate(seed)
        difference, replayed, called = run(program)
        replays, calls = replays + replayed, calls + called
        if difference:
            failures += 1
            print(report(seed, program, difference), flush=True)
            if failures >= int(sys.argv[3]):
                break
    print(f"{seed - first + 1} programs, {failures} failed, {replays} of {calls} calls replayed")
