"""What a forward leaves behind in Python, which a replay would not do again: counters, lists, random numbers drawn."""

from __future__ import annotations

import functools
import pickle
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from te_graph.graphs.guards.library_objects import is_array, remembered
from te_graph.graphs.guards.plain_values import are_equal, is_bulk, is_value
from te_graph.graphs.guards.pure_hooks import ComputedInGraph
from te_graph.graphs.guards.sources import Place

_LEFT_OUT = (Tensor, nn.Module, ComputedInGraph)


class SideEffects:
    """Compares what stands at the places of a callable before and after one of its iterations.

    Args:
        places: where its code can get to, before the iteration.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._before = {_path(place): (place, _remembered(place.obj)) for place in places}

    def first(self, places: Iterable[Place]) -> str | None:
        """What the iteration has changed, of ``places`` after it: the first of them, with both values; else None.

        Tensors are left out: what is written into them is part of a graph, as is what hooks compute.
        """
        after = {_path(place): place for place in places}
        for path, place in after.items():
            if isinstance(place.obj, _LEFT_OUT):
                continue
            if path not in self._before:
                return f"{place.name} (set to {_shown(place.obj)})"
            old = self._before[path][1]
            now = _remembered(place.obj)
            if not isinstance(old, Tensor) and not are_equal(old, now):
                is_told = is_value(place.obj) or is_bulk(place.obj)
                return f"{place.name} (from {_shown(old)} to {_shown(now)})" if is_told else place.name
        gone = (place for path, (place, _) in self._before.items() if path not in after)
        return next((f"{place.name} (deleted)" for place in gone if not isinstance(place.obj, _LEFT_OUT)), None)


class HostRandom:
    """The states of the random generators outside of torch that a callable may draw from.

    Args:
        places: where its code can get to: generators of its own may be there.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._generators: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
            "Python's random module": (random.getstate, random.setstate)
        }
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            self._generators["numpy.random"] = numpy.get_state, numpy.set_state
        for place in places:
            if isinstance(place.obj, random.Random) and not isinstance(place.obj, random.SystemRandom):
                self._generators[place.name] = place.obj.getstate, place.obj.setstate
            elif numpy is not None and isinstance(place.obj, numpy.RandomState):
                self._generators[place.name] = place.obj.get_state, place.obj.set_state
            elif numpy is not None and isinstance(place.obj, numpy.Generator):
                bits = place.obj.bit_generator
                self._generators[place.name] = (
                    functools.partial(getattr, bits, "state"),
                    functools.partial(setattr, bits, "state"),
                )
        self._states = self._now()

    def drawn_from(self) -> str | None:
        """The first generator whose state is another one than at the beginning, or None."""
        now = self._now()
        return next(
            (name for name, state in self._states.items() if pickle.dumps(now[name]) != pickle.dumps(state)), None
        )

    def restore(self) -> None:
        """Put the states back."""
        for name, (_, put) in self._generators.items():
            put(self._states[name])

    def _now(self) -> dict[str, Any]:
        return {name: get() for name, (get, _) in self._generators.items()}


def _path(place: Place) -> tuple:
    if place.parent is None:
        return ()
    return (
        *_path(place.parent),
        (place.kind, place.key if place.kind != place.kind.KNOWN else place.name, place.index),
    )


def _remembered(obj: Any) -> Any:
    """What tells whether it changed: a value, a copy of a container of values, an identity."""
    if isinstance(obj, Tensor) or is_value(obj):
        return obj
    if is_bulk(obj):
        return obj.copy() if len(obj) < 1000 else len(obj)
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
    text = repr(value)
    return text if len(text) <= 80 else type(value).__name__
