"""What Python code does with a dictionary that it holds in a variable, such as what ``**kwargs`` collects."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from dataclasses import dataclass
from typing import Any

_READS = frozenset({"get", "pop"})
_SEES_VARIABLES = frozenset({"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe", "stack"})
_SKIPPED = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL", "PRECALL"})
_LOADS = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK"})
_DEFAULTS = _LOADS | {"LOAD_CONST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_SMALL_INT"}


@dataclass(frozen=True)
class KeywordUses:
    """All that code does with a variable that holds a dictionary.

    Attributes:
        keys: constants by which it reads or asks.
        is_passed_on: it is given to a call as ``**``.
    """

    keys: frozenset[Any] = frozenset()
    is_passed_on: bool = False


def collecting_variable(code: types.CodeType) -> str | None:
    """The variable of ``code`` in which ``**`` collects keyword arguments."""
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return None
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    return code.co_varnames[count]


@functools.lru_cache(maxsize=1024)
def uses_of(code: types.CodeType, variable: str) -> KeywordUses | None:
    """What ``code`` does with ``variable``; None where that is more than to read under constants and to pass it on by
    ``**``: whatever else it does may depend on all that is in there, or on the order."""
    if variable in code.co_cellvars or not _SEES_VARIABLES.isdisjoint(code.co_names):
        return None
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED]
    keys, is_passed_on = set(), False
    for number, step in enumerate(steps):
        if not _names(step, variable):
            continue
        before, following = steps[number - 1] if number else step, steps[number + 1 :]
        if step.opname not in _LOADS:
            return None
        if following[0].opname == "DICT_MERGE":
            is_passed_on = True
        elif following[0].opname == "CONTAINS_OP" and _is_key(before) and not step.is_jump_target:
            keys.add(before.argval)
        elif _is_key(following[0]) and _is_subscript(following[1]):
            keys.add(following[0].argval)
        elif following[0].argval in _READS and _is_key(following[1]) and _is_call_with_key(following[2:]):
            keys.add(following[1].argval)
        else:
            return None
    return KeywordUses(frozenset(keys), is_passed_on)


def _names(step: dis.Instruction, variable: str) -> bool:
    named = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return "FAST" in step.opname and variable in named


def _is_key(step: dis.Instruction) -> bool:
    return step.opname == "LOAD_CONST" and isinstance(step.argval, str) and not step.is_jump_target


def _is_subscript(step: dis.Instruction) -> bool:
    is_one = step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")
    return is_one and not step.is_jump_target


def _is_call_with_key(steps: list[dis.Instruction]) -> bool:
    """Whether a call follows to which nothing is given but the key that was loaded, and perhaps a default: a variable,
    a constant or an attribute."""
    count = 1
    for step in steps:
        if step.is_jump_target:
            return False
        if step.opname in ("CALL", "CALL_METHOD"):
            return step.arg == count
        if count == 1 and step.opname in _DEFAULTS:
            count = 2
        elif not (count == 2 and step.opname == "LOAD_ATTR" and not step.argrepr.startswith("NULL")):
            return False
    return False
