"""Memos of libraries: module-level dictionaries that an installed package fills while it is called, flags of its
classes by which it does something once, and objects that it puts there.

What such a library finds in one it has put there itself, for calls like this one or for others, and it puts it there
again where something else stands. So a replay need not find in it what was there at the capture. The tensors that a
capture uses are compared wherever they stand.

A flag (``Settings.has_warned``) is False until code of the library's, which ran in the warm-ups as well, sets it to
True; nothing of that code sets it to anything else. What is done when it is set was not part of the capture. An object
there (``Settings.needed = Version("2.4")``) is such code's as well where all that it puts there is made of constants.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Collection, Iterable, Iterator

from te_graph.common.dispatch import is_project_file
from te_graph.graphs.guards.plain_values import is_value
from te_graph.graphs.guards.sources import Source

_LOADS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_WITHOUT_EFFECT = ("CACHE", "PUSH_NULL", "PRECALL")


def outside_of_memos(sources: list[Source], ran: Collection[int]) -> list[Source]:
    """Those of ``sources`` that no memo of the code that ``ran``, by identity, alone leads to."""
    memos = set(_memos(sources, ran))
    if not memos:
        return sources
    inside = {id(source) for source in sources if any(id(above.obj) in memos for above in _above(source))}
    shared = {id(one.again) for one in sources if one.again is not None and id(one) not in inside} & inside
    return [
        source
        for source in sources
        if id(source) not in inside or id(source) in shared or any(id(above) in shared for above in _above(source))
    ]


def _above(source: Source) -> Iterator[Source]:
    """What leads to ``source``, near things first."""
    while (source := source.parent) is not None:
        yield source


def _memos(sources: Iterable[Source], ran: Collection[int]) -> Iterable[int]:
    for source in sources:
        code = getattr(source.obj, "__code__", None) if isinstance(source.obj, types.FunctionType) else None
        if id(code) in ran and not is_project_file(code.co_filename):
            held = (source.obj.__globals__.get(name) for name in filled_globals(code))
            yield from (id(found) for found in held if isinstance(found, dict))


@functools.lru_cache(maxsize=4096)
def filled_globals(code: types.CodeType) -> frozenset[str]:
    """Names of the global variables into which ``code``, or a function written inside it, puts items, as in
    ``CACHE[key] = value``."""
    steps = list(dis.get_instructions(code))
    found = {
        holder.argval
        for number, step in enumerate(steps)
        if step.opname == "STORE_SUBSCR"
        and (holder := _holder(steps[:number])) is not None
        and holder.opname in _LOADS_GLOBAL
    }
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(found.union(*map(filled_globals, inner)))


def own_attributes(sources: Iterable[Source], ran: Collection[int]) -> frozenset[tuple[int, str]]:
    """Those flags that are False still, and those objects, as (identity of the class, name)."""
    return frozenset(
        (id(kind), name)
        for source in sources
        if isinstance(source.obj, types.FunctionType)
        and id(source.obj.__code__) in ran
        and not is_project_file(source.obj.__code__.co_filename)
        for (holder, name), is_flag in constants_set(source.obj.__code__).items()
        if isinstance(kind := source.obj.__globals__.get(holder), type)
        and (vars(kind).get(name) is False if is_flag else name in vars(kind) and not is_value(vars(kind)[name]))
    )


@functools.lru_cache(maxsize=4096)
def constants_set(code: types.CodeType) -> dict[tuple[str, str], bool]:
    """Attributes of global variables, as (variable, name), that ``code`` sets to True alone (True), or to the results
    of calls with constants alone (False)."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in _WITHOUT_EFFECT]
    found: dict[tuple[str, str], set[bool | None]] = {}
    for number, (holder, store) in enumerate(itertools.pairwise(steps)):
        if store.opname == "STORE_ATTR" and holder.opname in _LOADS_GLOBAL:
            found.setdefault((holder.argval, store.argval), set()).add(_is_flag(steps[:number]))
    return {key: kinds.pop() for key, kinds in found.items() if len(kinds) == 1 and None not in kinds}


def _is_flag(steps: list[dis.Instruction]) -> bool | None:
    """True where ``steps`` end with True on the stack, False for what a call made of constants; else None."""
    last = steps[-1] if steps else None
    if last is not None and last.opname == "LOAD_CONST" and last.argval is True:
        return True
    if last is None or last.opname != "CALL" or len(steps) < last.argval + 2:
        return None
    function, *given = steps[-2 - last.argval : -1]
    is_made = function.opname in _LOADS_GLOBAL and all(one.opname == "LOAD_CONST" for one in given)
    return False if is_made else None


def _holder(steps: list[dis.Instruction]) -> dis.Instruction | None:
    """What loads the container, before the steps that load the key, which come last."""
    missing = 1
    for step in reversed(steps):
        if missing == 0:
            return step
        missing -= dis.stack_effect(step.opcode, step.arg, jump=False)
    return None
