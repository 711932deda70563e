"""What random functions, and who calls them, do to the state."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .shapes import Spot, value

_CONDITIONS = ("flag", "not flag", "len(repr(#)) > 3", "# is None", "# == 0", "isinstance(#, list)")
_WHEN = ("i == 3", "i == 4", "i % 2", "i > 2", "i < 3", "True")
_KEEPS = (
    *("log.append(#)",) * 4,
    "log.append([#])",
    "log[:] = [#]",
    "log.append(copy.copy(#))",
    "log.append(lambda kept=#: kept)",
    "log.append(partial(given, #))",
)


class Statements:
    """Draws statements over ``spots``, and some of ``computation``. Variables that they set are spots for later ones.

    Attributes:
        spots: that there are by now.
    """

    def __init__(self, rng: random.Random, spots: list[Spot], computation: Sequence[str] = ()) -> None:
        self._rng = rng
        self.spots = list(spots)
        self._computation = computation
        self._variables = 0

    def of_function(self, depth: int = 0) -> list[str]:
        """One or more, each of one or several lines."""
        kinds = ("change", "renew", "move", "copy", "take", "branch", "tensors")
        kind = self._rng.choices(kinds, (30, 25, 8, 7, 10, 8 if depth < 2 else 0, 12))[0]
        if kind == "take":
            return self._take()
        if kind == "branch":
            return self._branch(depth)
        if kind == "tensors":
            return [self._rng.choice(self._computation)]
        return self._edit(kind)

    def _edit(self, kind: str) -> list[str]:
        spot = self._rng.choice(self.spots)
        if kind == "change" and (change := spot.change(self._rng)):
            return [change]
        if kind == "move":
            return self._move()
        spot = self._rng.choice([one for one in self.spots if one.is_settable])
        return [f"{spot.path} = {spot.copy(self._rng) if kind == 'copy' else spot.shape.made(self._rng)}"]

    def _move(self) -> list[str]:
        """Let one thing be at two places, or two change places."""
        pairs = [
            (to, origin)
            for to in self.spots
            for origin in self.spots
            if to.is_settable and to.shape == origin.shape and to.shape.kind != "number" and to.is_apart_from(origin)
        ]
        if not pairs:
            return []
        to, origin = self._rng.choice(pairs)
        how = self._rng.choices(("move", "swap", "copy"), (5, 2, 3))[0]
        if how == "swap" and origin.is_settable:
            return [f"{to.path}, {origin.path} = {origin.path}, {to.path}"]
        return [f"{to.path} = {origin.copy(self._rng) if how == 'copy' else origin.path}"]

    def _take(self) -> list[str]:
        """Hold what is somewhere, put something new there, and change what was."""
        spot = self._rng.choice(self.spots)
        self._variables += 1
        variable = f"v{self._variables}"
        lines = [f"{variable} = {spot.path}"]
        inside = list(spot.shape.spots(variable, is_settable=False))
        if spot.is_settable and self._rng.random() < 0.6:
            lines.append(f"{spot.path} = {spot.shape.made(self._rng)}")
        if change := self._rng.choice(inside).change(self._rng):
            lines.append(change)
        self.spots += inside
        return lines

    def _branch(self, depth: int) -> list[str]:
        before = list(self.spots)
        condition = self._rng.choice(_CONDITIONS).replace("#", self._rng.choice(before).path)
        body = [one for _ in range(self._rng.randint(1, 2)) for one in self.of_function(depth + 1)]
        self.spots = before  # variables set there may not be
        return [indented(f"if {condition}:", body)] if body else []

    def of_caller(self) -> list[str]:
        """What a caller does between two calls: mostly it keeps something."""
        rng = self._rng
        roll = rng.random()
        if roll < 0.6:
            spot = rng.choice(self.spots)
            keeps = (*_KEEPS, "log.append(#[:1])") if spot.shape.kind == "array" else _KEEPS
            lines = [rng.choice(keeps).replace("#", spot.path)]
            return [indented(f"if {rng.choice(_WHEN)}:", lines)] if rng.random() < 0.3 else lines
        if roll < 0.8:
            return [rng.choice(("log.clear()", "del log[:-1]"))]
        lines = self._edit(rng.choice(("change", "renew", "move", "copy")))
        return [indented(f"if {rng.choice(_WHEN)}:", lines)] if lines else []

    def result(self) -> str:
        """A statement that returns something, or nothing."""
        rng = self._rng
        # What was taken out is returned more often than it is among the spots.
        candidates = [spot.path for spot in self.spots for _ in range(1 + spot.path.startswith("v"))]
        roll = rng.random()
        if roll < 0.3:
            return f"return {rng.choice(candidates)}"
        if roll < 0.45:
            return f"return [{rng.choice(candidates)}, {rng.choice(candidates)}]"
        if roll < 0.55:
            return f"return {{'t': tr.total, 'x': {rng.choice(candidates)}}}"
        return f"return [{value(rng)}, {{}}]" if roll < 0.6 else "pass"


def indented(head: str, statements: list[str]) -> str:
    """A block of ``statements``, each of one or several lines, below ``head``."""
    lines = [line for statement in statements or ["pass"] for line in statement.split("\n")]
    return "\n    ".join([head, *lines])
