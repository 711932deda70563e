"""Names that loaded modules have for functions that others take the place of."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from typing import Any


def replace_in_modules(by_id: Mapping[int, Callable[..., Any]]) -> None:
    """Bind the names that loaded modules have for objects of these identities to others."""
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            names = vars(module)
            for name, value in list(names.items()):
                if id(value) in by_id:
                    names[name] = by_id[id(value)]
