"""Whose line it is: that of the user, or of torch, inside what is captured, never the one that asks for the capture."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch

from te_graph.common.dispatch import PACKAGE, TORCH, is_user_file
from te_graph.graphs.tracing.open_checkpoints import without_open_checkpoints

BACKWARD = "backward"  # the site of what the autograd engine does itself
_ENGINE_ENTRY = "_engine_run_backward"
_CAPTURES = frozenset({"run_region", "capture_all"})  # functions of this package with what is captured inside
# They stand around lines of torch that say more.
_WRAPPERS = tuple(TORCH + path for path in ("_compile.py", "_dynamo" + os.sep, "_ops.py", "overrides.py"))
_NO_LINE = "the callable itself"  # it is a function of C++, or of this package


def call_region(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call what is captured, or is to be captured; checkpoints inside it do not outlive an exception."""
    return without_open_checkpoints(run_region, function, args, kwargs)


def run_region(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Where the captured code begins: sites are looked for from the innermost frame to that of this function."""
    return function(*args, **kwargs)


def user_site() -> str:
    """``file:line in function`` of the innermost frame outside torch, this package and the standard library.

    Where what is captured has no such frame, it is the innermost one of torch. A call made by the autograd engine
    itself has none between itself and the engine: it is ``backward (<node name>)``, or ``backward`` where the engine
    does not tell the node.
    """
    found = _site_among((frame.f_code, line) for frame, line in traceback.walk_stack(sys._getframe(1)))
    if found is not None:
        return found
    node = torch._C._current_autograd_node()
    return BACKWARD if node is None else f"{BACKWARD} ({node.name()})"


def site_of(error: BaseException) -> str | None:
    """As ``user_site``, of where ``error`` was raised; None where that was not inside what is captured.

    To be called by the caller of ``call_region``, or by the engine: the traceback must not hold outer frames yet.
    """
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    is_backward = any(code.co_name == _ENGINE_ENTRY for code, _ in frames)
    return _site_among(reversed(frames)) or (BACKWARD if is_backward else None)


def _site_among(frames: Iterable[tuple[CodeType, int]]) -> str | None:
    """The site among frames from the innermost on; None where the autograd engine comes first, or nothing is found."""
    of_torch = None
    for code, line in frames:
        if code.co_name == _ENGINE_ENTRY:
            return None
        if code.co_name in _CAPTURES and code.co_filename.startswith(PACKAGE):
            return of_torch or _NO_LINE
        if is_user_file(code.co_filename):
            return f"{code.co_filename}:{line} in {code.co_name}"
        if of_torch is None and code.co_filename.startswith(TORCH) and not code.co_filename.startswith(_WRAPPERS):
            of_torch = f"{code.co_filename}:{line} in {code.co_name}"
    return None
