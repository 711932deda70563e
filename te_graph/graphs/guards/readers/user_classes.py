"""Which classes and functions the user wrote, as far as captures of callables are concerned."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Container, Iterator
from typing import Any

from torch import Tensor, nn

from te_graph.common.class_origins import module_of
from te_graph.common.dispatch import is_user_file
from te_graph.graphs.guards.readers.guarded_sources import NAMESPACES
from te_graph.graphs.guards.readers.metaclasses import member_of
from te_graph.graphs.tracing.names import LOOKS_ABOVE, Names, codes_of, is_untold, is_users_module

# Of functions.
_HOLDERS = (
    types.FunctionType,
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
    functools._lru_cache_wrapper,
)
_STANDARD = frozenset({*sys.stdlib_module_names, "builtins", "te_graph"})


def is_library_class(kind: type) -> bool:
    """True for classes of Python, torch and this package: the code of a user reads no more of them than it names."""
    if issubclass(kind, nn.Module) or kind in NAMESPACES:
        return False
    return _package_of(kind) in _STANDARD


def _package_of(kind: type) -> str:
    module = module_of(kind)
    return module.partition(".")[0]


def bases_of(kind: type) -> list[type]:
    """``kind`` and the classes below it that the user wrote."""

    def is_theirs(base: type) -> bool:
        if is_library_class(base) or _package_of(base) != "torch" or is_users_module(module_of(base)):
            return not is_library_class(base)
        # A class that is made by text which ran in a module of torch names that module: its functions tell whose it is.
        functions = [member for member in vars(base).values() if isinstance(member, types.FunctionType)]
        return bool(functions) and all(map(written_by_user, functions))

    return [base for base in kind.__mro__ if is_theirs(base)]


def methods_of_user(kind: type) -> dict[str, types.FunctionType]:
    """The methods that instances of ``kind`` have, by name, as far as the user wrote them."""
    found: dict[str, types.FunctionType] = {}
    for base in reversed(kind.__mro__):
        for name, member in vars(base).items():
            if isinstance(member, _HOLDERS) and (function := written_by_user(function_behind(member))) is not None:
                found[name] = function
    return found


def members_that_ran(kind: type, names: Names) -> frozenset[str]:
    """Names of what ``kind``, or a class below it that the user wrote, has and that was seen to run, or may have run
    unseen: no code need name it. Python calls some methods by itself, and libraries put names together."""
    found = (item for base in bases_of(kind) for item in vars(base).items())
    return frozenset(name for name, member in found if names.has_run(member) or is_untold(name, member))


def members_below(kind: type, ran: Container[int], said: frozenset[str]) -> Iterator[tuple[type, str, Any]]:
    """What code gets to by ``super()`` and the like, as (class, name, member): where a class above has the name as well
    of what code says of a class below ``kind``, or of a function there that ran, what each class below has under this
    name; NotImplemented where it has nothing.

    Args:
        ran: identities of the code that was seen to run.
        said: names in code; without ``super`` or the like among them none counts.
    """
    looks_above = not LOOKS_ABOVE.isdisjoint(said)
    below = [base for base in kind.__mro__[1:] if base not in (nn.Module, *Tensor.__mro__)]
    above = set(vars(kind))
    names: dict[str, None] = {}
    for base in below:
        for name, member in vars(base).items():
            codes = list(codes_of(member)) if name in above else []
            if any(id(code) in ran for code in codes) or (looks_above and name in above and name in said and not codes):
                names[name] = None
        above |= vars(base).keys()
    for base in reversed(below):  # so that the one which has it is named first
        for name in names:
            yield base, name, member_of(base, name, NotImplemented)


def function_behind(member: Any) -> Any:
    """The function of a method, class or static method, or property."""
    if isinstance(member, types.FunctionType):
        return member
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    return member.func if isinstance(member, functools.cached_property | functools.partialmethod) else member


def written_by_user(function: Any) -> types.FunctionType | None:
    """The function itself, or what it wraps: decorators of torch and Python wrap what the user wrote."""
    while isinstance(function, types.FunctionType | functools._lru_cache_wrapper):
        if isinstance(function, types.FunctionType) and is_user_file(function.__code__.co_filename):
            return function
        function = getattr(function, "__wrapped__", None)
    return None
