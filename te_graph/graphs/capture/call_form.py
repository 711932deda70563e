"""Calls that mean the same, brought into the form of the captured one: ``f(x=x)`` for ``f(x)``, a default left out."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from te_graph.graphs.arguments.constants import are_same, is_comparable
from te_graph.graphs.arguments.nest import flatten, unflatten
from te_graph.graphs.arguments.signature import Signature
from te_graph.graphs.capture.ignored_arguments import IgnoredKeywords
from te_graph.graphs.guards.pure_hooks import ARGUMENT


def parameters_of(target: nn.Module | Callable[..., Any]) -> inspect.Signature | None:
    """The parameters of ``target``, not graphed yet; None where Python cannot tell.

    What a decorator has wrapped is not looked at: the decorator may take ``f(x=x)`` for something else than ``f(x)``.
    """
    try:
        return inspect.signature(target.forward if isinstance(target, nn.Module) else target, follow_wrapped=False)
    except (TypeError, ValueError):  # builtins
        return None


class CallForm:
    """Which arguments the captured call gave by position, and which by name.

    Args:
        parameters: of the callable, from ``parameters_of``.
        signature: of the captured call.
        ignored: what the callable does not look at, which the captured call does not give.
        orderless: parameters of whose dictionaries the callable cannot tell the order.

    Attributes:
        count: of the arguments that it gave by position.
        by_position: the names of what it gave by position; none where a ``*`` parameter collects.
    """

    def __init__(
        self,
        parameters: inspect.Signature | None,
        signature: Signature,
        ignored: IgnoredKeywords | None = None,
        orderless: Collection[str] = (),
    ) -> None:
        self._ignored = ignored
        args, kwargs = signature.shape.children
        each = {} if parameters is None else parameters.parameters
        starred = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        self.count, self._names = len(args.children), tuple(name for name in kwargs.keys if name != ARGUMENT)
        self._named = {name: parameter for name, parameter in each.items() if parameter.kind not in starred}
        self._has_named_alone = all(parameter.kind != inspect.Parameter.VAR_KEYWORD for parameter in each.values())
        self._parameters = parameters
        # What a ``*`` parameter collects has no name: such calls have as many arguments by position as the capture.
        self._has_starred = any(parameter.kind == inspect.Parameter.VAR_POSITIONAL for parameter in each.values())
        self.by_position = () if self._has_starred else tuple(self._named)[: self.count]
        by_name = dict(zip(kwargs.keys, kwargs.children, strict=True))
        by_name.update(zip(self.by_position, args.children, strict=False))
        is_dict = {name: name in orderless and shape.kind is dict for name, shape in by_name.items()}
        self._orders = {name: by_name[name].keys for name, is_one in is_dict.items() if is_one}
        # A later call may leave out what was given its default.
        self._defaults = {
            name: self._named[name].default
            for name, value in self._arguments_of(signature).items()
            if name in self._named and _is_default(self._named[name], value)
        }

    def normalize(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The same call in the form of the captured one; as it is where there is none."""
        args, kwargs = self._bound(args, kwargs)
        if self._orders:
            names = itertools.chain(self.by_position, itertools.repeat(""))
            args = tuple(self._with_order(name, value) for name, value in zip(names, args, strict=False))
            kwargs = {name: self._with_order(name, value) for name, value in kwargs.items()}
        return args, kwargs

    def _with_order(self, name: str, value: Any) -> Any:
        """``value``, for the parameter ``name``, with keys in the order of the capture where that does not count."""
        keys = self._orders.get(name)
        if keys is None or type(value) is not dict or value.keys() != set(keys) or tuple(value) == keys:
            return value
        own = {key: key for key in value}  # True is not 1
        return {own[key]: value[key] for key in keys}

    def _bound(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if self._ignored is not None and kwargs.keys() - set(self._names):
            kwargs = self._ignored.without(kwargs)
        if len(args) == self.count and kwargs.keys() == set(self._names):
            return args, self._in_order(kwargs)
        if self._parameters is None or (self._has_starred and len(args) != self.count):
            return args, kwargs
        try:
            given = self._parameters.bind(*args, **kwargs).arguments
        except TypeError:  # which an eager call would raise
            return args, kwargs
        if self._has_starred:
            given = {name: value for name, value in kwargs.items() if name in self._named}
            collected = {name: value for name, value in kwargs.items() if name not in self._named}
        else:
            collected = next((given.pop(n) for n in list(given) if n not in self._named), {})
        wanted = {*self.by_position, *self._names} & self._named.keys()
        is_superfluous = {name: _is_default(self._named[name], given[name]) for name in given.keys() - wanted}
        values = {**self._defaults, **{name: given[name] for name in given.keys() & wanted}}
        if not all(is_superfluous.values()) or values.keys() != wanted:
            return args, kwargs
        if collected.keys() != set(self._names) - wanted:
            return args, kwargs
        by_name = {name: values[name] for name in wanted.difference(self.by_position)}
        by_position = args if self._has_starred else tuple(values[name] for name in self.by_position)
        return by_position, self._in_order({**by_name, **collected})

    def is_possible(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """False where the callable does not take such arguments, so that an eager call raises TypeError."""
        if self._parameters is not None:
            try:
                self._parameters.bind(*args, **kwargs)
            except TypeError:
                return False
        return True

    def _arguments_of(self, signature: Signature) -> dict[str, Any]:
        """The captured arguments by name, with something of its own in the place of each tensor."""
        leaves = [object() if n in signature.tensors else leaf for n, leaf in enumerate(signature.leaves)]
        args, kwargs = unflatten(leaves, signature.shape)
        return {**dict(zip(self.by_position, args, strict=False)), **kwargs}

    def _in_order(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """``kwargs`` in the order of the capture; what a ``**`` parameter collects keeps the order it has."""
        if self._has_named_alone:
            return {name: kwargs[name] for name in self._names}
        collected = iter([name for name in kwargs if name not in self._named])
        names = [name if name in self._named else next(collected) for name in self._names]
        return {name: kwargs[name] for name in names}


def _is_default(parameter: inspect.Parameter, value: Any) -> bool:
    if parameter.default is inspect.Parameter.empty:
        return False
    if value is parameter.default:
        return True
    (leaves, shape), (expected, expected_shape) = flatten(value), flatten(parameter.default)
    if not shape.matches(expected_shape):
        return False
    return all(is_comparable(one) and are_same(two, one) for one, two in zip(leaves, expected, strict=True))
