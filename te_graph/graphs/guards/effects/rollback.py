"""What Python code may leave behind in the objects of a callable, undone when its capture fails."""

from __future__ import annotations

import itertools
import operator
import threading
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from te_graph import _C
from te_graph.common.class_origins import HEAP_TYPE
from te_graph.common.dispatch import is_leaf
from te_graph.common.own_objects import OwnObject
from te_graph.common.raw_contents import items_of, kind_of, members_of, put_back
from te_graph.graphs.arguments.attributes import in_slot, instance_dict, set_instance_dict, slot_of
from te_graph.graphs.graphed_class import set_class
from te_graph.graphs.guards.effects.kept_memory import ArrayContents, TensorState, is_small_array
from te_graph.graphs.guards.effects.reach import HOLDERS, objects_at
from te_graph.graphs.guards.plain_values import is_value
from te_graph.graphs.guards.readers.guarded_sources import Inlined, is_opaque, slots_of
from te_graph.graphs.guards.sources import MODULE_TABLES, Source

CONTAINERS = (dict, list, set, deque)
_HOOKS = "_hooks"  # in the names of the tables where modules have them
_PARTS = ("__code__", "__defaults__", "__kwdefaults__")  # of functions
_SLOTS_APART = (types.CellType, Inlined)  # cells are bindings, and te_graph's state is no effect of code


class ContainerState:
    """The contents of the attributes, slots, dictionaries, lists, sets, deques and small arrays that a callable refers
    to, classes of objects, code and defaults of functions, hooks of modules, where tensors lie, and the flags and hooks
    of leaves.

    Args:
        sources: the callable and what it refers to. References to what they hold are kept until this object goes.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        self._kept: list[tuple[Any, Any, list[Any], list[Any]]] = []  # with the objects that they belong to
        self._slots: list[tuple[Any, str, Any]] = []
        self._classes: list[tuple[Any, type]] = []
        self._dicts: list[tuple[Any, dict[str, Any]]] = []
        self._functions: list[tuple[types.FunctionType, list[Any]]] = []
        self._memory: list[TensorState | ArrayContents] = []
        self._names: dict[int, str] = {}  # of objects that are kept, by identity
        for name, obj in objects_at(source for source in sources if source.again is None):
            if id(obj) not in self._names:  # several walks may lead to one
                self._names[id(obj)] = name
                self._keep_contents(obj)

    def _keep_contents(self, obj: object) -> None:
        if isinstance(obj, OwnObject):  # beside what is captured others may change it, and it is put back by its own
            return
        if type(obj).__flags__ & HEAP_TYPE:
            self._classes.append((obj, type(obj)))
        if isinstance(obj, types.FunctionType):
            self._functions.append((obj, _parts_of(obj)))
        elif isinstance(obj, Tensor):
            grads = () if not is_leaf(obj) or obj.grad is None else (obj.grad,)
            self._memory += map(TensorState, (obj, *grads))
        elif is_small_array(obj):
            self._memory.append(ArrayContents(obj))
        if not isinstance(obj, _SLOTS_APART):
            self._slots += [(obj, slot, in_slot(obj, slot)) for slot in slots_of(type(obj))]
        if isinstance(obj, CONTAINERS):
            self._keep(obj, obj)
        if (members := instance_dict(obj)) is not None:
            self._keep(obj, members)
            if not isinstance(obj, threading.local):
                self._dicts.append((obj, members))
            if isinstance(obj, nn.Module):
                tables = (value for key, value in members.items() if key in MODULE_TABLES or _HOOKS in key)
                for table in filter(lambda table: isinstance(table, dict), tables):  # not so of ScriptModules
                    self._keep(obj, table)

    def _keep(self, owner: Any, container: dict | list | set | deque) -> None:
        self._kept.append((owner, container, *_contents_of(container)))

    def first_changed(self, but: Collection[int]) -> str:
        """Where an object was whose contents, attributes or numbers are others by now; empty if there is none.

        Args:
            but: identities of those that are not looked at.
        """
        changed = itertools.chain(
            (owner for owner, container, *contents in self._kept if not _hold_the_same(container, contents)),
            (obj for obj, slot, value in self._slots if not _is_the_same(in_slot(obj, slot), value)),
            (one.values for one in self._memory if isinstance(one, ArrayContents) and one.has_changed()),
        )
        return next((self._names[id(obj)] for obj in changed if id(obj) not in but), "")

    def restore(self, with_hooks: bool = True) -> None:
        """Put all back, object by object; with or without hooks of tensors."""
        for obj, kind in self._classes:
            if type(obj) is not kind:
                set_class(obj, kind)
        for obj, members in self._dicts:
            if instance_dict(obj) is not members:
                set_instance_dict(obj, members)
        for function, parts in self._functions:
            for name, now, before in zip(_PARTS, _parts_of(function), parts, strict=True):
                if now is not before:
                    setattr(function, name, before)
        for memory in self._memory:
            memory.restore(with_hooks)
        for obj, slot, value in self._slots:
            if in_slot(obj, slot) is not value:  # put back without code of its class
                member = slot_of(type(obj), slot)
                member.__delete__(obj) if value is NotImplemented else member.__set__(obj, value)
        for _, container, *contents in self._kept:
            if not all(map(_are_the_same, _contents_of(container), contents)):
                put_back(container, *contents)


def _parts_of(function: types.FunctionType) -> list[Any]:
    return [getattr(function, name) for name in _PARTS]


def _contents_of(container: dict | list | set | deque) -> tuple[list[Any], list[Any]]:
    """Its members or keys, and its values."""
    if isinstance(container, dict):
        items = list(items_of(container))
        return [key for key, _ in items], [value for _, value in items]
    return list(members_of(container)), []


def _hold_the_same(container: dict | list | set | deque, before: list[list[Any]]) -> bool:
    """Whether members, or keys and values, of ``container`` are those of ``before``, or equal values."""
    now = _contents_of(container)
    return all(
        len(one) == len(other) and all(map(_is_the_same, one, other)) for one, other in zip(now, before, strict=True)
    )


def _is_the_same(now: Any, before: Any) -> bool:
    """Whether code cannot tell them apart: by equality it could 0.0 from -0.0, and (1,) from (True,)."""
    return now is before or (is_value(now) and type(now) is type(before) and repr(now) == repr(before))


def _are_the_same(now: list[Any], before: list[Any]) -> bool:
    """Whether two lists hold the very same objects."""
    return len(now) == len(before) and all(map(operator.is_, now, before))


class Bindings:
    """What variables, closure cells, attributes of classes and context variables are bound to, one by one.

    Args:
        sources: as for ``ContainerState``.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        kinds = (_C.StepKind.ITEM, _C.StepKind.CELL, _C.StepKind.TYPE_ITEM, _C.StepKind.CONTEXT_VAR)
        self._sources = [source for source in sources if source.kind in kinds and not _is_in_no_dict(source)]

    def restore(self) -> None:
        """Bind them again."""
        for source in self._sources:
            owner, kind = source.parent.obj, source.kind
            if kind == _C.StepKind.ITEM:
                table = kind_of(owner)
                if table.get(owner, source.key, source) is not source.obj:
                    table.__setitem__(owner, source.key, source.obj)
            elif kind == _C.StepKind.CELL:
                owner.cell_contents = source.obj
            elif kind == _C.StepKind.TYPE_ITEM:
                holder = next((base for base in owner.__mro__ if source.key in vars(base)), owner)
                if vars(holder).get(source.key) is not source.obj:
                    setattr(holder, source.key, source.obj)
            elif source.obj is not NotImplemented and owner.get(None) is not source.obj:
                owner.set(source.obj)


def _is_in_no_dict(source: Source) -> bool:
    """As tables of a ScriptModule are, which is refused."""
    return source.kind == _C.StepKind.ITEM and kind_of(source.parent.obj) is None


def with_contents(sources: Iterable[Source]) -> Iterator[Source]:
    """Those of ``sources`` at which there may be something that code changes."""
    kinds = (*CONTAINERS, *HOLDERS, types.FunctionType)
    for source in sources:
        obj = source.obj
        if isinstance(obj, kinds) or is_small_array(obj) or not is_opaque(obj):
            yield source
