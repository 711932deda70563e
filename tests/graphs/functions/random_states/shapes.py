"""What the state of a random program is made of, and what code does to it.

In the templates ``#`` is the path to a value, ``$`` a number or the like as Python writes it, ``@`` a new part.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

# What every program begins with, and what ``KINDS`` name.
HEADER = """
import copy
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

@dataclass
class Row:
    n: Any = 0
    l: Any = None
    d: Any = None

@dataclass(slots=True)
class SlottedRow:
    n: Any = 0
    l: Any = None

class Pair(NamedTuple):
    n: Any
    l: Any

class Table(dict):
    pass

class Slots:
    __slots__ = ("n", "l")
    def __init__(self, n, l):
        self.n, self.l = n, l

def given(*args, **named):
    return args

def returning(value):
    return lambda: value

def vars_of(kind):
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}
"""
_VALUES = ("0", "0", "1", "1.5", "None", "'s'", "True", "(1, 2)")
_USUAL = 0.8  # of what a function makes holds what was there, so that it can be replayed


@dataclass(frozen=True)
class Part:
    """Where a value may hold another one.

    Attributes:
        step: from the path of the owner to that of the part.
        written: in an expression that makes the owner.
        is_settable: by an assignment.
        is_number: it is none of the others.
    """

    step: str
    written: str = "@"
    is_settable: bool = True
    is_number: bool = False


@dataclass(frozen=True)
class Kind:
    """A kind of values.

    Attributes:
        made: an expression, with ``*`` for its parts.
        parts: that there may be.
        least: how many of them there are at least.
        changes: statements.
        settings: those among them that bind the name again.
        copies: expressions, besides those of ``copy``.
        has_copies: ``copy`` knows it.
    """

    made: str
    parts: tuple[Part, ...] = ()
    least: int = 0
    changes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    has_copies: bool = True


_ITEMS = (Part("[0]"), Part("[1]"))
_KEYS = (Part("['k']", "'k': @"), Part("['m']", "'m': @"))
_FIELDS = (Part(".n", "n=@", is_number=True), Part(".l", "l=@"), Part(".d", "d=@"))
_FIXED_FIELDS = tuple(Part(part.step, part.written, False, part.is_number) for part in _FIELDS)
_FIXED_KEYS = tuple(Part(part.step, part.written, False) for part in _KEYS)
_OF_ATTRIBUTES = ("#.n = $", "#.n = $", "setattr(#, 'n', $)", "#.n = []")
_OF_DICTS = ("#['z'] = $", "#.update(z=$)", "#.setdefault('z', []).append($)", "#.pop('z', None)", "#['z'] = []")
_MERGE = ("# |= {'z': $}",)
KINDS = {
    "number": Kind("$"),
    "list": Kind(
        "[*]",
        _ITEMS,
        1,
        ("#.append($)", "#.insert(0, $)", "#.extend([$])", "#.append(#.pop())", "#[len(#):] = [$]", "#.append({})"),
        ("# += [$]",),
        ("list(#)", "#[:]", "[one for one in #]", "[*#]"),
    ),
    "empty list": Kind("[]", changes=("#.append($)",), settings=("# += [$]",), copies=("list(#)",)),
    "tuple": Kind("(*,)", (Part("[0]", is_settable=False), Part("[1]", is_settable=False)), 1),
    "deque": Kind("deque([*], maxlen=2)", _ITEMS, 2, ("#.append(@)", "#.rotate(1)", "#.appendleft(@)")),
    "dict": Kind("{*}", _KEYS, 1, _OF_DICTS, _MERGE, ("dict(#)", "{**#}", "{k: v for k, v in #.items()}")),
    "empty dict": Kind("{}", changes=_OF_DICTS, settings=_MERGE, copies=("dict(#)",)),
    "Table": Kind("Table({*})", _KEYS, 1, _OF_DICTS, _MERGE),
    "OrderedDict": Kind("OrderedDict({*})", _KEYS, 1, (*_OF_DICTS, "#.move_to_end('k')"), _MERGE),
    "UserDict": Kind("UserDict({*})", _KEYS, 1, _OF_DICTS),
    "UserList": Kind("UserList([*])", _ITEMS, 1, ("#.append($)", "#.insert(0, $)"), copies=("#[:]",)),
    "Row": Kind("Row(*)", _FIELDS, 3, _OF_ATTRIBUTES, copies=("replace(#)", "replace(#, n=$)")),
    "SlottedRow": Kind("SlottedRow(*)", _FIELDS[:2], 2, _OF_ATTRIBUTES, copies=("replace(#)", "replace(#, n=$)")),
    "Slots": Kind("Slots(*)", _FIELDS[:2], 2, _OF_ATTRIBUTES),
    "Pair": Kind("Pair(*)", _FIXED_FIELDS[:2], 2, copies=("#._replace(n=$)",)),
    "array": Kind("np.zeros(2)", changes=("#[0] = 1", "#[:] = 0", "#.fill(2)", "np.add(#, 1, out=#)")),
    "view": Kind("np.zeros(4).reshape(2, 2)", changes=("#[0, 0] = 1", "#[1] = 0")),
    "set": Kind("set()", changes=("#.add(0)", "#.add(1)", "#.discard(0)", "#.clear()")),
    "defaultdict": Kind("defaultdict(list)", changes=("#['q'].append($)", "#['q']", "#.clear()")),
    "Counter": Kind("Counter()", changes=("#['q'] += 1", "#.update('ab')", "#.clear()")),
    "bytearray": Kind("bytearray(2)", changes=("#[0] = 1", "#[1] = 0", "#.append(1)")),
    "partial": Kind("partial(given, *)", (Part(".args[0]", is_settable=False), Part(".keywords['x']", "x=@")), 2),
    "proxy": Kind("MappingProxyType({*})", _FIXED_KEYS, 1, has_copies=False),
    "closure": Kind("returning(*)", (Part(".__closure__[0].cell_contents", is_settable=False),), 1, has_copies=False),
}
_LEAVES = ("number", "number", "empty list", "empty dict", "array", "view", "set", "Counter")
_INNER = (*(kind for kind in KINDS if not kind.startswith("empty")), "list", "dict", "Row")


@dataclass(frozen=True)
class Shape:
    """A kind, and the shapes of the parts that there are."""

    kind: str
    parts: tuple[tuple[Part, Shape], ...] = ()

    @staticmethod
    def draw(rng: random.Random, depth: int) -> Shape:
        """One with parts at most so deep."""
        kind = rng.choice(_INNER if depth else _LEAVES)
        parts = KINDS[kind].parts
        chosen = parts[: rng.randint(KINDS[kind].least, len(parts))]
        return Shape(kind, tuple((p, Shape("number") if p.is_number else Shape.draw(rng, depth - 1)) for p in chosen))

    def spots(self, path: str, is_settable: bool = True) -> Iterator[Spot]:
        """That of what is at ``path``, and those in it."""
        yield Spot(path, self, is_settable)
        for part, shape in self.parts:
            yield from shape.spots(path + part.step, part.is_settable)

    def made(self, rng: random.Random, is_first: bool = False) -> str:
        """An expression that makes such a value: as it is in the beginning, or mostly so."""
        if self.kind == "number":
            return "0" if is_first or rng.random() < _USUAL else value(rng)
        written = [part.written.replace("@", shape.made(rng, is_first)) for part, shape in self.parts]
        return KINDS[self.kind].made.replace("*", ", ".join(written))


@dataclass(frozen=True)
class Spot:
    """Where a value of ``shape`` is."""

    path: str
    shape: Shape
    is_settable: bool = True

    def change(self, rng: random.Random) -> str:
        """A statement that changes what is there; empty where none does."""
        kind = KINDS[self.shape.kind]
        return self._filled(rng.choice([*kind.changes, *(kind.settings if self.is_settable else ())] or [""]), rng)

    def copy(self, rng: random.Random) -> str:
        """An expression."""
        kind = KINDS[self.shape.kind]
        general = ("copy.copy(#)", "copy.deepcopy(#)") if kind.has_copies else ("#",)
        return self._filled(rng.choice((*general, *kind.copies)), rng)

    def is_apart_from(self, other: Spot) -> bool:
        """Whether neither is in the other."""
        return not (self.path.startswith(other.path) or other.path.startswith(self.path))

    def _filled(self, template: str, rng: random.Random) -> str:
        part = self.shape.parts[-1][1].made(rng) if self.shape.parts else ""
        return template.replace("@", part).replace("$", value(rng)).replace("#", self.path)


def value(rng: random.Random) -> str:
    """What is no container."""
    return rng.choice(_VALUES)
