"""Which attribute names the code of a function can say: what it never names it can hardly read."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from te_graph.dispatch import is_user_file

_UNNAMED = frozenset({"__dict__", "vars", "eval", "exec", "attrgetter", "fields", "asdict", "astuple"})
_NOT_RUN = frozenset({"__init__", "__new__", "__del__", "__repr__", "__str__", "__init_subclass__"})


@dataclass(frozen=True)
class Names:
    """Names and strings in the code that a function may run.

    Attributes:
        said: all of them.
        is_enough: no code looks at attributes without naming them. ``getattr`` with a name that is put together at run
            time is not seen.
    """

    said: frozenset[str] = frozenset()

    @property
    def is_enough(self) -> bool:
        return not self.said & _UNNAMED

    def may_read(self, obj: Any, attribute: str) -> bool:
        """Whether the code may read ``attribute`` of ``obj``."""
        if not self.is_enough or attribute in self.said or not is_user_type(type(obj)):
            return True
        return isinstance(obj, nn.Module) and attribute in _own_attributes_of_modules()

    def with_code(self, functions: Iterable[types.FunctionType], types_met: Iterable[type]) -> Names:
        """These, and those in the code of ``functions`` and of the methods of ``types_met`` that they name."""
        names = set(self.said)
        done: set[types.CodeType] = set()
        codes = [function.__code__ for function in functions]
        methods = [pair for kind in dict.fromkeys(types_met) for pair in _methods(kind)]
        while codes:
            for code in codes:
                names.update(_strings_in(code))
            done.update(codes)
            codes = [code for name, code in methods if code not in done and (name in names or _is_implicit(name))]
        return Names(frozenset(names))


def is_user_type(kind: type) -> bool:
    """True when all methods of ``kind`` are known to ``Names``: no base is of torch or the standard library."""
    bases = [base for base in kind.__mro__ if base not in (object, nn.Module)]
    return all(_is_user_written(base) for base in bases)


@functools.cache
def _own_attributes_of_modules() -> frozenset[str]:
    return frozenset(vars(nn.Module()))


def class_values(obj: Any) -> dict[str, Any]:
    """What the classes of ``obj`` that the user wrote hold for all instances, apart from functions and the like."""
    values: dict[str, Any] = {}
    for base in reversed(type(obj).__mro__):
        if base not in (object, nn.Module) and _is_user_written(base):
            values.update(vars(base))
    return {
        key: value
        for key, value in values.items()
        if not (key.startswith("__") or callable(value) or hasattr(value, "__get__"))
    }


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
