"""Which attribute names the code of a function can say: what it never names it can hardly read."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from te_graph.dispatch import is_user_file

_UNNAMED = frozenset({"__dict__", "vars", "eval", "exec", "attrgetter", "fields", "asdict", "astuple"})
_NOT_RUN = frozenset({"__init__", "__new__", "__del__", "__repr__", "__str__", "__init_subclass__"})


def names_said(functions: Iterable[types.FunctionType], types_met: Iterable[type]) -> frozenset[str] | None:
    """All names and strings in the code of ``functions`` and of the methods that they name of ``types_met``.

    Returns None when that tells nothing, because the code looks at attributes without naming them. ``getattr`` with a
    name that is put together at run time is not seen.
    """
    names: set[str] = set()
    done: set[types.CodeType] = set()
    codes = [function.__code__ for function in functions]
    methods = [pair for kind in dict.fromkeys(types_met) for pair in _methods(kind)]
    while codes:
        for code in codes:
            names.update(_strings_in(code))
        done.update(codes)
        codes = [code for name, code in methods if code not in done and (name in names or _is_implicit(name))]
    return None if names & _UNNAMED else frozenset(names)


def is_user_type(kind: type) -> bool:
    """True when all methods of ``kind`` are known to ``names_said``: no base is of torch or the standard library."""
    bases = [base for base in kind.__mro__ if base not in (object, nn.Module)]
    return all(_is_user_written(base) for base in bases)


@functools.cache
def _own_attributes_of_modules() -> frozenset[str]:
    return frozenset(vars(nn.Module()))


def may_read(obj: Any, attribute: str, names: frozenset[str] | None) -> bool:
    """Whether code that says ``names`` may read ``attribute`` of ``obj``."""
    if names is None or attribute in names or not is_user_type(type(obj)):
        return True
    return isinstance(obj, nn.Module) and attribute in _own_attributes_of_modules()


def _is_user_written(kind: type) -> bool:
    functions = [member for member in vars(kind).values() if isinstance(member, types.FunctionType)]
    return bool(functions) and all(is_user_file(function.__code__.co_filename) for function in functions)


def _is_implicit(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in _NOT_RUN


def _methods(kind: type) -> Iterator[tuple[str, types.CodeType]]:
    """The functions of a class, as (name, code)."""
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, property):
                parts = [member.fget, member.fset]
            elif isinstance(member, functools.cached_property):
                parts = [member.func]
            else:  # functions, class and static methods, and what wraps them
                parts = [inspect.unwrap(getattr(member, "__func__", member))]
            yield from ((name, part.__code__) for part in parts if isinstance(part, types.FunctionType))


def _strings_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _strings_in(constant)
        elif isinstance(constant, tuple | frozenset):
            yield from (part for part in constant if isinstance(part, str))
