"""A program as data, and as Python: what is printed is what is run, line by line."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from . import pieces, prelude
from .zoo import ZOO, Kind

_NAME = re.compile(r"\b[a-z]+\d+\b")


@dataclass(frozen=True)
class Piece:
    """A module or function of the program: callable ``m<number>``, whose parameters belong to ``o<number>``."""

    number: int
    name: str
    seed: int
    is_exact: bool

    @property
    def kind(self) -> Kind:
        return ZOO[self.name]

    def lines(self, device: str) -> list[str]:
        names = {"o": f"o{self.number}", "m": f"m{self.number}"}
        build = self.kind.build.format(**names)
        lines = [f"torch.manual_seed({self.seed})"]
        lines += [f"with torch.device(DEV): {build}"] if device != "cpu" else [build]
        if self.kind.whole and self.is_exact:
            lines.append("whole({o})".format(**names))
        lines.append("{m} = {call}".format(call=(self.kind.call or "{o}").format(**names), m=names["m"]))
        return lines


@dataclass(frozen=True)
class Group:
    """The pieces that one call of ``make_graphed_callables`` captures, and its options."""

    pieces: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def line(self, by_number: dict[int, Piece]) -> str:
        names = [f"m{number}" for number in self.pieces]
        is_chain = dict(self.options).get("chain")
        samples = ["(" + "leaf(0, DEV), " * by_number[n].kind.takes + ")" for n in self.pieces]
        if is_chain and all(len(by_number[n].kind.gives) == 1 for n in self.pieces[:-1]):
            del samples[1:]
        options = "".join(f", {key}={value!r}" for key, value in self.options)
        joined = f"({', '.join(names)},)"
        call = f"tg.make_graphed_callables({joined}, ({', '.join(samples)},), num_warmup_iters=1{options})"
        return f"if graph: {joined} = {call}"


@dataclass(frozen=True)
class Step:
    """Lines that belong together.

    Attributes:
        kind: what they do, for statistics and for telling failures apart.
        is_early: they come before the capture.
    """

    code: str
    kind: str
    is_early: bool = False

    @property
    def names(self) -> set[str]:
        return set(_NAME.findall(self.code))

    @property
    def makes(self) -> set[str]:
        found = re.findall(r"(?:^|: )((?:[a-z]+\d+(?:, )?)+) = ", self.code, re.MULTILINE)
        return {name for names in found for name in names.split(", ")}


@dataclass(frozen=True)
class Program:
    """Pieces, which of them are graphed, and steps.

    Attributes:
        is_exact: all sums are exact, so the order of additions, which a replay may change, does not show.
    """

    seed: int
    device: str
    is_exact: bool
    pieces: tuple[Piece, ...]
    groups: tuple[Group, ...]
    steps: tuple[Step, ...] = field(default=())

    def parts(self) -> Iterator[tuple[str, str]]:
        """(kind, lines) of everything, in the order in which it runs."""
        for piece in self.pieces:
            yield f"build {piece.name}", "\n".join(piece.lines(self.device))
        yield from ((step.kind, step.code) for step in self.steps if step.is_early)
        by_number = {piece.number: piece for piece in self.pieces}
        for group in self.groups:
            yield "capture", group.line(by_number)
        yield "seed", f"torch.manual_seed({self.seed})"
        yield from ((step.kind, step.code) for step in self.steps if not step.is_early)

    def without(self, steps: set[int]) -> Program:
        """The program without the steps of these positions, and without what depends on them."""
        gone = {name for position in steps for name in self.steps[position].makes}
        kept = []
        for position, step in enumerate(self.steps):
            if position in steps or gone & step.names:
                gone |= step.makes
            else:
                gone -= step.makes
                kept.append(step)
        return replace(self, steps=tuple(kept))

    def avoiding(self, pattern: str) -> Program | None:
        """The program without pieces and steps whose name or kind matches ``pattern``; None if no graphed one stays."""
        if not pattern:
            return self
        program = self.without({i for i, step in enumerate(self.steps) if re.fullmatch(pattern, step.kind)})
        for piece in self.pieces:
            if re.fullmatch(pattern, piece.name):
                program = program.without_piece(piece.number)
        return program if program.groups else None

    def bypassing(self, position: int) -> Program | None:
        """The program in which a call's first result is its first argument; None where the step is no such call."""
        step = self.steps[position]
        call = re.fullmatch(r"([yz]\d+)(?:, \w+)* = .*?\b([a-z]\d+)\b[^mo]*", step.code)
        if call is None or call[2][0] in "mo":
            call = re.fullmatch(r"([yz]\d+)(?:, \w+)* = m\d+\(([a-z]\d+).*", step.code)
        if call is None:
            return None
        rename = functools.partial(re.sub, rf"\b{call[1]}\b(?! kept| hook)", call[2])
        steps = [*self.steps[:position], *(replace(s, code=rename(s.code)) for s in self.steps[position + 1 :])]
        return replace(self, steps=tuple(steps))

    def without_piece(self, number: int) -> Program:
        names = {f"m{number}", f"o{number}"}
        touching = {i for i, step in enumerate(self.steps) if names & step.names}
        groups = [replace(g, pieces=tuple(n for n in g.pieces if n != number)) for g in self.groups]
        return replace(
            self.without(touching),
            pieces=tuple(piece for piece in self.pieces if piece.number != number),
            groups=tuple(group for group in groups if group.pieces),
        )

    def source(self, title: str) -> str:
        """A program that stands alone: it runs both worlds and prints what differs."""
        body = "\n".join(code for _, code in self.parts())
        used = [getattr(prelude, name) for name in _HELPERS if re.search(rf"\b{name}\b", body)]
        used = [prelude.data, *used] if prelude.leaf in used and prelude.data not in used else used
        used = [prelude.state, *used] if {prelude.versions, prelude.product} & {*used} else used
        kinds = [source for piece in self.pieces for source in piece.kind.sources]
        sources = [inspect.getsource(one) for one in dict.fromkeys([prelude.ints, *used, *kinds])]
        if any("CONSTANT" in source for source in sources):
            sources.insert(0, f"CONSTANT = {inspect.getsource(pieces).split('CONSTANT = ')[1].splitlines()[0]}\n")
        indented = "\n".join("    " + line for line in body.splitlines())
        return _ALONE.format(title=title, sources="\n".join(sources), device=self.device, body=indented)


_HELPERS = (
    *("data", "leaf", "whole", "params", "state", "versions", "written_since", "product", "late_backward"),
    *("add_into_main_grad", "in_threads"),
)

_ALONE = '''"""{title}"""
from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import te_graph as tg

torch.use_deterministic_algorithms(True)
torch.utils.deterministic.fill_uninitialized_memory = False
DEV, LOG, KEPT = "{device}", {{}}, {{}}


def see(name, value):
    if value is None and name.removesuffix(", at the end").endswith("hook"):
        return
    LOG.setdefault(name, []).append(copy.copy(value.tolist() if hasattr(value, "tolist") else value))


def keep(name, value):
    see(name, value)
    KEPT[name + ", at the end"] = value


def grads(name, owner):
    for i, p in enumerate(owner.parameters() if isinstance(owner, nn.Module) else []):
        see(f"{{name}}[{{i}}].grad", getattr(p, "main_grad", p.grad))


{sources}

def run(graph: bool) -> None:
{body}


def world(graph: bool) -> dict[str, list]:
    LOG.clear(), KEPT.clear()
    try:
        run(graph)
    except Exception as error:
        LOG["raised"] = [f"{{type(error).__name__}}: {{error}}"]
    for name, value in KEPT.items():
        see(name, value)
    return dict(LOG)


eager, graphed = world(False), world(True)
for name in dict.fromkeys([*eager, *graphed]):
    if repr(eager.get(name)) != repr(graphed.get(name)):
        print(name, f"eager   {{eager.get(name)}}", f"graphed {{graphed.get(name)}}", sep="\\n   ")
'''
