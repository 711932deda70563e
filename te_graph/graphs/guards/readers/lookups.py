"""What a function finds by name when it runs: modules that it imports or asks for, and variables that are not there."""

from __future__ import annotations

import builtins
import importlib.util
import sys
import types
from collections.abc import Collection, Iterator
from typing import Any

from te_graph import _C
from te_graph.common.class_origins import HEAP_TYPE, module_of
from te_graph.common.dispatch import is_project_file
from te_graph.graphs.arguments.attributes import instance_dict
from te_graph.graphs.guards.plain_values import is_bulk, is_value
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.tracing.code_names import globals_of, imports_of, strings_in
from te_graph.graphs.tracing.names import (
    ASKS_FOR_MODULES,
    Names,
    file_of_module,
    is_implicit,
    is_users_module,
    user_classes,
)

_Kind = _C.StepKind
_DESCRIPTIONS = frozenset({"__name__", "__qualname__", "__module__", "__doc__", "__annotations__"})


def is_project_module(module: Any) -> bool:
    """True for modules that are neither of Python nor installed. Some have no file: they are made by hand, or by torch
    for the operators of a library."""
    if not isinstance(module, types.ModuleType):  # something else may stand in ``sys.modules``
        return False
    file = file_of_module(module)
    return is_project_file(file) if file else is_users_module(module.__name__)


def is_of_project(kind: type) -> bool:
    """True for classes of such a module, and for those of which no module can be told."""
    name = module_of(kind)
    return not name or is_project_module(sys.modules.get(name))


def asked_of_module(module: types.ModuleType, names: Names) -> frozenset[str]:
    """Attributes that code may ask ``module``, of the user's, for while they are not there."""
    has_getattr = any("__getattr__" in vars(one) for one in (module, *user_classes(type(module))))
    return names.said if has_getattr else names.asked


def is_readable_module(module: types.ModuleType) -> bool:
    """True for modules whose variables are looked at: all but those of torch, NumPy and Python."""
    name = module.__name__
    return is_project_module(module) or (is_users_module(name) and name.partition(".")[0] != "numpy")


def shows(module: types.ModuleType, found: Any) -> bool:
    """Whether ``found``, which ``module`` has as a variable or in a slot, is looked at: of an installed package its
    other modules, and settings: values, containers of values, objects that hold nothing else. What lies behind the rest
    may be half of the package, or of those that it uses.
    """
    if is_project_module(module):
        return True
    if isinstance(found, types.ModuleType):
        return found.__name__.partition(".")[0] == module.__name__.partition(".")[0]
    if is_value(found) or is_bulk(found):
        return True
    members = None if isinstance(found, type | types.FunctionType) else instance_dict(found)
    return bool(members) and type(members) is dict and all(is_value(one) or is_bulk(one) for one in members.values())


def descriptions(source: Source, said: Collection[str]) -> Iterator[Source]:
    """What the function or class at ``source`` tells about itself, as far as it is among the names ``said``. What a
    class of Python's own tells cannot change."""
    if isinstance(source.obj, type) and not source.obj.__flags__ & HEAP_TYPE:
        return
    hints = {"__annotations__"} if "get_type_hints" in said else frozenset()
    for key in sorted(_DESCRIPTIONS.intersection(said) | hints):
        if hasattr(source.obj, key):
            name = f"{source.obj.__name__}.{key}"
            yield source.child(getattr(source.obj, key), name, _Kind.ATTRIBUTE, key)


def modules_of(source: Source, said: Collection[str]) -> Iterator[Source]:
    """The modules that the function at ``source`` imports, and those that it may ask for by strings: of its own, or
    where they are the user's among the names ``said``."""
    function = source.obj
    code, scope = function.__code__, function.__globals__
    package = scope.get("__package__") or ""
    names = {
        importlib.util.resolve_name("." * level + name, package) if level and package else name
        for name, level in imports_of(code)
    }
    if _asks_for_modules(code):
        names |= strings_in(code)
        others = sys.modules.keys() & {*said, scope.get("__name__")}
        names.update(name for name in others if is_project_module(sys.modules[name]))
    table = _loaded(source)
    yield from (table.item(name, f"module {name}") for name in sorted(names & sys.modules.keys()))


def absent_names(source: Source) -> Iterator[Source]:
    """What is not there and the code of the function at ``source`` may find later: variables of the function around it
    that are not assigned yet, or no longer, and modules."""
    code = source.obj.__code__
    cells = source.child(source.obj.__closure__, source.name, _Kind.ATTRIBUTE, "__closure__")
    for index, variable in enumerate(code.co_freevars):
        cell = cells.child(cells.obj[index], variable, _Kind.POSITION, index=index)
        try:
            cell.obj.cell_contents  # noqa: B018
        except ValueError:
            yield cell.child(cell.obj, f"closure variable {variable}", _Kind.NO_ATTRIBUTE, "cell_contents")
    if _asks_for_modules(code):
        table = _loaded(source)
        for name in sorted(strings_in(code) - sys.modules.keys()):
            yield table.child(table.obj, f"module {name}", _Kind.ABSENT, name)


def absent_globals(source: Source) -> Iterator[Source]:
    """Global variables that the function at ``source`` names and that neither its module nor Python has."""
    function = source.obj
    scope = source.child(function.__globals__, "", _Kind.ATTRIBUTE, "__globals__")
    for variable in sorted(globals_of(function.__code__) - scope.obj.keys() - vars(builtins).keys()):
        yield scope.child(scope.obj, f"global variable {variable}", _Kind.ABSENT, variable)


def globals_by_name(source: Source, said: Collection[str]) -> Iterator[Source]:
    """Global variables that the function at ``source`` may look up by ``globals()``, among the names ``said``: those
    that are there, and those that are not."""
    function = source.obj
    if "globals" not in globals_of(function.__code__):
        return
    scope = source.child(function.__globals__, "", _Kind.ATTRIBUTE, "__globals__")
    for key in sorted(set(said) - globals_of(function.__code__)):
        if not is_implicit(key):
            name = f"global variable {key}"
            is_there = key in scope.obj
            yield scope.item(key, name) if is_there else scope.child(scope.obj, name, _Kind.ABSENT, key)


def _asks_for_modules(code: types.CodeType) -> bool:
    return any(names <= strings_in(code) for names in ASKS_FOR_MODULES)


def _loaded(source: Source) -> Source:
    return source.child(sys.modules, "", _Kind.KNOWN)
