"""By which keys code reads what dictionaries hold."""

from __future__ import annotations

import dis
import functools
import types

_SKIPPED = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL", "PRECALL"})
_BY_KEY = frozenset({"get", "pop", "setdefault", "__getitem__"})
# Of a dictionary these read all, or what their caller cannot be seen to say.
_AS_A_WHOLE = frozenset(
    (
        *("items", "values", "popitem", "update", "copy", "deepcopy", "itemgetter", "getitem"),
        *("vars", "dumps", "asdict", "methodcaller"),
        *("dict", "OrderedDict", "ChainMap", "SimpleNamespace", "Namespace", "str", "repr", "format"),
    )
)
_PASSES_ON = frozenset({"DICT_MERGE", "DICT_UPDATE", "CALL_FUNCTION_EX"})


@functools.lru_cache(maxsize=4096)
def reads_unsaid_keys(code: types.CodeType) -> bool:
    """Whether ``code`` may read what dictionaries hold under other keys than the constants in it."""
    if not _AS_A_WHOLE.isdisjoint(code.co_names):
        return True
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED]
    for number, step in enumerate(steps):
        if step.opname in _PASSES_ON or (_is_item(step) and not (number and _is_constant(steps[number - 1], step))):
            return True
        if step.argval in _BY_KEY and not _is_text(steps[number + 1 : number + 3]):
            return True
    return False


def _is_item(step: dis.Instruction) -> bool:
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _is_text(steps: list[dis.Instruction]) -> bool:
    """Whether the first of two steps loads a string for the other."""
    return len(steps) == 2 and _is_constant(*steps) and isinstance(steps[0].argval, str)


def _is_constant(key: dis.Instruction, user: dis.Instruction) -> bool:
    """Whether ``key`` loads a constant, the only thing that ``user``, the step behind it, can find."""
    return (key.opcode in dis.hasconst or key.opname == "LOAD_SMALL_INT") and not user.is_jump_target
