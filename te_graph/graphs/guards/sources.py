"""What a callable refers to: the steps by which a guard gets from it to modules, tensors and everything else."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from te_graph import _C
from te_graph.common.class_origins import module_of
from te_graph.common.dispatch import is_project_file
from te_graph.common.own_objects import OwnObject
from te_graph.common.raw_contents import items_of, members_of
from te_graph.graphs.arguments.attributes import instance_dict, may_have_attributes
from te_graph.graphs.arguments.constants import is_constant
from te_graph.graphs.guards.plain_values import is_bulk, is_value
from te_graph.graphs.tracing.code_names import globals_of
from te_graph.graphs.tracing.names import Names

HOOK_DICTS = {
    "_forward_hooks": "forward hooks",
    "_forward_pre_hooks": "forward pre-hooks",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
}
MODULE_TABLES = ("_parameters", "_buffers", "_modules")  # attributes of a module that it looks names up in
MAX_OBJECTS = 100_000
_OPAQUE = (str, bytes, int, float, complex, type, type(None), types.ModuleType, types.BuiltinFunctionType, torch.dtype)
_Kind = _C.StepKind


@dataclass(eq=False)
class Source:
    """An object and the step that leads to it from its parent's.

    Attributes:
        name: what messages call the object.
        distance: steps from the callable; submodules, parameters and buffers are as far as their module.
        again: the first source where the object was met, if that was another one.
        key_source: for an item of a dict whose key is an object: where that is found.
    """

    obj: Any
    name: str
    parent: Source | None = None
    kind: Any = None
    key: Any = None
    index: int = 0
    distance: int = 0
    step: int = -1  # its number in the guard, once it is there
    in_guard: bool = False
    again: Source | None = None
    key_source: Source | None = None

    def child(self, obj: Any, name: str, kind: Any, key: Any = None, index: int = 0, distance: int = 1) -> Source:
        return type(self)(obj, name, self, kind, key, index, self.distance + distance)

    def attributes(self) -> Source | None:
        """The instance dictionary, or None for objects without one."""
        members = instance_dict(self.obj)
        if isinstance(self.obj, threading.local):  # another one on each thread
            return self.child(members, self.name, _Kind.ATTRIBUTE, "__dict__", distance=0)
        return None if members is None else self.child(members, self.name, _Kind.INSTANCE_DICT, distance=0)

    def item(self, key: Any, name: str, distance: int = 1) -> Source:
        return self.child(self.obj[key], name, _Kind.ITEM, key, distance=distance)

    def anew(self, root: Source) -> Source:
        """The same way to the same object, from ``root`` on, for another walk, which this is near to."""
        if self.parent is None:
            return root
        key_source = self.key_source and self.key_source.anew(root)
        fresh = {"step": -1, "in_guard": False, "again": None, "distance": 1}
        return replace(self, parent=self.parent.anew(root), key_source=key_source, **fresh)

    def never(self, reason: str) -> Source:
        """That what is here cannot be compared."""
        return self.child(None, reason, _Kind.NEVER)

    def top_module(self) -> Source | None:
        """The first module on the way here."""
        above = self.parent.top_module() if self.parent is not None else None
        return above or (self if isinstance(self.obj, nn.Module) else None)


def copies_of(sources: list[Source]) -> list[Source]:
    """The same ways to the same objects, for another guard."""
    copies: dict[int, Source] = {}
    return [_copy_of(source, copies) for source in sources]


def _copy_of(source: Source, copies: dict[int, Source]) -> Source:
    if id(source) not in copies:
        found = copies[id(source)] = replace(source, step=-1, in_guard=False)
        for name in ("parent", "again", "key_source"):
            if (other := getattr(source, name)) is not None:
                setattr(found, name, _copy_of(other, copies))
    return copies[id(source)]


def plain_call_guard() -> _C.CallableGuard:
    """A guard that passes while a call of a module does nothing but call the ``forward`` of its class."""
    guard = _C.CallableGuard()
    members = guard.add_step(_Kind.INSTANCE_DICT, -1, None, 0, None, "attributes")
    for name in ("forward", "_call_impl", "_compiled_call_impl"):
        guard.add_step(_Kind.ABSENT, members, name, 0, None, name)
    for name, what in HOOK_DICTS.items():
        hooks = guard.add_step(_Kind.ITEM, members, name, 0, None, what)
        guard.add_step(_Kind.LENGTH, hooks, None, 0, None, f"number of {what}")
    return guard


def walk(reader: Any) -> Iterator[Source]:
    """Everything that the beginnings of ``reader`` lead to, near things first, under each of its names; looked into
    once. A reader tells what an object leads to, as ``TensorReader`` does; it is not asked of te_graph's own."""
    seen: dict[int, Source] = {}
    queue = deque(reader.beginnings())
    while len(seen) < MAX_OBJECTS:
        if not queue:
            queue.extend(reader.deferred(seen))
        if not queue:
            return
        source = queue.popleft()
        if reader.is_end(source):
            yield source
            continue
        first = seen.setdefault(id(source.obj), source)
        if first is not source:
            source.again = first
        yield source
        if first is source:
            found = own_tensors(source) if isinstance(source.obj, OwnObject) else reader.contents(source)
            inner = list(itertools.islice(found, MAX_OBJECTS))
            queue.extendleft(reversed([child for child in inner if child.distance == source.distance]))
            queue.extend(child for child in inner if child.distance > source.distance)


def own_tensors(source: Source) -> Iterator[Source]:
    """All that an object of te_graph's own leads to: the tensors that graphs use. What else it holds is no state of the
    user's, changes inside of captures, and is put back by transactions of its own."""
    yield from (source.child(tensor, source.name, _Kind.KNOWN) for tensor in source.obj.captured_tensors())


def is_own_tensor(source: Source) -> bool:
    """Whether it is one of those that ``own_tensors`` has found."""
    return source.kind == _Kind.KNOWN and isinstance(source.obj, Tensor) and isinstance(source.parent.obj, OwnObject)


class TensorReader:
    """Reads everything that can lead from ``root`` to a tensor, for a walk.

    Attributes:
        reach: what is more steps away is not looked into.
    """

    reach = 6

    def __init__(self, root: Any) -> None:
        self.root = root

    def beginnings(self) -> Iterable[Source]:
        """Where the walk begins."""
        return (Source(self.root, ""),)

    def is_end(self, source: Source) -> bool:
        """Whether the object there leads nowhere, however often it is met. Values of classes of the user's,
        enumerations among them, may have attributes.

        Raises:
            RuntimeError: it is a proxy of a module or tensor, or does not tell its class.
        """
        if hides_class(source.obj):
            raise RuntimeError(f"{source.name} {HIDES_CLASS}")
        if pretends(source.obj):
            advice = "use weakref.ref" if type(source.obj) in weakref.ProxyTypes else "hold what is behind it"
            kind = "weak proxy" if type(source.obj) in weakref.ProxyTypes else "proxy"
            raise RuntimeError(f"{source.name} is a {kind}, which cannot be compared: {advice}")
        return is_value(source.obj) and not may_have_attributes(source.obj)

    def contents(self, source: Source) -> Iterable[Source]:
        """What the object there leads to."""
        if source.distance > self.reach:
            return ()
        if isinstance(source.obj, nn.Module):
            return _module_contents(source)
        return () if is_bulk(source.obj) else contents(source)

    def deferred(self, seen: dict[int, Source]) -> Iterable[Source]:
        """What is reported only when all else has been ``seen``, by identity."""
        return ()


def _module_contents(source: Source) -> Iterator[Source]:
    members = source.attributes()
    for key, value in list(members.obj.items()):
        if key == "_modules":
            yield from submodules(source)
        elif key in ("_parameters", "_buffers"):
            table = members.item(key, name_of(key, source.name), distance=0)
            names = [name for name, tensor in value.items() if tensor is not None]
            yield from (table.item(name, name_of(name, source.name), distance=0) for name in names)
        elif key not in HOOK_DICTS and not is_handle(source.obj, key):
            yield members.item(key, name_of(key, source.name))


def pretends(obj: Any) -> bool:
    """Whether ``obj`` says that it is a module or tensor, as proxies do, and is none."""
    return isinstance(obj, nn.Module | Tensor) and not issubclass(type(obj), nn.Module | Tensor)


HIDES_CLASS = (
    "cannot be compared: its class raises an error where it is asked for __class__; let it raise AttributeError"
)


def hides_class(obj: Any) -> bool:
    """Whether ``obj`` raises an error, other than that it has none, where ``isinstance`` asks for its class."""
    try:
        isinstance(obj, nn.Module)
    except Exception:
        return True
    return False


def is_handle(obj: Any, name: str) -> bool:
    """Whether the attribute ``name`` of a module is the handle by which it is graphed."""
    if name != "te_graph" or not isinstance(obj, nn.Module):
        return False
    return module_of(type(vars(obj).get(name))).partition(".")[0] == "te_graph"


def submodules(source: Source) -> Iterator[Source]:
    table = source.attributes().item("_modules", name_of("_modules", source.name), distance=0)
    for name, module in table.obj.items():
        if module is not None:
            yield table.item(name, f"{source.name}.{name}".lstrip("."), distance=0)


def tells_tensors_apart(names: Names, sources: Iterable[Source]) -> bool:
    """Whether code that says ``names`` may tell which object a tensor at ``sources`` is: by its identity, or as a key
    or member of a container."""
    return names.tells_objects_apart or any(_is_tensor_key(source, names) for source in sources)


def _is_tensor_key(source: Source, names: Names) -> bool:
    """Whether there is an item of a dictionary, its key, or a set, and a key or member is a tensor."""
    if isinstance(source.obj, set | frozenset):
        return any(map(_is_tensor, members_of(source.obj)))
    key = source.key_source or (source if source.kind == _Kind.KNOWN else None)
    if key is None or not _is_tensor(key.obj):
        return False
    table = source.parent
    is_of_optimizer = table is not None and table.key == "state" and isinstance(table.parent.parent.obj, Optimizer)
    return not is_of_optimizer or "state" in names.said  # torch looks up those that have gradients


def _is_tensor(obj: Any) -> bool:
    return isinstance(obj() if isinstance(obj, weakref.ref) else obj, Tensor)


def name_of(name: str, owner: str) -> str:
    return f"{name} of {owner}" if owner else name


def contents(source: Source) -> Iterator[Source]:
    """What an object that is no module refers to."""
    obj, name = source.obj, source.name
    if isinstance(obj, _OPAQUE):
        return
    if isinstance(obj, dict):
        for key, value in items_of(obj):
            if is_constant(key):
                yield source.child(value, f"{name}[{key!r}]", _Kind.ITEM, key)
    elif isinstance(obj, list | tuple):
        for index, value in enumerate(members_of(obj)):
            yield source.child(value, f"{name}[{index}]", _Kind.POSITION, index=index)
    elif isinstance(obj, types.FunctionType):
        yield from _function_contents(source)
    elif isinstance(obj, types.MethodType):
        yield source.child(obj.__self__, name, _Kind.ATTRIBUTE, "__self__")
        yield source.child(obj.__func__, name, _Kind.ATTRIBUTE, "__func__")
    elif isinstance(obj, functools.partial):
        for key in ("func", "args", "keywords"):
            yield source.child(getattr(obj, key), f"{name} {key}".lstrip(), _Kind.ATTRIBUTE, key)
    elif (members := source.attributes()) is not None:
        for key in list(members.obj):
            yield members.item(key, f"{name}.{key}".lstrip("."))
        if source.parent is None:  # a callable object: what its method refers to
            kind = source.child(type(obj), name, _Kind.ATTRIBUTE, "__class__")
            method = type(obj).__call__
            if isinstance(method, types.FunctionType):
                yield kind.child(method, name, _Kind.ATTRIBUTE, "__call__")


def items_in(source: Source) -> Iterator[Source]:
    """What a dictionary holds, under keys that are compared by value or found by themselves."""
    for number, (key, value) in enumerate(list(items_of(source.obj))):
        if is_value(key):
            yield source.child(value, f"{source.name}[{key!r}]", _Kind.ITEM, key)
        elif isinstance(key, weakref.ref):
            yield source.child(key, f"key of {source.name}", _Kind.KNOWN)
            yield source.child(value, f"{source.name}[{number}]", _Kind.ITEM, key)
        else:
            item = source.child(value, f"{source.name}[{getattr(key, '__name__', number)}]", _Kind.ITEM_OF)
            item.key_source = source.child(key, f"key of {source.name}", _Kind.KNOWN)
            yield from (item.key_source, item)


def _function_contents(source: Source) -> Iterator[Source]:
    function = source.obj
    if function.__closure__:
        cells = source.child(function.__closure__, source.name, _Kind.ATTRIBUTE, "__closure__")
        for index, (variable, cell) in enumerate(zip(function.__code__.co_freevars, function.__closure__, strict=True)):
            where = cells.child(cell, variable, _Kind.POSITION, index=index)
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            yield where.child(value, f"closure variable {variable}", _Kind.CELL)
    for key in ("__defaults__", "__kwdefaults__"):
        if getattr(function, key):
            yield source.child(getattr(function, key), f"default of {function.__name__}", _Kind.ATTRIBUTE, key)
    scope = _scope_of(source)
    for variable in sorted(globals_of(function.__code__)):
        if variable in function.__globals__:
            yield scope.item(variable, f"global variable {variable}")


def _scope_of(source: Source) -> Source:
    """The global variables of a function. Those of installed packages, which hardly ever change, are found as
    attributes of their modules, so that they are watched by name."""
    function = source.obj
    module = sys.modules.get(function.__module__)
    if is_project_file(function.__code__.co_filename) or getattr(module, "__dict__", None) is not function.__globals__:
        return source.child(function.__globals__, "", _Kind.ATTRIBUTE, "__globals__")
    known = source.child(module, module.__name__, _Kind.KNOWN, distance=0)
    return known.child(function.__globals__, "", _Kind.INSTANCE_DICT, "__globals__")
