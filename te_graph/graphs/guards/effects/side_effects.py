"""What a forward leaves behind in Python, which a replay would not do again: counters, lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from te_graph.graphs.guards.plain_values import MAX_MEMBERS, are_equal, is_bulk, is_value
from te_graph.graphs.guards.pure_hooks import ComputedInGraph
from te_graph.graphs.guards.readers.library_objects import is_array, remembered
from te_graph.graphs.guards.sources import Source

_LEFT_OUT = (nn.Module, ComputedInGraph)


class SideEffects:
    """Compares what stands at the sources of a callable before and after one of its iterations.

    Args:
        sources: where its code can get to, before the iteration.
    """

    def __init__(self, sources: Iterable[Source]) -> None:
        self._before = {_path(source): (source, _remembered(source.obj)) for source in sources}

    def first(self, sources: Iterable[Source], with_tensors: bool = False) -> str | None:
        """What the iteration has changed, of ``sources`` after it: the first of them, with both values; else None.

        What hooks compute is left out, and what is written into tensors: that is part of a graph. ``with_tensors``:
        another tensor than before is a change.
        """
        left_out = _LEFT_OUT if with_tensors else (*_LEFT_OUT, Tensor)
        after = {_path(source): source for source in sources}
        for path, source in after.items():
            if isinstance(source.obj, left_out):
                continue
            if path not in self._before:
                return f"{source.name} (set to {_shown(source.obj)})"
            old = self._before[path][1]
            now = _remembered(source.obj)
            if isinstance(now, Tensor):
                if now is not old:
                    return source.name
            elif not isinstance(old, Tensor) and not are_equal(old, now):
                can_show_values = is_value(source.obj) or is_bulk(source.obj)
                return f"{source.name} (from {_shown(old)} to {_shown(now)})" if can_show_values else source.name
        gone = (source for path, (source, _) in self._before.items() if path not in after)
        return next((f"{source.name} (deleted)" for source in gone if not isinstance(source.obj, left_out)), None)


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
        return len(obj)
    return _Same(obj)


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
    text = repr(value)
    return text if len(text) <= 80 else type(value).__name__
