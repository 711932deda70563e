"""Which attribute names the code of a function can say: what it never names it can hardly read."""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from te_graph.dispatch import is_user_file

_UNNAMED = frozenset({"__dict__", "vars", "eval", "exec", "attrgetter", "fields", "asdict", "astuple"})
_BY_NAME = frozenset({"getattr", "hasattr", "setattr", "delattr"})
_NOT_RUN = frozenset({"__init__", "__new__", "__del__", "__repr__", "__str__", "__init_subclass__"})


@dataclass(frozen=True)
class Names:
    """Names and strings in the code that a function may run.

    Attributes:
        said: all of them.
        optional: those that code may look for without relying on them (``getattr`` with a default).
        is_enough: no code looks at attributes without naming them. ``getattr`` with a name that is put together at run
            time is not seen.
    """

    said: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()

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
        kinds = dict.fromkeys(types_met)
        names, optional = set(self.said), set(self.optional)
        if any(issubclass(kind, nn.Module) for kind in kinds):
            names.add("forward")  # which torch calls
        done: set[types.CodeType] = set()
        methods = [pair for kind in kinds for pair in _methods(kind)]
        codes = [function.__code__ for function in functions]
        codes += [code for name, code in methods if name in names or is_implicit(name)]
        while codes:
            for code in codes:
                names.update(_strings_in(code))
                optional.update(_optional_in(code))
            done.update(codes)
            codes = [code for name, code in methods if code not in done and (name in names or is_implicit(name))]
        return Names(frozenset(names), frozenset(optional))

    def with_strings(self, strings: Iterable[str]) -> Names:
        """These, and ``strings``, which code may pass to ``getattr``, if any code does."""
        if self.said.isdisjoint(_BY_NAME):
            return self
        found = {string for string in strings if string.isidentifier()}
        return Names(self.said | found, self.optional | found)

    def may_run(self, name: str) -> bool:
        """Whether the code may call the member ``name`` of an object's class."""
        return name in self.said or is_implicit(name)


def is_user_type(kind: type) -> bool:
    """True when all methods of ``kind`` are known to ``Names``: no base is of torch or the standard library."""
    bases = [base for base in kind.__mro__ if base not in (object, nn.Module)]
    return all(_is_user_written(base) for base in bases)


@functools.cache
def _own_attributes_of_modules() -> frozenset[str]:
    return frozenset(vars(nn.Module()))


def user_classes(kind: type) -> list[type]:
    """Of ``kind`` and its bases, those that the user wrote and that may change: no enumerations."""
    if isinstance(kind, enum.EnumMeta):
        return []
    return [base for base in kind.__mro__ if base not in (object, nn.Module) and _is_user_written(base)]


def _is_user_written(kind: type) -> bool:
    functions = [member for member in vars(kind).values() if isinstance(member, types.FunctionType)]
    if not functions:
        return type(kind).__module__ != "pybind11_builtins" and _is_users_module(kind.__module__)
    return all(is_user_file(function.__code__.co_filename) for function in functions)


def _is_users_module(name: str) -> bool:
    if name.partition(".")[0] in ("torch", "te_graph", "builtins"):
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    return is_user_file(file) if file else name == "__main__" or name not in sys.modules


def is_implicit(name: str) -> bool:
    """True for methods that Python calls by itself, and not only when an object is made or shown."""
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


@functools.lru_cache(maxsize=4096)
def _strings_in(code: types.CodeType) -> frozenset[str]:
    strings = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            strings.add(constant)
        elif isinstance(constant, types.CodeType):
            strings |= _strings_in(constant)
        elif isinstance(constant, tuple | frozenset):
            strings.update(part for part in constant if isinstance(part, str))
    return frozenset(strings)


@functools.lru_cache(maxsize=4096)
def _optional_in(code: types.CodeType) -> frozenset[str]:
    strings = _strings_in(code)
    if strings.isdisjoint({*_BY_NAME, "AttributeError"}):
        return frozenset()
    return frozenset(string for string in strings if string.isidentifier() and not is_implicit(string))


@functools.lru_cache(maxsize=4096)
def globals_of(code: types.CodeType) -> frozenset[str]:
    """Names that a function and the functions written inside it look up as globals."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
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
