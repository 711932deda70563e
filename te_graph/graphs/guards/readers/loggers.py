"""What code can read of loggers: their levels and handlers where it asks for them, and what was put on them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Set

from te_graph import _C
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.tracing.code_names import strings_in

_Kind = _C.StepKind
LOGGERS = (logging.Logger, logging.LoggerAdapter)
_ASK_FOR_LEVELS = frozenset({"isEnabledFor", "getEffectiveLevel", "level", "disabled"})
_ASK_FOR_HANDLERS = frozenset({"hasHandlers", "handlers"})
_OF_LEVELS = ("level", "disabled", "parent")
_OF_HANDLERS = ("handlers", "propagate", "parent")
_OWN = frozenset(vars(logging.Logger("")))
_KEPT_FOR_ITSELF = frozenset({"_cache", "manager"})  # the first grows while code asks for levels


def inside_logger(source: Source, said: Set[str], reads: Callable[[Source, str], bool]) -> Iterator[Source]:
    """What the logger at ``source``, or what adapts one there, leads to.

    Args:
        said: names that the code says. Levels and handlers that it does not ask for matter to what is logged alone.
        reads: whether the code may read an attribute of the object at a source.
    """
    members, name = source.attributes(), source.name
    if isinstance(source.obj, logging.LoggerAdapter):
        yield members.item("logger", f"{name}.logger")
    asked: set[str] = set()
    if isinstance(source.obj, logging.Logger):
        asked.update(() if _ASK_FOR_LEVELS.isdisjoint(said) else _OF_LEVELS)
        asked.update(() if _ASK_FOR_HANDLERS.isdisjoint(said) else _OF_HANDLERS)
        if not _ASK_FOR_LEVELS.isdisjoint(said):
            manager = source.child(source.obj.manager, f"manager of {name}", _Kind.ATTRIBUTE, "manager")
            yield manager.attributes().item("_disable", f"level disabled in the manager of {name}")
    for key in list(members.obj):
        is_put_there = key in said or key not in _OWN
        if key in asked or (is_put_there and key not in _KEPT_FOR_ITSELF and reads(source, key)):
            yield members.item(key, f"{name}.{key}")


def loggers_by_name(source: Source, said: Set[str]) -> Iterator[Source]:
    """The loggers that the function at ``source`` may look up: the one above all, and those that are called as one of
    the names ``said``, or as its module."""
    strings = strings_in(source.obj.__code__)
    if not ("getLogger" in strings or {"logging", "root"} <= strings):
        return
    table = logging.root.manager.loggerDict
    names = {*said, source.obj.__globals__.get("__name__")} & table.keys()
    found = [table[name] for name in sorted(names)]
    for logger in (logging.root, *(one for one in found if isinstance(one, logging.Logger))):
        yield source.child(logger, f"logger {logger.name}", _Kind.KNOWN)
