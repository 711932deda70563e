"""What a forward leaves behind in Python, which a replay would not do again: counters, lists, flags of modules."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any

from torch import Tensor, nn

from te_graph.common.dispatch import is_leaf
from te_graph.common.own_objects import OwnObject
from te_graph.common.raw_contents import count_of
from te_graph.graphs.graphed_class import plain_class
from te_graph.graphs.guards.effects.rollback import ContainerState
from te_graph.graphs.guards.plain_values import MAX_MEMBERS, are_equal, is_bulk, is_value
from te_graph.graphs.guards.pure_hooks import ComputedInGraph
from te_graph.graphs.guards.readers.library_objects import is_array, remembered
from te_graph.graphs.guards.sources import Source, is_own_tensor

_REMEDIES = {"training": "; override train() to set it"}


class SideEffects:
    """Compares what stands at the sources of a callable before and after one of its iterations.

    Args:
        sources: where its code can get to, before the iteration.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._contents = ContainerState(sources)
        self._before = {
            _path(source): (source, _remembered(source.obj), _flags(source.obj))
            for source in sources
            if not is_own_tensor(source)
        }

    def first(self, sources: Sequence[Source], with_tensors: bool = False, with_flags: bool = True) -> str | None:
        """What the iteration has changed, of ``sources`` after it: the first of them, with both values; else None.

        What hooks compute is left out, what is te_graph's own, and what is written into tensors: that is part of a
        graph. ``with_tensors``: another tensor than before is a change. ``with_flags``: so are another module, and
        flags of modules and tensors.
        """
        left_out = (
            ComputedInGraph,
            OwnObject,
            *(() if with_tensors else (Tensor,)),
            *(() if with_flags else (nn.Module,)),
        )
        after = {_path(source): source for source in sources if not is_own_tensor(source)}
        for path, source in after.items():
            if path not in self._before:
                if isinstance(source.obj, left_out):
                    continue
                return f"{source.name} (set to {_shown(source.obj)})"
            before, old, flags = self._before[path]
            if with_flags and source.obj is before.obj and (flag := _changed(flags, _flags(source.obj))) is not None:
                return f"{flag} of {source.name or 'the module'}{_both(flags[flag], _flags(source.obj)[flag], flag)}"
            if isinstance(source.obj, left_out):
                continue
            now = _remembered(source.obj)
            if isinstance(now, Tensor):
                if now is not old:
                    return source.name
            elif not are_equal(old, now):
                can_show_values = isinstance(old, Tensor) or is_value(source.obj) or is_bulk(source.obj)
                return source.name + _both(old, now) if can_show_values else source.name
        gone = (before for path, (before, *_) in self._before.items() if path not in after)
        if deleted := next((source.name for source in gone if not isinstance(source.obj, left_out)), ""):
            return f"{deleted} (deleted)"
        still_there = {id(source.obj) for source in sources}
        if left := self._contents.first_changed(but=still_there):
            return f"{left} (changed, and replaced by another object)"
        return None


def _path(source: Source) -> tuple:
    if source.parent is None:
        return ()
    return (
        *_path(source.parent),
        (source.kind, source.key if source.kind != source.kind.KNOWN else source.name, source.index),
    )


def _remembered(obj: Any) -> Any:
    """What tells whether it changed: a value, a copy of a container of values, an identity."""
    if isinstance(obj, Tensor) or is_value(obj):
        return obj
    if is_bulk(obj):
        return obj.copy() if len(obj) <= MAX_MEMBERS else len(obj)
    if is_array(obj):
        return remembered(obj)
    if isinstance(obj, list | tuple | dict | set):
        return count_of(obj)
    return _Same(obj)


def _flags(obj: Any) -> dict[str, Any]:
    """What a module or tensor is set to, and no source leads to."""
    if isinstance(obj, Tensor):
        return {"requires_grad": obj.requires_grad and is_leaf(obj)}  # what is written in place may get it
    if not isinstance(obj, nn.Module):
        return {}
    members = vars(obj)
    forward = members.get("forward")
    own = (forward.__func__, forward.__self__) if isinstance(forward, MethodType) else (forward,)
    return {"training": members.get("training"), "class": plain_class(type(obj)), "forward": tuple(map(_Same, own))}


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    return next((flag for flag, value in after.items() if value != before[flag]), None)


def _both(old: Any, now: Any, flag: str = "") -> str:
    return "" if flag == "forward" else f" (from {_shown(old)} to {_shown(now)}{_REMEDIES.get(flag, '')})"


class _Same:
    """Equal to what holds the very same object."""

    def __init__(self, obj: Any) -> None:
        self._obj = obj

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._obj is other._obj

    __hash__ = None

    def __repr__(self) -> str:
        return f"an object of {type(self._obj).__name__}"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if isinstance(value, type):
        return value.__name__
    text = repr(value)
    return text if len(text) <= 80 else type(value).__name__
