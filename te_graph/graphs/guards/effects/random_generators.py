"""Generators of random numbers that code may draw from: whether it did, and their states put back."""

from __future__ import annotations

import functools
import pickle
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from te_graph.graphs.guards.effects.reach import objects_at
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.tracing.system_draws import OF_NUMPY, OF_PYTHON, StateWatch


class HostRandom:
    """The states of the random generators that code may draw from, but for torch's default ones.

    Args:
        sources: where it can get to: generators of its own may be there.
        with_torch: put back torch's, too, that are there: a warm-up draws from them before the capture refuses it.
    """

    def __init__(self, sources: Iterable[Source], with_torch: bool = False) -> None:
        self._of_torch: list[tuple[torch.Generator, torch.Tensor]] = []  # with states [n]
        self._generators: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
            (OF_PYTHON, random.getstate, random.setstate)
        ]
        self._objects: list[tuple[str, Any]] = [(OF_PYTHON, random._inst)]
        kinds: tuple[type, ...] = (random.Random, torch.Generator)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            kinds += (numpy.RandomState,)
            self._generators.append((OF_NUMPY, numpy.get_state, numpy.set_state))
            self._objects.append((OF_NUMPY, numpy.mtrand._rand))
        for name, obj in objects_at(sources):
            if isinstance(obj, kinds):
                self._objects.append((name, obj))
            if isinstance(obj, random.Random) and not isinstance(obj, random.SystemRandom):
                self._generators.append((name, obj.getstate, obj.setstate))
            elif numpy is not None and isinstance(obj, numpy.RandomState):
                self._generators.append((name, obj.get_state, obj.set_state))
            elif numpy is not None and isinstance(obj, numpy.Generator | numpy.BitGenerator):
                bits = getattr(obj, "bit_generator", obj)
                get, put = functools.partial(getattr, bits, "state"), functools.partial(setattr, bits, "state")
                self._generators.append((name, get, put))
                self._generators.append((name, functools.partial(_spawned_by, bits), _leave))
            elif numpy is not None and isinstance(obj, numpy.SeedSequence):
                self._generators.append((name, functools.partial(getattr, obj, "n_children_spawned"), _leave))
            elif with_torch and isinstance(obj, torch.Generator):
                self._of_torch.append((obj, obj.get_state()))
        self._states = [get() for _, get, _ in self._generators]

    def drawn_from(self) -> str | None:
        """The first generator whose state is another one than at the beginning, or None."""
        for (name, get, _), state in zip(self._generators, self._states, strict=True):
            if pickle.dumps(get()) != pickle.dumps(state):
                return name
        return None

    def set_by(self, *watches: StateWatch) -> str | None:
        """The first generator whose state ``watches`` have seen set, perhaps to what it was, or None."""
        set_ = [key for watch in watches for key in watch.set_]
        return next((name for name, obj in self._objects if id(obj) in set_), None)

    def restore(self) -> None:
        """Put the states back."""
        for (_, _, put), state in zip(self._generators, self._states, strict=True):
            put(state)
        for generator, state in self._of_torch:
            generator.set_state(state)


def _spawned_by(bits: Any) -> int:
    """How many seeds have been taken from that of a generator of NumPy, its ``bits``, for others."""
    seeds = getattr(bits, "seed_seq", None)  # it is of NumPy 1.25 and newer
    return getattr(seeds, "n_children_spawned", 0)


def _leave(state: Any) -> None:
    """Nothing can put this back."""
