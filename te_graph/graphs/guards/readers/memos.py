"""Memos of libraries: module-level dictionaries that an installed package fills while it is called, and flags of its
classes by which it does something once.

What such a library finds in one it has put there itself, for calls like this one or for others, and it puts it there
again where something else stands. So a replay need not find in it what was there at the capture. The tensors that a
capture uses are compared wherever they stand.

A flag (``Settings.has_warned``) is False until code of the library's, which ran in the warm-ups as well, sets it to
True; nothing of that code sets it to anything else. What is done when it is set was not part of the capture.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Collection, Iterable, Iterator

from te_graph.common.dispatch import is_project_file
from te_graph.graphs.guards.sources import Source


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
        and holder.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(found.union(*map(filled_globals, inner)))


def latches(sources: Iterable[Source], ran: Collection[int]) -> frozenset[tuple[int, str]]:
    """The flags that are False still, as (identity of the class, name)."""
    return frozenset(
        (id(kind), name)
        for source in sources
        if isinstance(source.obj, types.FunctionType)
        and id(source.obj.__code__) in ran
        and not is_project_file(source.obj.__code__.co_filename)
        for holder, name in latched_attributes(source.obj.__code__)
        if isinstance(kind := source.obj.__globals__.get(holder), type) and vars(kind).get(name) is False
    )


@functools.lru_cache(maxsize=4096)
def latched_attributes(code: types.CodeType) -> frozenset[tuple[str, str]]:
    """Attributes of global variables that ``code`` sets to True, and to nothing else, as (variable, name)."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "CACHE"]
    found: dict[tuple[str, str], bool] = {}
    for value, holder, store in zip(steps, steps[1:], steps[2:], strict=False):
        if store.opname == "STORE_ATTR" and holder.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            key = (holder.argval, store.argval)
            found[key] = found.get(key, True) and value.opname == "LOAD_CONST" and value.argval is True
    return frozenset(key for key, is_latch in found.items() if is_latch)


def _holder(steps: list[dis.Instruction]) -> dis.Instruction | None:
    """What loads the container, before the steps that load the key, which come last."""
    missing = 1
    for step in reversed(steps):
        if missing == 0:
            return step
        missing -= dis.stack_effect(step.opcode, step.arg, jump=False)
    return None
