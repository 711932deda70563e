"""The numbered blocks of a model, as the names of its modules tell them: "layers.0.", "h.11.", "block_2."."""

from __future__ import annotations

import re

_BLOCK = re.compile(r"^(.*?[._]|)(?:layers?|blocks?|h)[._](\d+)[._]")


def block_of(name: str) -> tuple[str, int] | None:
    """The stack and the number of the outermost block that a module of ``name`` is in; None: in none."""
    found = _BLOCK.match(name)
    return None if found is None else (found[1], int(found[2]))
