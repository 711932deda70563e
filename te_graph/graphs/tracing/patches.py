"""Functions and methods of Python and torch that are patched for as long as a capture is under way."""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable
from typing import Any

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
    """Context that calls ``on_name`` with the names of the attributes that the user's code, on any thread, asks for by
    ``getattr`` and the like."""

    def __init__(self, on_name: Callable[[str], None]) -> None:
        self.on_name = on_name

    def __enter__(self) -> NameWatch:
        _attribute_functions.begin(self)
        return self

    def __exit__(self, *failure: object) -> None:
        _attribute_functions.end(self)


class _AttributeFunctions(Patch):
    """``getattr`` and the like, which tell the watches the names that code of the user's gives them."""

    def __init__(self) -> None:
        super().__init__()
        self._own = {name: vars(builtins)[name] for name in ("getattr", "hasattr", "setattr", "delattr")}
        self._patched = {name: self._reporting(function) for name, function in self._own.items()}

    def _reporting(self, function: Callable) -> Callable:
        def reporting(*args: Any) -> Any:
            if len(args) > 1 and type(args[1]) is str and is_user_file(sys._getframe(1).f_code.co_filename):
                for watch in self.users:
                    watch.on_name(args[1])
            return function(*args)

        reporting.__name__ = reporting.__qualname__ = function.__name__
        reporting.__module__ = function.__module__
        return reporting

    def _patch(self) -> None:
        vars(builtins).update(self._patched)

    def _restore(self) -> None:
        vars(builtins).update(self._own)


_attribute_functions = _AttributeFunctions()
