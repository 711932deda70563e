"""Which keyword arguments a callable provably ignores: of those that ``**kwargs`` collects and nobody looks at."""

from __future__ import annotations

import contextlib
import dis
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from te_graph.graphs.tracing.keyword_uses import collecting_variable, uses_of
from te_graph.graphs.tracing.names import strings_in
from te_graph.graphs.tracing.source_lines import run_region

_PROBE = "te_graph_keyword_that_nothing_names"
_CALL_OF_MODULES = nn.Module._call_impl.__code__


@dataclass(frozen=True)
class IgnoredKeywords:
    """What is ignored of what a callable collects: everything but some names.

    Attributes:
        taken: names that its code says, or takes as parameters.
    """

    taken: frozenset[str]

    def without(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """``kwargs`` but for what is ignored."""
        return {name: value for name, value in kwargs.items() if name in self.taken}


def ignored_at_once(target: Any) -> IgnoredKeywords | None:
    """What ``target``, a module or function, ignores by its own code alone: where it passes nothing on."""
    code = _code_of(target)
    variable = code and collecting_variable(code)
    uses = uses_of(code, variable) if variable else None
    return None if uses is None or uses.is_passed_on else IgnoredKeywords(_taken_by(code))


def ignored_by_all(target: Any, run: Callable[[dict[str, Any]], Any]) -> IgnoredKeywords | None:
    """What ``target`` ignores and everything that it passes it on to; None where that cannot be proved.

    Args:
        run: calls it as a capture will, with the keyword arguments that it is given besides; may raise.
    """
    code = _code_of(target)
    variable = code and collecting_variable(code)
    uses = uses_of(code, variable) if variable else None
    if uses is None or not uses.is_passed_on or not hasattr(sys, "monitoring"):
        return None
    with contextlib.suppress(Exception), _Followed() as followed:
        run({_PROBE: None})
        return IgnoredKeywords(frozenset().union(*map(_taken_by, followed.receivers))) if followed.is_proved else None
    return None


def _code_of(target: Any) -> types.CodeType | None:
    function = target.forward if isinstance(target, nn.Module) else target
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _taken_by(code: types.CodeType) -> frozenset[str]:
    """Whatever it names: a parameter, a key, a keyword that it gives itself."""
    count = code.co_argcount + code.co_kwonlyargcount
    return strings_in(code).union(code.co_varnames[:count])


class _Followed:
    """Context that follows a keyword argument that no code names through all calls to which it is passed on.

    Attributes:
        receivers: the code of the functions that get it.
        is_proved: none of them does anything with it but to pass it on, to a function of Python's.
    """

    def __init__(self) -> None:
        self.receivers: dict[types.CodeType, None] = {}
        self.is_proved = True
        self._is_inside = False  # of what is captured
        self._tool = -1

    def __enter__(self) -> _Followed:
        monitoring = sys.monitoring
        self._tool = next((tool for tool in range(6) if monitoring.get_tool(tool) is None), -1)
        if self._tool < 0:
            self.is_proved = False
            return self
        monitoring.use_tool_id(self._tool, "te_graph")
        monitoring.register_callback(self._tool, monitoring.events.PY_START, self._on_start)
        monitoring.register_callback(self._tool, monitoring.events.CALL, self._on_call)
        monitoring.set_events(self._tool, monitoring.events.PY_START | monitoring.events.CALL)
        return self

    def __exit__(self, *failure: object) -> None:
        if self._tool < 0:
            return
        monitoring = sys.monitoring
        monitoring.set_events(self._tool, 0)
        for event in (monitoring.events.PY_START, monitoring.events.CALL):
            monitoring.register_callback(self._tool, event, None)
        monitoring.free_tool_id(self._tool)

    def _on_start(self, code: types.CodeType, offset: int) -> None:
        self._is_inside |= code is run_region.__code__
        variable = collecting_variable(code) if self._is_inside else None
        if variable is None or code in self.receivers:
            return
        held = sys._getframe(1).f_locals
        gets_it = _PROBE in held.get(variable, ())
        if isinstance(held, dict):  # before Python 3.13 a copy, which would keep what the function lets go of
            held.clear()
        if gets_it:
            self.receivers[code] = None
            # Hooks alone get it from torch's call of a module, and modules with such are not captured.
            self.is_proved &= code is _CALL_OF_MODULES or uses_of(code, variable) is not None

    def _on_call(self, code: types.CodeType, offset: int, function: Any, first: Any) -> None:
        if code in self.receivers and _gives_keywords(code, offset):
            self.is_proved &= _is_of_python(function)


def _gives_keywords(code: types.CodeType, offset: int) -> bool:
    """Whether the call at ``offset`` is given a dictionary of keyword arguments."""
    opcode, flags = code.co_code[offset : offset + 2]
    return dis.opname[opcode] == "CALL_FUNCTION_EX" and (flags & 1 == 1 or sys.version_info >= (3, 14))


def _is_of_python(function: Any) -> bool:
    """Whether a call of ``function`` begins with code of Python's, which is then looked at."""
    while isinstance(function, types.MethodType):
        function = function.__func__
    return isinstance(function, types.FunctionType) or isinstance(type(function).__call__, types.FunctionType)
