"""The sources that a function can be seen to use, and what kinds of object there are."""

from __future__ import annotations

import argparse
import collections
import contextvars
import dataclasses
import functools
import threading
import types
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from te_graph import _C
from te_graph.common.class_origins import is_of_python
from te_graph.common.dispatch import has_subclass, is_strided
from te_graph.graphs.arguments.attributes import in_slot
from te_graph.graphs.guards.sources import Source, name_of
from te_graph.graphs.guards.values import value_of

_Kind = _C.StepKind
_ENDS = frozenset(
    [_Kind.GRAD, _Kind.ABSENT, _Kind.TYPE_ABSENT, _Kind.TYPE_VERSION, _Kind.NO_ATTRIBUTE, _Kind.LENGTH, _Kind.NEVER]
)
_KINDS_OF_VIEWS = ("keys", "values", "items")
VIEWS = (
    types.MappingProxyType,
    *(type(getattr(kind(), name)()) for kind in (dict, collections.OrderedDict) for name in _KINDS_OF_VIEWS),
)
WRAPPERS = {property: ("fget", "fset"), staticmethod: ("__func__",), classmethod: ("__func__",)}
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_WRAPPED = (collections.UserDict, collections.UserList)
_TRANSPARENT = (list, tuple, dict, collections.deque, types.CellType, *_FUNCTIONS, *VIEWS, *WRAPPERS, weakref.ref)
_OPAQUE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, torch.Generator)
NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_SEEN_INTO = (
    *NAMESPACES,
    weakref.WeakSet,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    functools.partialmethod,
    functools.singledispatchmethod,
    collections.UserDict,
    collections.UserList,
    collections.UserString,
    collections.ChainMap,
    threading.local,
    contextvars.ContextVar,
)


class Inlined:
    """A callable that stands for ``__wrapped__``: captures see through it."""


@dataclass(eq=False)
class GuardedSource(Source):
    """A source whose contents matter to a call.

    Attributes:
        depth: functions and objects on the way here, containers, modules and tensors not counted.
        is_ephemeral: another object may be here at each call, as long as it holds the same.
        is_given: here are the arguments, or the keyword arguments.
    """

    depth: int = 0
    is_ephemeral: bool = False
    is_given: bool = False

    @property
    def is_grad(self) -> bool:
        """True for the ``.grad`` of a tensor."""
        return self.kind == _Kind.GRAD

    @property
    def is_end(self) -> bool:
        """True where no object is to be looked into."""
        return self.kind in _ENDS

    @property
    def is_strided_tensor(self) -> bool:
        """True when a tensor with one storage is here, of a class without a dispatch of its own."""
        return isinstance(self.obj, Tensor) and not has_subclass([type(self.obj)]) and is_strided(self.obj)

    def settled(self, above: GuardedSource) -> GuardedSource:
        """This, with what it takes over from ``above``, an object further up."""
        is_far = isinstance(above.obj, types.FunctionType) or not (
            is_transparent(above.obj) or isinstance(above.obj, nn.Module | Tensor)
        )
        self.depth = above.depth + is_far
        self.is_ephemeral = above.is_ephemeral and is_transparent(above.obj)
        between = self.parent
        while between is not above:
            between.is_ephemeral = self.is_ephemeral
            between = between.parent
        return self

    @functools.cached_property
    def value(self) -> _C.Value | None:
        """Of an object that is made of constants: what they are, when it is looked at first."""
        return None if self.is_given or self.is_end else value_of(self.obj)


def slots_of(kind: type) -> list[str]:
    """Names of the attributes that instances of ``kind`` have outside of a dictionary."""
    if kind is types.CellType:
        return ["cell_contents"]
    return [
        name
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    ]


def name_of_slot(source: Source, slot: str) -> str:
    """What messages call a ``slot`` of the object at ``source``, like an attribute of it."""
    is_named_first = isinstance(source.obj, nn.Module | Tensor)
    return name_of(slot, source.name) if is_named_first else f"{source.name or 'self'}.{slot}"


def is_filled(obj: Any, slot: str) -> bool:
    """Whether there is something in a ``slot`` of ``obj``."""
    try:
        return in_slot(obj, slot) is not NotImplemented
    except ValueError:  # of a cell
        return False


def is_wrapped_container(obj: Any) -> bool:
    """True for a ``UserDict`` or ``UserList``: as for ABCs ``isinstance`` asks the object itself for its class."""
    return issubclass(type(obj), _WRAPPED)


def is_transparent(obj: Any) -> bool:
    """True for what may be made anew for each call: only what it leads to matters."""
    if isinstance(obj, _TRANSPARENT) or is_wrapped_container(obj):
        return True
    if isinstance(obj, type):
        return False
    return dataclasses.is_dataclass(obj) or (type(obj).__weakrefoffset__ == 0 and bool(slots_of(type(obj))))


def is_opaque(obj: Any) -> bool:
    """True for what is compared by identity alone, and never looked into."""
    if isinstance(obj, _OPAQUE):
        return True
    return is_of_python(type(obj)) and not isinstance(obj, _SEEN_INTO)
