"""What a callable provably does not depend on: keyword arguments that ``**kwargs`` collects and no code looks at, and
the order of dictionaries."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from te_graph.common.dispatch import PACKAGE
from te_graph.graphs.graphed_class import plain_class
from te_graph.graphs.tracing.code_names import strings_in
from te_graph.graphs.tracing.keyword_uses import KeywordUses, collecting_variable, uses_of
from te_graph.graphs.tracing.monitoring_tool import listen
from te_graph.graphs.tracing.names import Names
from te_graph.graphs.tracing.source_lines import run_region

_PROBE = "te_graph_keyword_that_nothing_names"
_CALL_OF_MODULES = nn.Module._call_impl.__code__


@dataclass(frozen=True)
class IgnoredKeywords:
    """The keyword arguments that a callable ignores: all but some names.

    Attributes:
        taken: those names: what its code says, or takes as parameters.
    """

    taken: frozenset[str]

    def without(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """``kwargs`` but for what is ignored."""
        return {name: value for name, value in kwargs.items() if name in self.taken}

    def has_any(self, names: Iterable[str]) -> bool:
        """Whether one of ``names`` is ignored."""
        return not self.taken.issuperset(names)


def ignored_keywords(
    target: Any, names: Names, run: Callable[[dict[str, Any]], Any], hooks: str
) -> IgnoredKeywords | None:
    """What ``target``, a module or function, ignores; None where that cannot be proved.

    Args:
        names: that the code says which it runs.
        run: calls ``target`` as a capture will, with these keyword arguments besides; may raise.
        hooks: the option. What ``target`` passes on can be followed where it reaches functions alone, no hooks.
    """
    if names.reads_variables_above:
        return None
    return ignored_at_once(target) or (_ignored_by_receivers(target, run) if hooks == "refuse" else None)


def ignored_at_once(target: Any) -> IgnoredKeywords | None:
    """What ``target``, a module or function, ignores by its own code alone: where it passes nothing on."""
    code, uses = _uses_in(target)
    has_to_run = uses is None or uses.passed_at or uses.variables or uses.other_lines
    return None if has_to_run else IgnoredKeywords(_taken_by(code))


def _ignored_by_receivers(target: Any, run: Callable[[dict[str, Any]], Any]) -> IgnoredKeywords | None:
    """What ``target`` ignores, and so does every function that it passes keyword arguments on to."""
    code, uses = _uses_in(target)
    if uses is None or not hasattr(sys, "monitoring"):
        return None
    with contextlib.suppress(Exception), _without_logs(), _ProbeWatch() as watch:
        run({_PROBE: None})
        return IgnoredKeywords(frozenset(watch.taken)) if watch.proves(code) else None
    return None


@contextlib.contextmanager
def _without_logs() -> Iterator[None]:
    """Libraries tell of keywords that they do not know; this one is nobody's."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def orderless_parameters(target: Any) -> frozenset[str]:
    """The parameters of ``target`` of which its code does nothing but read items by constant keys: the order of a
    dictionary that is given there makes no difference."""
    code = _code_of(target)
    if code is None:
        return frozenset()
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found = {name: uses_of(code, name) for name in names}
    return frozenset(name for name, uses in found.items() if uses and not (uses.passed_at or uses.other_lines))


def _uses_in(target: Any) -> tuple[types.CodeType | None, KeywordUses | None]:
    """The code of ``target``, and what that does with the keyword arguments that it collects."""
    code = _code_of(target)
    variable = code and collecting_variable(code)
    return code, uses_of(code, variable) if variable else None


def _code_of(target: Any) -> types.CodeType | None:
    function = target
    if isinstance(target, nn.Module):
        handle = vars(target).get("te_graph")  # graphed already: the forward that it had before
        kind = plain_class(type(target))
        function = target.forward if handle is None else handle.own_forward or kind.forward
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _taken_by(code: types.CodeType) -> frozenset[str]:
    """All that ``code`` names: parameters, keys, keywords that it gives in calls."""
    count = code.co_argcount + code.co_kwonlyargcount
    return strings_in(code).union(code.co_varnames[:count])


class _ProbeWatch:
    """Context that follows the probe, a keyword argument that no code names, through all calls that pass it on.

    Attributes:
        taken: names in the functions that get it.
    """

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self._receivers: dict[types.CodeType, KeywordUses | None] = {}
        self._is_passed_on = True  # so far: all functions that get it do nothing else with it
        self._is_inside = False  # of the callable
        self._makes_partials = self._may_open_partials = False
        self._stop: Callable[[], None] | None = None

    def proves(self, code: types.CodeType) -> bool:
        """Whether ``code``, which is given the probe first, and all that get it from there do nothing with it but pass
        it on to functions written in Python."""
        is_hidden = self._makes_partials and self._may_open_partials
        return code in self._receivers and self._is_passed_on and not is_hidden

    def __enter__(self) -> _ProbeWatch:
        self._stop = listen(self._callbacks())
        self._is_passed_on &= self._stop is not None
        return self

    def __exit__(self, *failure: object) -> None:
        if self._stop is not None:
            self._stop()

    def _callbacks(self) -> dict[int, Callable[..., None]]:
        events = sys.monitoring.events
        on_call = {events.PY_START: self._on_start, events.CALL: self._on_call}
        return on_call | {events.LINE: self._on_line, events.RAISE: self._on_raise}

    def _on_start(self, code: types.CodeType, offset: int) -> None:
        self._is_inside |= code is run_region.__code__
        is_theirs = self._is_inside and not code.co_filename.startswith(PACKAGE)
        self._may_open_partials |= is_theirs and "keywords" in code.co_names
        variable = collecting_variable(code) if self._is_inside else None
        if variable is None:
            return
        frame = sys._getframe(1)
        held = frame.f_locals
        gets_it, uses = _PROBE in held.get(variable, ()), uses_of(code, variable)
        keys = [held.get(name) for name in uses.variables] if uses is not None else []
        if isinstance(held, dict):  # before Python 3.13 a copy, which would keep what the function lets go of
            held.clear()
        if gets_it:
            self._receivers[code] = uses
            self.taken.update(_taken_by(code), (key for key in keys if isinstance(key, str)))
            # Torch's call of a module gives it to ``forward``, and to hooks: modules with these are not followed.
            is_known = code is _CALL_OF_MODULES or uses is not None
            self._is_passed_on &= is_known and all(key is None or type(key) is str for key in keys)
            self._on_line(code, frame.f_lineno)

    def _on_call(self, code: types.CodeType, offset: int, function: Any, first: Any) -> None:
        uses = self._receivers.get(code)
        if uses is not None and offset in uses.passed_at:
            is_partial = function is functools.partial
            self._makes_partials |= is_partial
            self._is_passed_on &= _is_of_python(first if is_partial else function)

    def _on_line(self, code: types.CodeType, line: int) -> None:
        uses = self._receivers.get(code)
        self._is_passed_on &= uses is None or line not in uses.other_lines

    def _on_raise(self, code: types.CodeType, offset: int, error: BaseException) -> None:
        """Of a call that gets it and fails before its code begins: it may take other names."""
        self._is_passed_on &= code not in self._receivers


def _is_of_python(function: Any) -> bool:
    """Whether a call of ``function`` runs code written in Python, which can be looked at."""
    while isinstance(function, types.MethodType):
        function = function.__func__
    return isinstance(function, types.FunctionType) or isinstance(type(function).__call__, types.FunctionType)
