"""Which Python functions run while a function is watched, whoever calls them: torch, Python or the user's code."""

from __future__ import annotations

import gc
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

import torch

from te_graph.dispatch import is_user_file
from te_graph.frame import call
from te_graph.names import is_users_module

_CALL = call.__code__  # below it runs what is watched
_ASIDE = ("<frozen importlib", typing.__file__)
_MOST_INSTANCES = 16  # of one piece of code: functions made anew for each call or object


class CodeWatch:
    """Context that notes the code of every function that starts on this thread, or in a backward on any thread.

    What an import runs, or the making of a type for an annotation, is left out: it runs once. So is what the
    garbage collector runs, its callbacks and finalizers, which may be at any time.

    Attributes:
        codes: it, by identity: equal code may be there twice, with other globals.
    """

    def __init__(self) -> None:
        self.codes: dict[int, types.CodeType] = {}
        self._thread = threading.get_ident()
        self._stop: Callable[[], None] = lambda: None
        self._callbacks_of_collector = {_code_of(callback) for callback in gc.callbacks}
        self._collects_on: int | None = None  # thread

    def __enter__(self) -> CodeWatch:
        gc.callbacks.append(self._on_collection)
        self._stop = self._monitored() if hasattr(sys, "monitoring") else self._profiled()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop()
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        self._collects_on = threading.get_ident() if phase == "start" else None

    def _is_aside(self, frame: types.FrameType | None) -> bool:
        """True below what runs once, or at any time."""
        if self._collects_on == threading.get_ident():
            return True
        while frame is not None and frame.f_code is not _CALL:
            code = frame.f_code
            if code.co_filename.startswith(_ASIDE) or code in self._callbacks_of_collector:
                return True
            frame = frame.f_back
        return False

    def _monitored(self) -> Callable[[], None]:
        monitoring = sys.monitoring
        tool = next((tool for tool in range(6) if monitoring.get_tool(tool) is None), None)
        if tool is None:
            return self._profiled()

        def note(code: types.CodeType, offset: int) -> None:
            is_here = threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1
            if is_here and id(code) not in self.codes and not self._is_aside(sys._getframe(1)):
                self.codes[id(code)] = code

        def stop() -> None:
            monitoring.set_events(tool, 0)
            monitoring.register_callback(tool, monitoring.events.PY_START, None)
            monitoring.free_tool_id(tool)

        monitoring.use_tool_id(tool, "te_graph")
        monitoring.register_callback(tool, monitoring.events.PY_START, note)
        monitoring.set_events(tool, monitoring.events.PY_START)
        return stop

    def _profiled(self) -> Callable[[], None]:
        """Where Python has no events for many: of this thread alone."""
        outer = sys.getprofile()

        def note(frame: types.FrameType, event: str, given: Any) -> None:
            if event == "call" and id(frame.f_code) not in self.codes and not self._is_aside(frame):
                self.codes[id(frame.f_code)] = frame.f_code
            if outer is not None:
                outer(frame, event, given)

        sys.setprofile(note)
        return lambda: sys.setprofile(outer)


def _code_of(callback: Any) -> types.CodeType | None:
    function = callback if hasattr(callback, "__code__") else type(callback).__call__
    return getattr(function, "__code__", None)


def is_generated(code: types.CodeType) -> bool:
    """True for code that was compiled from text, as the methods of dataclasses are."""
    return code.co_filename.startswith("<")


def _is_users(function: types.FunctionType) -> bool:
    return is_users_module(function.__globals__.get("__name__", ""))


def functions_of(codes: Iterable[types.CodeType]) -> list[types.FunctionType]:
    """The functions of the user's that have one of ``codes``, as far as there are any at present."""
    wanted = [code for code in codes if is_user_file(code.co_filename)]
    found: dict[int, list[types.FunctionType]] = {id(code): [] for code in wanted}
    for holder in gc.get_referrers(*wanted) if wanted else ():
        if isinstance(holder, types.FunctionType) and id(holder.__code__) in found and _is_users(holder):
            found[id(holder.__code__)].append(holder)
    return [function for functions in found.values() for function in functions[:_MOST_INSTANCES]]
