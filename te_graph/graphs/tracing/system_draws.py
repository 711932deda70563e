"""Uses of random generators of which no state of a generator tells: draws from the system, where other numbers come at
each call and generators that are made without a seed take theirs, draws from generators of the process, whose state
code may have put back since, and states that code sets to what they are by chance.
"""

from __future__ import annotations

import dis
import functools
import itertools
import os
import random
import sys
import traceback
import types
from typing import Any

import torch

from te_graph.common.dispatch import is_user_file

CODE_OF_SEED = random.Random.seed.__code__  # without an argument it draws in C
OF_PYTHON, OF_NUMPY = "Python's random module", "numpy.random"
FROM_SEED = "random.Random without a seed"
_FROM_SYSTEM = "the system (os.urandom, as SystemRandom, secrets, uuid4 and generators without a seed do)"
_CODE_OF_BITS = random.SystemRandom.getrandbits.__code__  # which NumPy calls, from C
_OF_SYSTEM = frozenset(id(vars(os)[name]) for name in ("urandom", "getrandom") if hasattr(os, name))
_SEED_OF_TORCH = torch.Generator.seed
_READERS = frozenset({"getstate", "get_state", "graphsafe_get_state"})
_PUT_BACK = frozenset({"setstate", "set_state", "graphsafe_set_state"})
_OF_STATES = _READERS | _PUT_BACK | {"seed", "manual_seed", "set_offset"}
_CALLERS = (map, itertools.starmap)  # they call what they are given from C, where nothing watches
_WITH_OWNER = (types.BuiltinFunctionType, types.MethodType)
# What these draw are names of files and modules, and names of what they keep in memory.
_BESIDE = frozenset({"torch", "te_graph", "triton", "tempfile"})


def called_through(function: Any, first: Any) -> tuple[Any, Any]:
    """What C code calls where ``function`` is about to be called with ``first`` as an argument, and its first one."""
    if any(function is caller for caller in _CALLERS):
        function, first = first, None
    while type(function) is functools.partial:
        function, first = function.func, next(iter(function.args), first)
    return function, first


def unseen_draw(function: Any, first: Any) -> str | None:
    """From where ``function``, which is about to be called with ``first`` as an argument, draws; None: from nowhere, or
    the state of a generator will tell. Of the generators of the process whatever is called counts, but what gets and
    sets their states."""
    if id(function) in _OF_SYSTEM:
        return _FROM_SYSTEM
    is_bound = type(function) is types.BuiltinFunctionType and function.__name__ == "seed"
    if function is _SEED_OF_TORCH or (is_bound and isinstance(function.__self__, torch.Generator)):
        return "torch.Generator.seed"
    if is_of_state(function):
        return None
    generator = function.__self__ if type(function) in _WITH_OWNER else first
    if type(generator) is random.Random:
        return OF_PYTHON if generator is random._inst else None
    numpy = sys.modules.get("numpy.random")
    return OF_NUMPY if numpy is not None and generator is numpy.mtrand._rand else None


def is_of_state(function: Any) -> bool:
    """Whether ``function`` may read or set the state of a generator."""
    return getattr(function, "__name__", "") in _OF_STATES


class StateWatch:
    """Notes of which generators code sets the state, but where it has read it and puts a state back in the end."""

    def __init__(self) -> None:
        self._set: dict[int, Any] = {}
        self._read: dict[int, Any] = {}
        self._set_since: dict[int, Any] = {}

    @property
    def set_(self) -> dict[int, Any]:
        """These generators, by identity."""
        return self._set | self._set_since

    def see(self, function: Any, first: Any) -> None:
        """That ``function``, of which ``is_of_state`` is true, is about to be called with ``first`` as an argument."""
        numpy = sys.modules.get("numpy.random")
        generator = function.__self__ if type(function) in _WITH_OWNER else first
        if numpy is not None and function is numpy.seed:
            generator = numpy.mtrand._rand
        if function.__name__ in _READERS:
            self._read[id(generator)] = generator
        elif id(generator) not in self._read:
            self._set[id(generator)] = generator
        elif function.__name__ in _PUT_BACK:
            self._set_since.pop(id(generator), None)
        else:
            self._set_since[id(generator)] = generator


def is_draw_beside(frame: types.FrameType) -> bool:
    """Whether what ``frame`` draws matters to no result: the innermost code outside Python's library, or what it calls
    there, is known to draw names alone; or a seed takes its place."""
    if frame.f_code is _CODE_OF_BITS and _makes_seeded_state(frame.f_back):
        return True
    for one, _ in traceback.walk_stack(frame):
        if one.f_globals.get("__name__", "").partition(".")[0] in _BESIDE:
            return True
        if is_user_file(one.f_code.co_filename):
            return False
    return False


def _makes_seeded_state(frame: types.FrameType | None) -> bool:
    """Whether the function of ``frame`` is about to make a ``RandomState`` of NumPy with an argument: the generator in
    it first draws a seed of its own. Calls from C have no frame; what tells is the instruction."""
    if frame is None or "RandomState" not in frame.f_code.co_names:
        return False
    step = next((step for step in dis.get_instructions(frame.f_code) if step.offset == frame.f_lasti), None)
    return step is not None and step.opname.startswith("CALL") and bool(step.arg or step.opname == "CALL_FUNCTION_EX")
