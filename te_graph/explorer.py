"""What a function is called with and refers to: places that a guard follows at every call."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from te_graph import _C
from te_graph.dispatch import has_subclass, is_dense, is_own_file, is_user_file
from te_graph.homes import HOOK_DICTS, Place, contents, name_of
from te_graph.names import Names, class_values, is_user_type
from te_graph.signature import is_constant

_Kind = _C.StepKind
_MAX_DEPTH = 5
_MAX_PLACES = 100_000
_PLUMBING = (list, tuple, dict, types.FunctionType, types.MethodType, types.CellType, functools.partial)
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, torch.Generator)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)

_MAIN_GRAD = "main_grad"
_TABLES = ("_parameters", "_buffers", "_modules")

Frame = tuple[Callable[..., Any], tuple, dict[str, Any]]


class Inlined:
    """A callable that stands for ``__wrapped__``: captures see through it."""


@dataclass(eq=False)
class Fact(Place):
    """A place whose contents matter to a call.

    Attributes:
        depth: functions and objects on the way here, containers, modules and tensors not counted.
        is_fleeting: another object may be here at each call, as long as it holds the same.
        same_as: the place where the object was met first.
        key_place: for an item of a dict whose key is an object: where that is found.
    """

    depth: int = 0
    is_fleeting: bool = False
    same_as: Fact | None = None
    key_place: Fact | None = None

    @property
    def is_grad(self) -> bool:
        """True for the ``.grad`` of a tensor."""
        return self.kind == _Kind.GRAD

    @property
    def is_dense_tensor(self) -> bool:
        """True when a tensor with one storage is here, of a class without a dispatch of its own."""
        return isinstance(self.obj, Tensor) and not has_subclass([type(self.obj)]) and is_dense(self.obj)


def is_value(obj: Any) -> bool:
    """True for what is compared by value."""
    if isinstance(obj, set | frozenset):
        return all(is_constant(member) for member in obj)
    return is_constant(obj) or isinstance(obj, range)


def is_plumbing(obj: Any) -> bool:
    """True for what may be made anew for each call: only what it leads to matters."""
    if isinstance(obj, types.FunctionType):
        return is_user_file(obj.__code__.co_filename)
    return isinstance(obj, _PLUMBING) or (dataclasses.is_dataclass(obj) and not isinstance(obj, type))


def _is_object(fact: Fact) -> bool:
    """True for what can be the key of a dict in which something is to be found."""
    return not fact.is_grad and fact.same_as is None and not is_value(fact.obj)


def is_opaque(obj: Any) -> bool:
    """True for what is compared by identity alone, and whose inside is nobody's business."""
    if isinstance(obj, _OPAQUE):
        return True
    return type(obj).__module__.partition(".")[0] in sys.stdlib_module_names and not isinstance(obj, _NAMESPACES)


class Explorer:
    """Finds the places that calls of one function can be seen to use; remembers which names its code says."""

    def __init__(self) -> None:
        self._names = Names()

    def explore(self, frame: Frame, everything: bool = False) -> list[Fact]:
        """All places, near ones first: the function and its arguments, containers, closure variables, defaults, globals
        used, attributes, modules, optimizers and their state, gradients.

        Attributes of the user's own classes that no code names which the function may run are left out, unless
        ``everything`` is wanted.
        """
        names = self._names
        while True:
            facts = _walk(frame, names, everything)
            known = [fact.obj for fact in facts if fact.same_as is None]
            functions = [obj for obj in known if isinstance(obj, types.FunctionType) and is_plumbing(obj)]
            more = names.with_code(functions, [type(obj) for obj in known if is_user_type(type(obj))])
            if more == names:
                break
            names = more
        if not everything:  # which meets code, too, that the function does not run
            self._names = names
        return facts


def _walk(frame: Frame, names: Names, everything: bool) -> list[Fact]:
    reader = _Reader(names, everything)
    facts: list[Fact] = []
    seen: dict[int, Fact] = {}
    waiting: list[Fact] = []  # dicts whose keys are objects
    queue = deque(_beginnings(frame))
    while queue or waiting:
        if not queue:
            by_object = {id(fact.obj): fact for fact in facts if _is_object(fact)}
            queue.extend(child for fact in waiting for child in _items_of_objects(fact, by_object))
            waiting = []
            continue
        fact = queue.popleft()
        facts.append(fact)
        if len(facts) > _MAX_PLACES:
            break
        if fact.is_grad or is_value(fact.obj):
            continue
        is_leaf = isinstance(fact.obj, Tensor) and fact.obj.is_leaf and fact.obj.requires_grad
        if is_leaf or not isinstance(fact.obj, Tensor):
            fact.same_as = seen.get(id(fact.obj))
            if fact.same_as is not None:
                continue
            seen[id(fact.obj)] = fact
        if isinstance(fact.obj, dict) and not all(is_constant(key) for key in fact.obj):
            waiting.append(fact)
        queue.extend(_settled(fact, child) for child in reader.contents(fact))
    return facts


def _beginnings(frame: Frame) -> Iterator[Fact]:
    root = Fact(frame, "", is_fleeting=True)
    yield root.child(frame[0], "", _Kind.POSITION, index=0)
    for index, name in ((1, "arguments"), (2, "keyword arguments")):
        given = root.child(frame[index], name, _Kind.POSITION, index=index)
        given.is_fleeting = True
        yield given


def _settled(parent: Fact, child: Fact) -> Fact:
    """``child`` with what it takes over from ``parent``, an object further up."""
    is_far = isinstance(parent.obj, types.FunctionType) or not (
        is_plumbing(parent.obj) or isinstance(parent.obj, nn.Module | Tensor)
    )
    child.depth = parent.depth + is_far
    child.is_fleeting = parent.is_fleeting and is_plumbing(parent.obj)
    between = child.parent
    while between is not parent:
        between.is_fleeting = child.is_fleeting
        between = between.parent
    return child


def _items_of_objects(fact: Fact, by_object: dict[int, Fact]) -> Iterator[Fact]:
    for number, (key, value) in enumerate(fact.obj.items()):
        key_place = by_object.get(id(key))
        if key_place is not None:
            child = _settled(fact, fact.child(value, f"{fact.name}[{key_place.name or number}]", _Kind.ITEM_OF))
            child.key_place = key_place
            yield child


@dataclass(frozen=True)
class _Reader:
    """Tells what the object at a place leads to: of attributes, those that code may read which says ``names``."""

    names: Names
    everything: bool

    def contents(self, fact: Fact) -> Iterator[Fact]:
        obj, name = fact.obj, fact.name
        if isinstance(obj, Tensor):
            yield from self._tensor_contents(fact)
        elif name in ("arguments", "keyword arguments") and fact.parent.parent is None:
            for child in contents(fact):
                child.name = f"argument {child.index if name == 'arguments' else child.key}"
                yield child
        elif fact.key in _TABLES and isinstance(fact.parent.parent.obj, nn.Module):
            yield from _table_contents(fact)
        elif isinstance(obj, types.MethodType):
            yield fact.child(obj.__self__, name or "self", _Kind.ATTRIBUTE, "__self__")
            yield fact.child(obj.__func__, name, _Kind.ATTRIBUTE, "__func__")
        elif isinstance(obj, Inlined):
            yield fact.attributes().item("__wrapped__", name)
        elif isinstance(obj, nn.Module):
            yield from self._module_contents(fact)
        elif isinstance(obj, types.FunctionType):
            if is_plumbing(obj) and fact.depth < _MAX_DEPTH:
                yield fact.child(obj.__code__, f"function {obj.__name__}", _Kind.ATTRIBUTE, "__code__")
                yield from contents(fact)
        elif isinstance(obj, _PLUMBING):
            yield from contents(fact)
        elif isinstance(obj, types.ModuleType):
            yield from self._library_contents(fact)
        elif dataclasses.is_dataclass(obj) or (not is_opaque(obj) and fact.depth < _MAX_DEPTH):
            yield from self._object_contents(fact)

    def _reads(self, obj: Any, attribute: str) -> bool:
        return self.everything or self.names.may_read(obj, attribute)

    def _tensor_contents(self, fact: Fact) -> Iterator[Fact]:
        tensor = fact.obj
        if has_subclass([type(tensor)]):
            yield from self._object_contents(fact)
            return
        is_parameter = tensor.is_leaf and tensor.requires_grad
        if is_parameter or (tensor.is_leaf and tensor.grad is not None):
            yield fact.child(tensor.grad, name_of("grad", fact.name), _Kind.GRAD)
        members = fact.attributes()
        yield from (members.item(key, name_of(key, fact.name)) for key in list(members.obj))
        if is_parameter and _MAIN_GRAD in self.names.said and _MAIN_GRAD not in members.obj:
            yield members.child(None, name_of(_MAIN_GRAD, fact.name), _Kind.ABSENT, _MAIN_GRAD)

    def _module_contents(self, fact: Fact) -> Iterator[Fact]:
        members = fact.attributes()
        for key in list(members.obj):
            if key in _TABLES:
                yield members.item(key, name_of(key.strip("_"), fact.name))
            elif key != "te_graph" and self._reads(fact.obj, key):
                yield members.item(key, name_of(HOOK_DICTS.get(key, key), fact.name))
        yield from self._class_contents(fact, members.obj)

    def _library_contents(self, fact: Fact) -> Iterator[Fact]:
        """What the code names of a module of Python that the user wrote."""
        if is_own_file(getattr(fact.obj, "__file__", None) or "<frozen"):
            members = fact.attributes()
            yield from (members.item(key, f"{fact.name}.{key}") for key in list(members.obj) if key in self.names.said)

    def _object_contents(self, fact: Fact) -> Iterator[Fact]:
        """Attributes of an object, and what the method refers to that makes it a callable."""
        owner = fact.name or "self"
        members = fact.attributes()
        if members is not None:
            keys = [key for key in members.obj if self._reads(fact.obj, key)]
            yield from (members.item(key, f"{owner}.{key}") for key in keys)
        elif dataclasses.is_dataclass(fact.obj):
            for field in dataclasses.fields(fact.obj):
                if hasattr(fact.obj, field.name):
                    value = getattr(fact.obj, field.name)
                    yield fact.child(value, f"{owner}.{field.name}", _Kind.ATTRIBUTE, field.name)
        yield from self._class_contents(fact, members.obj if members is not None else {})
        is_function = fact.name == "" and callable(fact.obj)
        if is_function and isinstance(method := type(fact.obj).__call__, types.FunctionType):
            kind = fact.child(type(fact.obj), "", _Kind.ATTRIBUTE, "__class__")
            yield kind.child(method, "", _Kind.ATTRIBUTE, "__call__")

    def _class_contents(self, fact: Fact, attributes: dict[str, Any]) -> Iterator[Fact]:
        """What the instance has from its class, until it gets an attribute of its own."""
        for key, value in class_values(fact.obj).items():
            if key not in attributes and self._reads(fact.obj, key):
                yield fact.child(value, f"{fact.name or 'self'}.{key}", _Kind.ATTRIBUTE, key)


def _table_contents(fact: Fact) -> Iterator[Fact]:
    """Submodules, parameters or buffers of a module, under the names that they have in messages."""
    owner = fact.parent.name
    for child in contents(fact):
        child.name = f"{owner}.{child.key}".lstrip(".") if fact.key == "_modules" else name_of(child.key, owner)
        yield child
