"""Methods that do not keep their objects alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weak_method(owner: Any, name: str) -> Callable[..., Any]:
    """``owner.name`` while ``owner`` lives; afterwards what does nothing."""
    reference = weakref.ref(owner)

    def call(*args: Any) -> Any:
        alive = reference()
        return None if alive is None else getattr(alive, name)(*args)

    return call
