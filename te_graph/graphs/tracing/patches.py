"""Functions and methods of Python and torch that are patched for as long as a capture is under way."""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from te_graph.common.as_written import import_compiler
from te_graph.common.dispatch import is_user_file
from te_graph.common.own_objects import OwnObject


class Patch(OwnObject):
    """A change of what all threads share: made by the first user, undone by the last.

    Attributes:
        users: captures that want it patched at present.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.users: tuple[Any, ...] = ()

    def begin(self, user: Any) -> None:
        with self._lock:
            self.users = (*self.users, user)
            if len(self.users) == 1:
                self._patch()

    def end(self, user: Any) -> None:
        with self._lock:
            last = next(number for number in reversed(range(len(self.users))) if self.users[number] is user)
            self.users = (*self.users[:last], *self.users[last + 1 :])
            if not self.users:
                self._restore()

    def _patch(self) -> None:
        raise NotImplementedError

    def _restore(self) -> None:
        raise NotImplementedError


class NameWatch:
    """Context that hears which attributes code on any thread asks for by ``getattr`` and the like.

    Args:
        on_name: is called with the names that the user's code gives.
        on_look: is called with an object, the name of an attribute, and the frame of the code of a library that asks
            for it.
    """

    def __init__(self, on_name: Callable[[str], None], on_look: Callable[[Any, str, FrameType], None]) -> None:
        self.on_name = on_name
        self.on_look = on_look

    def __enter__(self) -> NameWatch:
        _attribute_functions.begin(self)
        return self

    def __exit__(self, *failure: object) -> None:
        _attribute_functions.end(self)


class _AttributeFunctions(Patch):
    """``getattr`` and the like, which tell the watches the names that code gives them."""

    def __init__(self) -> None:
        super().__init__()
        self._own = {name: vars(builtins)[name] for name in ("getattr", "hasattr", "setattr", "delattr")}
        self._patched = {name: self._reporting(function) for name, function in self._own.items()}

    def _reporting(self, function: Callable) -> Callable:
        is_look = function in (self._own["getattr"], self._own["hasattr"])

        def reporting(*args: Any) -> Any:
            if len(args) > 1 and isinstance(args[1], str):
                frame, name = sys._getframe(1), str.__str__(args[1])  # of a derived class, too
                if is_user_file(frame.f_code.co_filename):
                    for watch in self.users:
                        watch.on_name(name)
                elif is_look:
                    for watch in self.users:
                        watch.on_look(args[0], name, frame)
            return function(*args)

        reporting.__name__ = reporting.__qualname__ = function.__name__
        reporting.__module__ = function.__module__
        return reporting

    def _patch(self) -> None:
        import_compiler()  # which makes tables of Python's functions
        vars(builtins).update(self._patched)

    def _restore(self) -> None:
        vars(builtins).update(self._own)


_attribute_functions = _AttributeFunctions()
