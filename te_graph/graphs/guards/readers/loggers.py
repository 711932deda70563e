"""What code can read of loggers: levels and handlers where it asks for them, what was put on them, and what of the
project's own takes the records that it logs."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterator, Set
from typing import Any

from te_graph import _C
from te_graph.common.dispatch import is_project_file
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.tracing.code_names import strings_in
from te_graph.graphs.tracing.names import Names, codes_of

_Kind = _C.StepKind
LOGGERS = (logging.Logger, logging.LoggerAdapter)
_ASK_FOR_LEVELS = frozenset({"isEnabledFor", "getEffectiveLevel", "level", "disabled", "setLevel"})
_ASK_FOR_HANDLERS = frozenset({"hasHandlers", "handlers"})
_OF_LEVELS = ("level", "disabled", "parent")
_OF_HANDLERS = ("handlers", "propagate", "parent")
_OF_ROOT = frozenset({"root", "debug", "info", "warning", "error", "exception", "critical", "log"})
_OWN = frozenset(vars(logging.Logger("")))
_KEPT_FOR_ITSELF = frozenset({"_cache", "manager"})  # the first grows while code asks for levels


def inside_logger(source: Source, names: Names, reads: Callable[[Source, str], bool]) -> Iterator[Source]:
    """What the logger at ``source``, or what adapts one there, leads to.

    Args:
        names: that the code says. Levels and handlers that it does not ask for matter to what is logged alone, but for
            those of the project's own that were seen to run.
        reads: whether the code may read an attribute of the object at a source.
    """
    members, name, said = source.attributes(), source.name, names.said
    if isinstance(source.obj, logging.LoggerAdapter):
        yield members.item("logger", f"{name}.logger")
    asked: set[str] = set()
    if isinstance(source.obj, logging.Logger):
        asked.update(() if _ASK_FOR_LEVELS.isdisjoint(said) else _OF_LEVELS)
        asked.update(() if _ASK_FOR_HANDLERS.isdisjoint(said) else _OF_HANDLERS)
        if not _ASK_FOR_LEVELS.isdisjoint(said):
            manager = source.child(source.obj.manager, f"manager of {name}", _Kind.ATTRIBUTE, "manager")
            yield manager.attributes().item("_disable", f"level disabled in the manager of {name}")
        for taker in _takers(source.obj):
            if _has_run(taker, names):
                yield source.child(taker, f"{type(taker).__name__} of {name}", _Kind.KNOWN)
    for key in list(members.obj):
        is_put_there = key in said or key not in _OWN
        if key in asked or (is_put_there and key not in _KEPT_FOR_ITSELF and reads(source, key)):
            yield members.item(key, f"{name}.{key}")


def _takers(logger: logging.Logger) -> Iterator[Any]:
    """What may run for a record of ``logger``: its filters, the handlers of it and of those above, and theirs."""
    yield from logger.filters
    above: logging.Logger | None = logger
    while above is not None:
        for handler in above.handlers:
            yield from (handler, *handler.filters, handler.formatter)
        above = above.parent if above.propagate else None


def _has_run(taker: Any, names: Names) -> bool:
    """Whether code of the project's was seen to run in the class of ``taker``, or in the function that it is or calls.
    Handlers of packages show what is logged, or keep it for a test."""
    while isinstance(taker, functools.partial):
        taker = taker.func
    function = taker.__func__ if isinstance(taker, types.MethodType) else taker
    members = (member for kind in type(taker).__mro__ for member in vars(kind).values())
    functions = (function,) if isinstance(function, types.FunctionType) else filter(names.has_run, members)
    codes = (code for function in functions for code in codes_of(function))
    return any(id(code) in names.ran and is_project_file(code.co_filename) for code in codes)


def loggers_by_name(source: Source, said: Set[str]) -> Iterator[Source]:
    """The loggers that the function at ``source`` may look up: the one above all, and those that are called as one of
    the names ``said``, or as its module."""
    strings = strings_in(source.obj.__code__)
    if not ("getLogger" in strings or ("logging" in strings and not _OF_ROOT.isdisjoint(strings))):
        return
    table = logging.root.manager.loggerDict
    names = {*said, source.obj.__globals__.get("__name__")} & table.keys()
    found = [table[name] for name in sorted(names)]
    for logger in (logging.root, *(one for one in found if isinstance(one, logging.Logger))):
        yield source.child(logger, f"logger {logger.name}", _Kind.KNOWN)
