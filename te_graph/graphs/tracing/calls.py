"""A call of a function, before it is made."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from te_graph.graphs.tracing.source_lines import call_region

Call = tuple[Callable[..., Any], tuple, dict[str, Any]]
_MODULE_CODES = frozenset(part.__code__ for part in vars(nn.Module).values() if inspect.isgeneratorfunction(part))


class Drained(list):
    """What a generator given as an argument had to give, in its place."""


def call_of(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Call:
    """The call, its arguments that are generators of ``nn.Module`` (``parameters()``, ``named_buffers()``) drained.

    So calls can be compared without using them up.
    """
    if types.GeneratorType in map(type, args):
        args = tuple(_drained(arg) for arg in args)
    if kwargs and types.GeneratorType in map(type, kwargs.values()):
        kwargs = {key: _drained(arg) for key, arg in kwargs.items()}
    return function, args, kwargs


def _drained(arg: Any) -> Any:
    is_of_module = type(arg) is types.GeneratorType and arg.gi_code in _MODULE_CODES
    return Drained(arg) if is_of_module else arg


def make_call(call: Call) -> Any:
    """Make the call."""
    function, args, kwargs = call
    if Drained in map(type, args):
        args = tuple(_again(arg) for arg in args)
    if kwargs and Drained in map(type, kwargs.values()):
        kwargs = {key: _again(arg) for key, arg in kwargs.items()}
    return call_region(function, args, kwargs)


def _again(arg: Any) -> Any:
    return _items(arg) if type(arg) is Drained else arg


def _items(drained: Drained) -> Iterator[Any]:
    yield from drained
