"""What makes a module or function replay: the class of graphed modules, and a proxy of functions."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable
from typing import Any

from torch import nn

from te_graph.common.opaque import opaque
from te_graph.common.own_objects import name_of_itself
from te_graph.graphs.callables.handle import Handle
from te_graph.graphs.graphed_class import graphed_class, set_class


class FunctionProxy:
    """A function that replays its graph; ``te_graph`` is its handle."""

    def __init__(self, function: Callable[..., Any], handle: Handle) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self.te_graph = handle

    @opaque
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.te_graph.call(self._function, args, kwargs)

    def __copy__(self) -> Callable[..., Any]:
        return copy.copy(self._function)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self._function, memo)

    def __reduce__(self) -> str | tuple:
        """By name, where this object is what the function's name stands for; else as the function itself."""
        return name_of_itself(self) or (operator.getitem, ((self._function,), 0))


def prepare(targets: list[Any]) -> None:
    """Try on each module of ``targets`` what ``install`` will do, so that it cannot fail once all are captured.

    Raises:
        TypeError: a module cannot take the class of graphed modules.
    """
    for target in targets:
        if isinstance(target, nn.Module):
            kind = type(target)
            set_class(target, graphed_class(kind))
            set_class(target, kind)


def install(target: nn.Module | Callable[..., Any], handle: Handle) -> nn.Module | FunctionProxy:
    """Make ``target`` replay through ``handle``: a module in place, a function by wrapping it."""
    if not isinstance(target, nn.Module):
        return FunctionProxy(target, handle)
    kind = graphed_class(type(target))
    handle.own_forward = vars(target).pop("forward", None)
    vars(target)["te_graph"] = handle
    set_class(target, kind)
    return target
