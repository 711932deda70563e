"""Which names one piece of code says, and which of them it may look for while they are not there."""

from __future__ import annotations

import dis
import functools
import itertools
import re
import types
from collections.abc import Iterator

# Code that says one of these may look at attributes without naming them; ``dir`` and ``__dir__`` tell names alone.
LOOKS_AT_ALL = frozenset(
    (
        *("__dict__", "vars", "eval", "exec", "attrgetter"),
        *("dump", "dumps", "__getstate__", "__reduce__", "__reduce_ex__"),  # of pickle, and of all objects for it
    )
)
UNNAMED = LOOKS_AT_ALL | {"dir", "__dir__"}
BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_ASKING = BY_NAME | {"getattr_static"}
_SWALLOWS = frozenset({"AttributeError", "Exception", "BaseException", "suppress"})
_MADE_BY = frozenset({"__init__", "__post_init__"})
TELLS_APART = "(is)"  # stands for a comparison of two objects by identity
PUTS_ITEM = "[]="  # and for an item that is put into something
_USES_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"})
PATTERN = "__match_args__"  # attributes that a pattern of a class goes by
_FIELD = re.compile(r"\{([^{}]*)")
_ATTRIBUTE = re.compile(r"\.([^\W\d]\w*)")


@functools.lru_cache(maxsize=4096)
def strings_in(code: types.CodeType) -> frozenset[str]:
    """Names and strings in ``code``, and in the functions written inside it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    found = set(_constants_in(code).union(code.co_names, *map(strings_in, inner)))
    before = None
    for step in dis.get_instructions(code):
        if step.opname == "MATCH_CLASS":
            found.add(PATTERN)
        elif step.opname == "IS_OP" and before not in dis.hasconst:
            found.add(TELLS_APART)
        elif step.opname == "STORE_SUBSCR":
            found.add(PUTS_ITEM)
        before = step.opcode
    return frozenset(found)


def _constants_in(code: types.CodeType) -> frozenset[str]:
    found: set[str] = set()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _constants_in(constant)
        else:
            parts = constant if isinstance(constant, tuple | frozenset) else (constant,)
            for part in parts:
                if isinstance(part, str):
                    found.add(part)
                    found.update(attributes_in_format(part))
    return frozenset(found)


def attributes_in_format(text: str) -> Iterator[str]:
    """What ``text.format`` reads: of ``"{0.kind}"`` the name ``kind``."""
    for field in _FIELD.findall(text):
        yield from _ATTRIBUTE.findall(field)


@functools.lru_cache(maxsize=4096)
def said_in(code: types.CodeType) -> frozenset[str]:
    """All of the object that it makes it may look at: others see nothing of it but what they name."""
    said = strings_in(code) - _only_of_self(code) if is_making(code) else strings_in(code)
    return said - {"__dict__"} if "__dict__" in said and _only_sets_items(code) else said


def _only_sets_items(code: types.CodeType) -> bool:
    """Whether it says ``__dict__`` only to set what it names there, as in ``self.__dict__[name] = value``."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    if "__dict__" in _constants_in(code).union(*map(strings_in, inner)):
        return False
    steps = _steps_of(code)
    following = [steps[number + 1 : number + 3] for number, step in enumerate(steps) if step.argval == "__dict__"]
    return all(len(pair) == 2 and _loads_plainly(pair[0]) and pair[1].opname == "STORE_SUBSCR" for pair in following)


def _loads_plainly(step: dis.Instruction) -> bool:
    return step.opname.startswith(("LOAD_FAST", "LOAD_CONST", "LOAD_DEREF"))


def _steps_of(code: types.CodeType) -> list[dis.Instruction]:
    return [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "PUSH_NULL", "PRECALL")]


def is_making(code: types.CodeType) -> bool:
    """True for the methods that make an object, their first argument."""
    return code.co_name in _MADE_BY and code.co_argcount > 0


def _only_of_self(code: types.CodeType) -> frozenset[str]:
    """Of the names by which code looks at all attributes: those that it says of its first argument alone, as in
    ``vars(self)`` and ``self.__dict__``."""
    steps = _steps_of(code)
    owner = code.co_varnames[0]
    if any(step.opname.startswith("STORE_") and step.argval == owner for step in steps):
        return frozenset()
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    elsewhere = _constants_in(code).union(*map(strings_in, inner))
    is_of_self = {name: True for name in LOOKS_AT_ALL.intersection(code.co_names) - elsewhere}
    for number, step in enumerate(steps):
        if step.argval in is_of_self:
            given = steps[number - 1] if step.argval == "__dict__" else steps[number + 1]
            is_of_self[step.argval] &= given.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and given.argval == owner
    return frozenset(name for name, is_so in is_of_self.items() if is_so)


@functools.lru_cache(maxsize=4096)
def asked_in(code: types.CodeType) -> frozenset[str]:
    strings = strings_in(code)
    named = {string for string in strings if not string.startswith("__")} if _may_do_without(code) else set()
    asks = not strings.isdisjoint(_ASKING) or looks_up(code)
    found = named.union(_constants_in(code) if asks else _asked_by_in(code))
    return frozenset(filter(may_be_name, found))


def may_be_name(string: str) -> bool:
    """Whether ``string`` may be the name of an attribute, such as "layer.0", not words for people."""
    return bool(string) and not any(map(str.isspace, string))


def _asked_by_in(code: types.CodeType) -> Iterator[str]:
    """Strings that it asks for by ``in``, perhaps of a namespace."""
    steps = _steps_of(code)
    for number, step in enumerate(steps):
        if step.opname == "CONTAINS_OP":
            found = next(
                (one for one in reversed(steps[max(number - 4, 0) : number]) if one.opcode in dis.hasconst), None
            )
            if found is not None and isinstance(found.argval, str):
                yield found.argval


def looks_up(code: types.CodeType) -> bool:
    """Whether it may look for attributes in dictionaries or lists of them."""
    return not said_in(code).isdisjoint(UNNAMED)


def _may_do_without(code: types.CodeType) -> bool:
    """Whether it may go on after an attribute was not there."""
    return not strings_in(code).isdisjoint(_SWALLOWS | {PATTERN}) or _catches_everything(code)


def _catches_everything(code: types.CodeType) -> bool:
    """Whether it has an ``except`` without a class."""
    steps = [step.opname for step in dis.get_instructions(code)]
    return any(pair == ("PUSH_EXC_INFO", "POP_TOP") for pair in itertools.pairwise(steps))


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> frozenset[str]:
    """Names that a function and the functions written inside it look up as globals, or set."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in _USES_GLOBAL}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(names.union(*(globals_of(constant) for constant in inner)))


@functools.lru_cache(maxsize=4096)
def imports_of(code: types.CodeType) -> frozenset[tuple[str, int]]:
    """Modules that a function, or one written inside it, imports when it runs: (name, level)."""
    found, constants = set(), [None]
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            found.add((step.argval, next((c for c in reversed(constants) if isinstance(c, int)), 0)))
        elif step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants.append(step.argval)
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(found.union(*(imports_of(constant) for constant in inner)))
