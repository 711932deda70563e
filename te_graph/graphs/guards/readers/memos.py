"""Memos of libraries: module-level dictionaries that an installed package fills while it is called.

What such a library finds in one it has put there itself, for calls like this one or for others, and it puts it there
again where something else stands. So a replay need not find in it what was there at the capture. The tensors that a
capture uses are compared wherever they stand.

What classes of theirs hold is compared, but for what a library, known by name, sets and reads for its messages alone.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Collection, Iterable, Iterator

from te_graph.common.dispatch import is_project_file
from te_graph.graphs.guards.sources import Source

_LOADS_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention.utils"
_FOR_MESSAGES = {
    f"{_ATTENTION}.AttentionLogging": ("_is_logging_setup", "_log_level"),
    f"{_ATTENTION}.FlashAttentionUtils": (
        "version_required",
        "warning_printed",
        "v3_warning_printed",
        "v4_warning_printed",
    ),
}


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


def is_for_messages(kind: type, name: str) -> bool:
    """True for an attribute of a class that its library sets in calls like this one and others, for messages."""
    return name in _FOR_MESSAGES.get(f"{kind.__module__}.{kind.__qualname__}", ())


def _holder(steps: list[dis.Instruction]) -> dis.Instruction | None:
    """What loads the container, before the steps that load the key, which come last."""
    missing = 1
    for step in reversed(steps):
        if missing == 0:
            return step
        missing -= dis.stack_effect(step.opcode, step.arg, jump=False)
    return None
