"""The arguments of a call, kept so that samples like them can be made once the call is over."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from te_graph.common.dispatch import bypass_modes, is_strided, version_of
from te_graph.graphs.arguments.constants import is_comparable, reason_against
from te_graph.graphs.arguments.identities import Containers, GivenContainers
from te_graph.graphs.arguments.nest import Shape, flatten
from te_graph.graphs.arguments.signature import subclass_of


@dataclass(frozen=True)
class CallArguments:
    """Arguments of one call; holds none of its tensors.

    Attributes:
        shape: of the nest of ``(args, kwargs)``.
        leaves: constants, and a ``_Tensor`` in the place of each tensor.
        given: which objects the containers are.
    """

    shape: Shape
    leaves: tuple[Any, ...]
    given: GivenContainers

    def samples(self) -> tuple[tuple, dict[str, Any]]:
        """Positional and keyword arguments like those of the call. A tensor that was given twice is one sample, given
        twice; samples of several calls may share memory."""
        made: dict[int, Tensor] = {}
        leaves = [leaf.sample(made) if isinstance(leaf, _Tensor) else leaf for leaf in self.leaves]
        return self.given.unflatten(leaves, self.shape)


@dataclass(frozen=True)
class _Tensor:
    """A tensor among arguments.

    Attributes:
        number: the same wherever the same object was given.
        value: [...] of the same shape, dtype and device.
    """

    number: int
    value: Tensor
    requires_grad: bool
    is_parameter: bool

    def sample(self, made: dict[int, Tensor]) -> Tensor:
        if self.number not in made:
            leaf = nn.Parameter if self.is_parameter else Tensor.requires_grad_
            made[self.number] = leaf(self.value.detach(), self.requires_grad)
        return made[self.number]


class UnfitArgumentError(Exception):
    """No sample can be made of an argument."""


@dataclass
class SampleValues:
    """Values for samples. What floating-point tensors hold does not matter, so all calls of one class share what came
    first at each place. Integers and booleans may be positions or masks, and are kept as they were.
    """

    _shared: dict[tuple, Tensor] = field(default_factory=dict)
    _own: dict[tuple, tuple[weakref.ref[Tensor], Tensor]] = field(default_factory=dict)

    def arguments(self, owner: type, args: tuple, kwargs: dict[str, Any]) -> CallArguments:
        """The arguments of a call of a module of class ``owner``.

        Raises:
            UnfitArgumentError: names the argument, and says what to write instead.
        """
        containers: Containers = []
        leaves, shape = flatten((args, kwargs), containers=containers)
        names = itertools.chain(shape.children[0].names("args"), shape.children[1].names("kwargs"))
        numbers: dict[int, int] = {}
        found = []
        for name, leaf in zip(names, leaves, strict=True):
            if isinstance(leaf, Tensor):
                if (what := _unfit(leaf)) is not None:
                    raise UnfitArgumentError(f"it is called with a {what} as {name}")
                number = numbers.setdefault(id(leaf), len(numbers))
                value = self._value_of(owner, name, leaf)
                leaf = _Tensor(number, value, leaf.requires_grad, isinstance(leaf, nn.Parameter))
            elif not is_comparable(leaf):
                raise UnfitArgumentError(f"it is called with a {type(leaf).__name__} as {name}: {reason_against(leaf)}")
            found.append(leaf)
        return CallArguments(shape, tuple(found), GivenContainers.of(leaves, shape, containers))

    def _value_of(self, owner: type, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            key = (id(tensor), version_of(tensor))
            known, copy = self._own.get(key, (None, None))
            if known is None or known() is not tensor:
                copy = _copy_of(tensor)
                self._own[key] = weakref.ref(tensor), copy
            return copy
        key = (owner, name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if key not in self._shared:
            self._shared[key] = _copy_of(tensor)
        return self._shared[key]


def _unfit(tensor: Tensor) -> str | None:
    """What ``tensor`` [...] is, in messages, if no sample can be like it."""
    if not is_strided(tensor):
        return f"tensor of layout {tensor.layout}"
    if tensor.has_names():
        return "tensor whose dimensions have names"
    return subclass_of(tensor)


def _copy_of(tensor: Tensor) -> Tensor:
    with bypass_modes(), torch.no_grad():
        return torch.empty_like(tensor, requires_grad=False).copy_(tensor.detach())
