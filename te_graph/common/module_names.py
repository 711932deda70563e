"""Modules that a user names: by names with wildcards, by classes, or by a function."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn


def chosen_modules(choice: Any, names: Mapping[nn.Module, str], argument: str) -> list[nn.Module]:
    """The modules that one ``choice`` stands for: a name with or without wildcards, a class, or a function
    ``(name, module) -> bool``.

    Args:
        names: of all modules.
        argument: in messages, as "graph_layers: expected layers".

    Raises:
        TypeError: it is none of these.
        ValueError: a name is that of no module.
    """
    if isinstance(choice, str):
        return _named(choice, names, argument)
    if isinstance(choice, type):
        return [module for module in names if isinstance(module, choice)]
    if callable(choice) and not isinstance(choice, nn.Module):
        return [module for module, name in names.items() if choice(name, module)]
    raise TypeError(
        f"{argument} to be names, classes, or a function (name, module) -> bool, got {type(choice).__name__}"
    )


def as_choices(choices: Any) -> tuple[Any, ...]:
    """What is one choice, or several, as several."""
    is_one = isinstance(choices, str | type | nn.Module) or not isinstance(choices, Iterable)
    return (choices,) if is_one else tuple(choices)


def _named(pattern: str, names: Mapping[nn.Module, str], argument: str) -> list[nn.Module]:
    """The modules whose name is ``pattern``, or matches its wildcards; a ValueError if there is none."""
    found = [module for module, name in names.items() if name == pattern or fnmatch.fnmatchcase(name, pattern)]
    if not found:
        near = difflib.get_close_matches(pattern, names.values(), n=3)
        hint = f": perhaps {' or '.join(map(repr, near))}" if near else ""
        raise ValueError(f"{argument} to name modules of the model, got {pattern!r}{hint}")
    return found
