"""What stands in modules and classes of Python, torch and NumPy where others may put something: values, containers of
values, tensors, functions and objects of the user's, and what classes of theirs hold of these."""

from __future__ import annotations

import builtins
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._config_module import ConfigModule

from te_graph import _C
from te_graph.common.class_origins import module_of
from te_graph.common.dispatch import is_project_file
from te_graph.common.raw_contents import count_of, members_of
from te_graph.graphs.guards.plain_values import MAX_MEMBERS, is_value
from te_graph.graphs.guards.readers.guarded_sources import NAMESPACES
from te_graph.graphs.guards.readers.library_objects import is_iterator
from te_graph.graphs.guards.readers.lookups import is_project_module
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.guards.values import value_of
from te_graph.graphs.tracing.code_names import globals_of
from te_graph.graphs.tracing.names import is_implicit, user_classes

_Kind = _C.StepKind
_OF_TENSORS = (Tensor, nn.Parameter)  # which code need not name to read what they hold
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_MUTABLE = (list, dict, set, deque)
_MAX_DEPTH = 4
# Python's own change meanwhile (filters of warnings, where modules are looked for), under names that code says of
# other things.
_OF_PYTHON = frozenset(
    (name, key)
    for name, module in list(sys.modules.items())
    if name.partition(".")[0] in sys.stdlib_module_names
    for key, found in list(getattr(module, "__dict__", {}).items())
    if isinstance(found, _MUTABLE)
)


def held_by_module(source: Source, said: frozenset[str]) -> Iterator[Source]:
    """Of the module of a library at ``source``: other modules of that library, and what was put there, as far as they
    are among the names ``said``."""
    members, name = source.attributes(), _name_of(source.obj)
    package = name.partition(".")[0]
    for key in sorted(said.intersection(members.obj)):
        found = members.obj[key]
        if isinstance(found, types.ModuleType):
            is_held = _name_of(found).partition(".")[0] == package
        elif isinstance(found, type):
            is_held = _is_of_project(found) or holds_more(found, said)
        else:
            is_held = not is_implicit(key) and (name, key) not in _OF_PYTHON and _is_put_there(found)
        if is_held:
            yield members.item(key, f"{source.name}.{key}")
    if isinstance(source.obj, ConfigModule):  # has its settings elsewhere
        for key in sorted(said.intersection(members.obj["_config"])):
            if is_value(value := getattr(source.obj, key)):
                yield source.child(value, f"{source.name}.{key}", _Kind.ATTRIBUTE, key)


def held_by_class(source: Source, said: frozenset[str]) -> Iterator[Source]:
    """What was put on the class of a library at ``source``, or on a base, as far as it is among the names ``said``."""
    for key, found in _held_by(source.obj, said):
        yield source.child(found, f"{source.name}.{key}", _Kind.TYPE_ITEM, key)


def holds_more(kind: type, said: frozenset[str]) -> bool:
    """Whether something was put on the class ``kind`` of a library that is among the names ``said``."""
    return next(_held_by(kind, said), None) is not None


def classes_of_tensors(root: Source, said: frozenset[str]) -> Iterator[Source]:
    """The classes of all tensors, where something was put on them that is among the names ``said``."""
    yield from (root.child(kind, kind.__name__, _Kind.KNOWN) for kind in _OF_TENSORS if holds_more(kind, said))


def held_by_builtins(source: Source) -> Iterator[Source]:
    """What was put among the names of Python, and the function at ``source`` finds there."""
    function = source.obj
    found = (globals_of(function.__code__) & vars(builtins).keys()) - function.__globals__.keys()
    put = [name for name in sorted(found) if not is_implicit(name) and _is_put_there(vars(builtins)[name])]
    if put:
        members = source.child(builtins, builtins.__name__, _Kind.KNOWN).attributes()
        yield from (members.item(name, f"global variable {name}") for name in put)


def _held_by(kind: type, said: frozenset[str]) -> Iterator[tuple[str, Any]]:
    found: set[str] = set()
    for base in kind.__mro__:
        for key in sorted(said.intersection(vars(base)) - found):
            found.add(key)
            member = vars(base)[key]
            is_empty = isinstance(member, _MUTABLE) and not member  # a cache of the library's, as a rule
            if not (is_implicit(key) or is_empty) and _is_put_there(member):
                yield key, member


def _is_put_there(found: Any, depth: int = 0) -> bool:
    """Whether something may be the user's: libraries themselves hold functions, classes and objects of their own."""
    if isinstance(found, types.FunctionType):
        return is_project_file(found.__code__.co_filename)
    if isinstance(found, type | types.ModuleType | types.BuiltinFunctionType):
        return False
    if is_value(found) or isinstance(found, (Tensor, *NAMESPACES)) or _is_of_project(type(found)):
        return True
    if is_iterator(found) or value_of(found) is not None:
        return True
    if not isinstance(found, _CONTAINERS) or count_of(found) > MAX_MEMBERS or depth == _MAX_DEPTH:
        return False
    members = dict.values(found) if isinstance(found, dict) else members_of(found)
    return all(_is_put_there(member, depth + 1) for member in members)


def _is_of_project(kind: type) -> bool:
    """Whether ``kind`` or a base is of the user, in no installed package."""
    modules = (sys.modules.get(module_of(base)) for base in user_classes(kind))
    return any(module is None or is_project_module(module) for module in modules)


def _name_of(module: types.ModuleType) -> str:
    """Its name, also where a class of modules makes up attributes."""
    name = vars(module).get("__name__")
    return name if isinstance(name, str) else ""
