"""What is told where a layer is called with something that is no tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def check_tensors(layer: str, /, *, may_be_none: tuple[str, ...] = (), **arguments: Any) -> None:
    """Raise TypeError if one of ``arguments`` of ``layer`` is no tensor. Asked where another error has come, so that
    calls which are right take no time for it."""
    for name, value in arguments.items():
        is_left_out = value is None and name in may_be_none
        if not (isinstance(value, Tensor) or is_left_out):
            wanted = "a tensor or None" if name in may_be_none else "a tensor"
            raise TypeError(f"{layer}: expected {name} to be {wanted}, got {type(value).__name__}")
