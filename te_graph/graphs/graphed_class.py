"""The class that a module is an instance of while it is graphed.

A subclass of its own class rather than an attribute ``forward``: an attribute would refer to its module, so that only
the garbage collector could free both, and it would be copied and saved with it. ``module.__class__`` stays the class
that the user knows, for reading and for writing: code that puts another class in its place (parametrizations, FSDP2)
exchanges what is below ours. Only ``type(module)`` shows the difference.
"""

from __future__ import annotations

import contextlib
import copyreg
import types
from abc import ABCMeta
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import GraphModule

from te_graph import _C
from te_graph.common.opaque import opaque
from te_graph.graphs.class_layout import below_layout

_BASE = "_te_graph_base"  # in the dictionary of each class made here: the class below
_real_class = object.__dict__["__class__"]


def plain_class(kind: type) -> type:
    """The class that the user knows of an object of type ``kind``."""
    return vars(kind).get(_BASE, kind)


def set_class(obj: Any, kind: type) -> None:
    """Make ``obj`` an instance of ``kind``, whatever its present class says to that."""
    _real_class.__set__(obj, kind)


def graphed_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``base`` for graphed modules. Nothing but its instances keeps it alive.

    ``__init_subclass__`` of ``base`` and ``__new__`` and ``__init__`` of its metaclass do not run.
    """
    for known in type.__subclasses__(base):
        if vars(known).get(_BASE) is base:
            return known
    members = {
        _BASE: base,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "forward": _Forward(base),
        "__reduce_ex__": _reduce_ex_above(base),
    }
    members["_te_graph_forward"] = members["forward"]
    renewing = ("recompile",) if issubclass(base, GraphModule) else ()  # puts functions into the class of the module
    for name in ("__deepcopy__", "__copy__", *renewing):
        if hasattr(base, name):
            members[name] = _method_as_before(base, name)
    metaclass = type(base)
    maker = ABCMeta if issubclass(metaclass, ABCMeta) else type
    made = maker.__new__(metaclass, base.__name__, (_shield(base), base), members, is_ours=True)
    type.__setattr__(made, "__call__", _C.make_fast_call(_call))
    return made


@opaque
def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a graphed class shows as its ``__call__``."""
    return module(*args, **kwargs)


def _shown_class(module: nn.Module) -> type:
    return plain_class(type(module))


def _exchange_class(module: nn.Module, kind: type) -> None:
    is_graphed = vars(module).get("te_graph") is not None
    set_class(module, graphed_class(plain_class(kind)) if is_graphed else kind)


def _shield(base: type[nn.Module]) -> type:
    """What comes before ``base`` among the bases of a class made here. One for each: of one for all, no order would be
    consistent where a class is derived from ours."""
    below, stand_in = below_layout(base)

    class Graphed(stand_in):
        __class__ = property(_shown_class, _exchange_class)

        def __init_subclass__(cls, is_ours: bool = False, **options: Any) -> None:
            if not is_ours:
                super().__init_subclass__(**options)

    if below is not stand_in:
        Graphed.__bases__ = (below,)
    return Graphed


@contextlib.contextmanager
def _as_before(module: nn.Module, base: type[nn.Module]) -> Iterator[None]:
    """``module`` as it was before it was graphed, for code that looks at its type and attributes."""
    members = vars(module)
    handle = members.pop("te_graph", None)
    has_own_forward = handle is not None and handle.own_forward is not None and "forward" not in members
    if has_own_forward:
        members["forward"] = handle.own_forward
    set_class(module, base)
    try:
        yield
    finally:
        set_class(module, graphed_class(base))
        if has_own_forward:
            members.pop("forward", None)
        if handle is not None:
            members["te_graph"] = handle


class _Forward:
    """``forward`` of a graphed class: that of the class below to code that asks the class for it, as layers of Hugging
    Face do to see whether they are the outermost to checkpoint."""

    def __init__(self, base: type[nn.Module]) -> None:
        self._base = base
        self._function = _forward_above(base)

    @opaque
    def __get__(self, module: nn.Module | None, kind: type | None = None) -> Any:
        return self._base.forward if module is None else types.MethodType(self._function, module)


def _forward_above(base: type[nn.Module]) -> Any:
    @opaque
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handle = vars(self).get("te_graph")
        if handle is None or plain_class(type(self)) is not base:
            return base.forward(self, *args, **kwargs)
        return handle.call(self, args, kwargs, base)

    forward.__qualname__ = f"{base.__qualname__}.forward"
    forward.__doc__ = base.forward.__doc__
    forward.__wrapped__ = base.forward  # inspect.signature() goes by it
    return forward


def _reduce_ex_above(base: type[nn.Module]) -> Any:
    def __reduce_ex__(self: nn.Module, protocol: int) -> Any:
        with _as_before(self, base):
            registered = copyreg.dispatch_table.get(base)
            reduced = registered(self) if registered else self.__reduce_ex__(protocol)
            if not isinstance(reduced, tuple):
                return reduced
            return _own_copy(reduced, vars(self))

    return __reduce_ex__


def _own_copy(part: Any, members: dict[str, Any], depth: int = 4) -> Any:
    """``part`` of a reduced module, with a copy of its attributes, which will not stay as they are, in their place."""
    if part is members:
        return dict(members)
    if type(part) not in (dict, list, tuple) or not depth:
        return part
    values = part.values() if type(part) is dict else part
    changed = [_own_copy(value, members, depth - 1) for value in values]
    if all(new is old for new, old in zip(changed, values, strict=True)):
        return part
    return dict(zip(part, changed, strict=True)) if type(part) is dict else type(part)(changed)


def _method_as_before(base: type[nn.Module], name: str) -> Any:
    def method(self: nn.Module, *args: Any) -> Any:
        with _as_before(self, base):
            return getattr(self, name)(*args)

    return method
