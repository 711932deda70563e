"""Arguments and results that are no tensors: what can be compared with what it was at capture, and how."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import sys
import types
import uuid
from typing import Any

import torch
from torch import Tensor

from te_graph.common.raw_contents import count_of, members_of
from te_graph.graphs.arguments.attributes import attributes_of, may_have_attributes
from te_graph.graphs.arguments.value_keys import values_are_equal

_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    type(Ellipsis),
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
# Values beyond those that other parts of the package guard.
_VALUES = (
    *(range, uuid.UUID, pathlib.PurePath, decimal.Decimal, fractions.Fraction),
    *(datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo),
)
_BY_IDENTITY = (
    *(type, types.MethodDescriptorType, types.WrapperDescriptorType),
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket),
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
MAX_DEPTH = 4  # of functions that functions refer to
MAX_NESTED = 64  # containers in each other: what is deeper inside, or holds itself, is not looked into


def is_constant(value: Any) -> bool:
    """True for immutable values that can be compared: they are part of a signature."""
    return isinstance(value, _CONSTANTS)


def is_comparable(value: Any, depth: int = 0) -> bool:
    """True for what may stand in arguments and results beside tensors: immutable values, classes, and functions that
    refer to nothing but such things."""
    if is_constant(value) or isinstance(value, (*_VALUES, *_BY_IDENTITY)) or _is_of_numpy(value, "generic", "dtype"):
        return not isinstance(value, slice) or all(map(is_constant, _ends(value)))
    if isinstance(value, torch.Size | frozenset):
        return all(is_comparable(item, depth) for item in members_of(value))
    if isinstance(value, types.BuiltinFunctionType):  # a function, no method of an object that may change
        return value.__self__ is None or isinstance(value.__self__, type | types.ModuleType)
    if isinstance(value, types.FunctionType):
        return depth < MAX_DEPTH and all(_is_comparable_nest(item, depth + 1) for item in referred(value))
    return False


def may_hold_more(value: Any) -> bool:
    """Whether code can read of a comparable ``value`` what is not compared with it: of functions and classes, members
    of enumerations and values of derived classes their attributes; of frozen sets those of their members."""
    if isinstance(value, type | frozenset | types.FunctionType):
        return True
    return not isinstance(value, (Tensor, *_FUNCTIONS)) and may_have_attributes(value)


def are_same(expected: Any, got: Any, depth: int = 0) -> bool:
    """True when two comparable values are of one type and nothing can tell them from each other, but that functions
    made twice by one line of code count as one."""
    if expected is got:
        return True
    if depth > 2 * MAX_DEPTH or type(expected) is not type(got) or not _are_same_values(expected, got, depth):
        return False
    has_none = isinstance(expected, (types.BuiltinFunctionType, *_BY_IDENTITY)) or not may_have_attributes(expected)
    return has_none or _have_same_attributes(expected, got, depth + 1)


def _have_same_attributes(expected: Any, got: Any, depth: int) -> bool:
    """Of functions, and of values of a class that gives them attributes besides."""
    one, other = attributes_of(expected), attributes_of(got)
    return one.keys() == other.keys() and all(
        value is other[name] or (is_comparable(value) and are_same(value, other[name], depth))
        for name, value in one.items()
    )


def difference(expected: Any, got: Any) -> tuple[str, Any, Any]:
    """Where two comparable values that are not the same differ: the attribute and what stands there, NotImplemented for
    nothing; no name where it is none of theirs."""
    if type(expected) is type(got) and may_have_attributes(expected) and _are_same_values(expected, got, 0):
        one, other = attributes_of(expected), attributes_of(got)
        for name in (*one, *(name for name in other if name not in one)):
            pair = one.get(name, NotImplemented), other.get(name, NotImplemented)
            if not (pair[0] is pair[1] or (is_comparable(pair[0]) and are_same(*pair))):
                return name, *pair
    return "", expected, got


def _are_same_values(expected: Any, got: Any, depth: int) -> bool:
    """Of one type. By what guards compare, where they do: ``==`` says less (``range(0, 3, 2) == range(0, 4, 2)``)."""
    if isinstance(expected, types.FunctionType):
        return _are_of_one_line(expected, got) and _are_same_nests(referred(expected), referred(got), depth + 1)
    if isinstance(expected, (enum.Enum, types.BuiltinFunctionType, *_BY_IDENTITY)):
        return False
    if isinstance(expected, slice):
        return all(map(are_same, _ends(expected), _ends(got)))
    if isinstance(expected, torch.Size | frozenset):  # in their order, by which code may go
        return count_of(expected) == count_of(got) and all(map(are_same, members_of(expected), members_of(got)))
    if _is_of_numpy(expected, "generic"):
        return expected.dtype == got.dtype and expected.tobytes() == got.tobytes()
    return values_are_equal(expected, got)


def _are_of_one_line(expected: types.FunctionType, got: types.FunctionType) -> bool:
    """Whether two functions have the same code with the same global variables, and are called the same."""
    names = (expected.__name__, expected.__qualname__) == (got.__name__, got.__qualname__)
    return names and expected.__code__ is got.__code__ and expected.__globals__ is got.__globals__


def frozen(value: Any) -> Any:
    """``value``, comparable, as it is now: variables of a function may be given other values later."""
    if isinstance(value, types.FunctionType) and value.__closure__:
        cells = tuple(types.CellType(frozen(item)) for item in referred(value)[: len(value.__closure__)])
        copy = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        copy.__kwdefaults__ = value.__kwdefaults__
        functools.update_wrapper(copy, value, updated=())
        copy.__dict__ = dict(vars(value))  # without itself as what is wrapped
        return copy
    return value


def reason_against(value: Any) -> str:
    """What to write instead of giving ``value``, which is not comparable, or having it as result."""
    if _is_of_numpy(value, "ndarray"):
        return "give a tensor (torch.from_numpy)"
    if isinstance(value, torch.Generator):
        return "only the default generator goes on from replay to replay"
    if isinstance(value, torch.nn.Module):
        return "let the callable hold the module, as an attribute or variable"
    if isinstance(value, list | tuple | dict):
        return f"it holds itself, or is nested deeper than {MAX_NESTED} containers: flatten it"
    if callable(value):
        return "let the callable hold it: a function given as argument may refer to constants only"
    if any("Cache" in kind.__name__ for kind in type(value).__mro__):
        return (
            "training needs no KV cache: pass use_cache=False (Hugging Face: model.config.use_cache = False, "
            '"use_cache": False in the batch, or TrainingArguments(use_cache=False))'
        )
    return (
        "custom types are supported if they are dataclasses, subclasses of dict, list or tuple, or registered with "
        "torch.utils._pytree.register_pytree_node"
    )


def _is_of_numpy(value: Any, *kinds: str) -> bool:
    """True for an instance of one of numpy's classes ``kinds``; numpy need not be installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, tuple(getattr(numpy, kind) for kind in kinds))


def _ends(one: slice) -> tuple[Any, Any, Any]:
    return one.start, one.stop, one.step


def referred(function: Any) -> tuple[Any, ...]:
    """What a function refers to besides globals: its variables from outside, and its defaults; of others nothing."""
    if not isinstance(function, types.FunctionType):
        return ()
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            cells.append(None)
    return (*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).items())


def _is_comparable_nest(value: Any, depth: int) -> bool:
    if type(value) is tuple:
        return all(_is_comparable_nest(item, depth) for item in value)
    return not isinstance(value, Tensor) and is_comparable(value, depth)


def _are_same_nests(expected: Any, got: Any, depth: int) -> bool:
    if type(expected) is type(got) is tuple:
        pairs = zip(expected, got, strict=False)
        return len(expected) == len(got) and all(_are_same_nests(one, other, depth) for one, other in pairs)
    return are_same(expected, got, depth)
