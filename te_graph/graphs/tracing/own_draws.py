"""Whether watched code can have drawn random numbers: other threads may draw from the same generators meanwhile."""

from __future__ import annotations

import functools
import random
import sys
import threading
from typing import Any

import torch

from te_graph.common.dispatch import tensors_in
from te_graph.graphs.arguments.attributes import own_attribute

_OF_NUMPY = ("RandomState", "Generator", "BitGenerator", "SeedSequence")


class OwnDraws:
    """Tells whether watched code can have used a generator of random numbers on the host since this object was made.

    Watches of code see calls of its methods, and those of extension modules, which may use any. Where no other thread
    runs, nobody else can have used one; before Python 3.12 not all is seen, and everything counts as its own."""

    _seen = 0  # by all watches of the process

    def __init__(self) -> None:
        self._before = OwnDraws._seen
        self._was_alone = threading.active_count() == 1

    @property
    def are_possible(self) -> bool:
        is_alone = self._was_alone and threading.active_count() == 1
        return is_alone or not hasattr(sys, "monitoring") or OwnDraws._seen != self._before


def note_use() -> None:
    """That watched code uses a generator, or may do so."""
    OwnDraws._seen += 1


def uses_generator(function: Any, first: Any) -> bool:
    """Whether a call of ``function`` with ``first`` as an argument may use one: one of the two is a generator, or a
    method of one."""
    return _leads_to_generator(function) or _leads_to_generator(first)


def _leads_to_generator(obj: Any) -> bool:
    while isinstance(obj, functools.partial):
        obj = obj.func
    return isinstance(obj, _kinds()) or isinstance(own_attribute(obj, "__self__"), _kinds())


def note_operator(func: torch._ops.OpOverload, result: Any) -> None:
    """That ``func`` has computed ``result``: it may have drawn, if that is on the CPU."""
    if torch.Tag.nondeterministic_seeded in func.tags and any(t.device.type == "cpu" for t in tensors_in(result)):
        note_use()


def _kinds() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy.random")  # NumPy loads it when it is first asked for
    return _with_those_of(numpy)


@functools.cache
def _with_those_of(numpy: Any) -> tuple[type, ...]:
    of_numpy = () if numpy is None else (getattr(numpy, name) for name in _OF_NUMPY)
    return random.Random, torch.Generator, *of_numpy
