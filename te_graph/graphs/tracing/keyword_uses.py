"""What Python code does with a dictionary that it holds in a variable, such as what ``**kwargs`` collects."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from dataclasses import dataclass

_READS = frozenset({"get", "pop"})
_SEES_VARIABLES = frozenset({"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe", "stack"})
_SKIPPED = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL", "PRECALL"})
_ITEMS = frozenset({"BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR"})
_SETS_FREE = frozenset({"STORE_DEREF", "DELETE_DEREF"})
_LOADS = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK"})
_DEFAULTS = _LOADS | {"LOAD_CONST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_SMALL_INT"}


@dataclass(frozen=True)
class KeywordUses:
    """All that code does with a variable that holds a dictionary.

    Attributes:
        keys: constants by which it reads, asks or sets.
        variables: of the function around it, whose values are such keys.
        passed_at: offsets of the calls that it is given to as ``**``, behind all else.
        other_lines: where something else is done with it, which may depend on all that is in there, or on the order.
    """

    keys: frozenset[str]
    variables: frozenset[str]
    passed_at: frozenset[int]
    other_lines: frozenset[int]


def collecting_variable(code: types.CodeType) -> str | None:
    """The variable of ``code`` in which ``**`` collects keyword arguments."""
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return None
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    return code.co_varnames[count]


@functools.lru_cache(maxsize=1024)
def uses_of(code: types.CodeType, variable: str) -> KeywordUses | None:
    """What ``code`` does with ``variable``; None where that cannot be told."""
    if variable in code.co_cellvars or not _SEES_VARIABLES.isdisjoint(code.co_names):
        return None
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED]
    free = set(code.co_freevars) - {step.argval for step in steps if step.opname in _SETS_FREE}
    found, passed_at, other_lines = set(), set(), set()
    lines = _lines_of(code)
    for number, step in enumerate(steps):
        if not _names(step, variable):
            continue
        before, following = steps[number - 1] if number else step, steps[number + 1 :]
        if step.opname not in _LOADS:
            other_lines.add(lines[step.offset])
        elif [one.opname for one in following[:2]] == ["DICT_MERGE", "CALL_FUNCTION_EX"]:
            passed_at.add(following[1].offset)
        elif following[0].opname == "CONTAINS_OP" and _is_key(before, free) and not step.is_jump_target:
            found.add(before)
        elif _is_next_key(following[0], free) and _is_item(following[1]):
            found.add(following[0])
        elif following[0].argval in _READS and _is_next_key(following[1], free) and _is_call_with_key(following[2:]):
            found.add(following[1])
        else:
            other_lines.add(lines[step.offset])
    keys = frozenset(step.argval for step in found if step.opname == "LOAD_CONST")
    variables = frozenset(step.argval for step in found if step.opname != "LOAD_CONST")
    return None if None in other_lines else KeywordUses(keys, variables, frozenset(passed_at), frozenset(other_lines))


def _lines_of(code: types.CodeType) -> dict[int, int | None]:
    return {offset: line for start, end, line in code.co_lines() for offset in range(start, end)}


def _names(step: dis.Instruction, variable: str) -> bool:
    named = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return "FAST" in step.opname and variable in named


def _is_key(step: dis.Instruction, free: set[str]) -> bool:
    """Whether a string is loaded, or one of the variables that are ``free``."""
    if step.opname == "LOAD_CONST":
        return isinstance(step.argval, str)
    return step.opname == "LOAD_DEREF" and step.argval in free


def _is_next_key(step: dis.Instruction, free: set[str]) -> bool:
    """Whether that is loaded here, and nothing else in its place from elsewhere."""
    return _is_key(step, free) and not step.is_jump_target


def _is_item(step: dis.Instruction) -> bool:
    """Whether it reads, sets or deletes the item under the key that was loaded."""
    is_one = step.opname in _ITEMS or (step.opname == "BINARY_OP" and step.argrepr == "[]")
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
