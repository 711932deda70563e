"""Arguments and results as flat lists: what a capture fixes and what a call must match."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from te_graph import _C
from te_graph.common.dispatch import acts_like_tensor
from te_graph.graphs.arguments.constants import (
    are_same,
    difference,
    frozen,
    is_comparable,
    may_hold_more,
    reason_against,
)
from te_graph.graphs.arguments.identities import (
    Containers,
    GivenContainers,
    first_of_each,
    shapes_of_same,
    without_tensors,
)
from te_graph.graphs.arguments.nest import Shape, flatten, holds_tensors, reordered, unflatten

_PLAIN = frozenset({Tensor, nn.Parameter})


class DiscernibleError(ValueError):
    """The arguments are those of the capture, but the callable may be able to tell that they are not given alike."""


def subclass_of(tensor: Tensor) -> str | None:
    """What to say of ``tensor`` [...] if it is of a class that takes part in operations; else None."""
    kind = type(tensor)
    if kind in _PLAIN or acts_like_tensor(kind):
        return None
    return f"{kind.__name__}, a subclass whose operations a graph does not follow"


def _check_leaf(where: str, leaf: Any) -> None:
    if not isinstance(leaf, Tensor) and not is_comparable(leaf):
        raise TypeError(
            f"{where}: expected tensors, nested containers of tensors, or constants, got {type(leaf).__name__}: "
            f"{reason_against(leaf)}"
        )


def _check_container(where: str, shape: Shape) -> None:
    """Refuse a container of ``shape`` that replays cannot make anew: with tensors beside its children."""
    keys = shape.keys[: shape.items]
    if holds_tensors((keys, shape.context)):
        what = "a key" if holds_tensors(keys) else "what its class needs besides (default_factory)"
        raise TypeError(
            f"{where}: a {shape.kind.__name__} has a tensor in {what}, which a replay would not make anew: return it "
            "among the values"
        )


def _with_parameter(name: str, parameters: Sequence[str]) -> str:
    """``args[1]['a']``, and which of ``parameters`` that belongs to."""
    number = name[len("args[") :].partition("]")[0] if name.startswith("args[") else ""
    return f"{name} ({parameters[int(number)]})" if number and int(number) < len(parameters) else name


@dataclass(frozen=True)
class _Nest:
    """A nest of tensors and constants, apart from the tensors.

    Attributes:
        shape: of the nest.
        leaves: constants in order; tensors are replaced by None.
        tensors: positions of the tensors among the leaves; of results, also of objects that are found at each call.
        first: for each of those, which of them is the first with the same object: code may tell by ``is``.
        same: of containers that are one object, as ``shapes_of_same`` tells.
    """

    shape: Shape
    leaves: tuple[Any, ...]
    tensors: tuple[int, ...]
    first: tuple[int, ...]
    same: dict[Shape, Shape]

    @staticmethod
    def _parts(
        leaves: list[Any], kept: Container[int] = ()
    ) -> tuple[tuple[Any, ...], tuple[int, ...], tuple[int, ...]]:
        varies = [isinstance(leaf, Tensor) or id(leaf) in kept for leaf in leaves]
        positions = tuple(position for position, leaf in enumerate(leaves) if varies[position])
        constants = tuple(None if varies[position] else leaf for position, leaf in enumerate(leaves))
        return constants, positions, first_of_each([leaves[position] for position in positions])

    def distinct(self, leaves: list[Any]) -> list[Tensor]:
        """The tensors [...] among ``leaves`` in order, without those that are the same object as an earlier one."""
        return [leaves[self.tensors[number]] for number, first in enumerate(self.first) if first == number]

    def numbers_of_last(self, count: int) -> list[int]:
        """Where the last ``count`` tensors of the nest are among the distinct ones."""
        return [number for _, number in self._numbers[len(self._numbers) - count :]]

    def unflatten(self, distinct: list[Tensor]) -> Any:
        """The nest with ``distinct`` tensors [...] in their places."""
        return unflatten(self._with_tensors(distinct), self.shape, same=self.same)

    def _with_tensors(self, distinct: list[Tensor]) -> list[Any]:
        leaves = list(self.leaves)
        for position, number in self._numbers:
            leaves[position] = distinct[number]
        return leaves

    @functools.cached_property
    def _numbers(self) -> list[tuple[int, int]]:
        """Where each tensor of the nest stands among the leaves, and among the distinct ones."""
        distinct = [number for number, first in enumerate(self.first) if first == number]
        return [(position, distinct.index(first)) for position, first in zip(self.tensors, self.first, strict=True)]


@dataclass(frozen=True)
class Signature(_Nest):
    """The arguments of a call: the nest of ``(args, kwargs)``.

    Attributes:
        names: name of each leaf, such as ``args[0]`` or ``kwargs['mask']``.
        expected: what each constant is compared with.
        given: which objects the containers are.
    """

    names: tuple[str, ...]
    expected: tuple[Any, ...]
    given: GivenContainers

    @classmethod
    def of(cls, label: str, args: tuple, kwargs: dict[str, Any]) -> tuple[Signature, list[Tensor]]:
        """The signature of sample arguments, and their tensors in order, each once; ``label`` is of their callable.

        Raises:
            TypeError: a leaf is neither a tensor nor a constant.
        """
        containers: Containers = []
        leaves, shape = flatten((args, kwargs), containers=containers)
        names = (*shape.children[0].names("args"), *shape.children[1].names("kwargs"))
        for name, leaf in zip(names, leaves, strict=True):
            _check_leaf(f"{label}: sample {name if len(name) <= 80 else name[:40] + '...'}", leaf)
        constants, positions, first = cls._parts(leaves)
        given = GivenContainers.of(leaves, shape, containers)
        expected = tuple(map(frozen, constants))
        signature = cls(shape, constants, positions, first, given.same, names, expected, given)
        return signature, signature.distinct(leaves)

    def unflatten(self, distinct: list[Tensor]) -> Any:
        """``(args, kwargs)`` with ``distinct`` tensors [...] in their places; what holds none is what was given."""
        return self.given.unflatten(self._with_tensors(distinct), self.shape)

    @property
    def distinct_names(self) -> list[str]:
        """The names of the distinct tensors."""
        return [self.names[position] for n, position in enumerate(self.tensors) if self.first[n] == n]

    @property
    def holders(self) -> list[tuple[str, Any]]:
        """What may hold more than is compared here, with its name: functions, classes, values with attributes of their
        own, and what containers are made of."""
        found = [(name, leaf) for name, leaf in zip(self.names, self.leaves, strict=True) if may_hold_more(leaf)]
        pairs = zip(("args", "kwargs"), self.shape.children, strict=True)
        return [*found, *itertools.chain.from_iterable(shape.held(prefix) for prefix, shape in pairs)]

    @property
    def keywords(self) -> tuple[str, ...]:
        """The names of the keyword arguments."""
        return self.shape.children[1].keys

    @property
    def is_flat(self) -> bool:
        """True when all arguments are positional tensors, all distinct: a call needs no flattening."""
        args, kwargs = self.shape.children
        if len(set(self.first)) < len(self.first) or kwargs.children:
            return False
        return all(child.is_leaf for child in args.children) and len(args.children) == len(self.tensors)

    def is_plain(self, args: tuple) -> bool:
        """True when ``args``, of a flat signature, are the tensors of the call as they stand."""
        if len(args) != len(self.tensors):
            return False
        if len(args) == 1:
            return type(args[0]) in _PLAIN
        return all(type(argument) in _PLAIN for argument in args) and len({*map(id, args)}) == len(args)

    def flatten(self, label: str, args: tuple, kwargs: dict[str, Any], parameters: Sequence[str] = ()) -> list[Tensor]:
        """The distinct tensors of a call, in order. ``parameters`` are the names of the first arguments.

        Raises:
            ValueError: the call has other arguments than the capture; names the first.
            DiscernibleError: it has the same, in another order or one tensor in several places.
        """
        containers = [] if len(self.given.numbers) > 1 else None
        leaves, shape = flatten((args, kwargs), containers=containers)
        is_reordered = not shape.matches(self.shape)
        if is_reordered:
            if not shape.matches(self.shape, in_any_order=True):
                raise ValueError(f"{label}: {self._difference(args, kwargs, parameters)}")
            leaves = reordered(leaves, shape, self.shape)
        for position, (expected, got, name) in enumerate(zip(self.expected, leaves, self.names, strict=True)):
            if position in self.tensors:
                if not isinstance(got, Tensor):
                    shown = _with_parameter(name, parameters)
                    raise ValueError(f"{label}: expected {shown} to be a tensor as at capture, got {got!r}")
                if kind := subclass_of(got):
                    raise ValueError(f"{label}: expected {name} to be a torch.Tensor, got a {kind}")
            elif isinstance(got, Tensor) or not are_same(expected, got):
                shown = _with_parameter(name, parameters)
                raise ValueError(f"{label}: {_difference_of(shown, expected, got)}")
        first = first_of_each([leaves[position] for position in self.tensors])
        if first != self.first:
            self._refuse_identities(label, first)
        if is_reordered:
            raise DiscernibleError(f"{label}: {self._difference_of_order(shape)}")
        if containers is not None and (pair := self.given.difference(containers)) is not None:
            raise DiscernibleError(f"{label}: {self._difference_of_containers(*pair, containers)}")
        return self.distinct(leaves)

    def _refuse_identities(self, label: str, first: tuple[int, ...]) -> None:
        names = [self.names[position] for position in self.tensors]
        for number, (name, expected) in enumerate(zip(names, self.first, strict=True)):
            if expected != number and first[number] != first[expected]:
                raise ValueError(f"{label}: expected {name} to be the same tensor as {names[expected]}, as at capture")
        number = next(n for n, one in enumerate(first) if one != self.first[n])
        raise DiscernibleError(
            f"{label}: {names[number]} and {names[first[number]]} are one tensor; at capture they were two"
        )

    def _difference_of_order(self, shape: Shape) -> str:
        halves = zip(("args", "kwargs"), shape.children, self.shape.children, strict=True)
        name, *keys = next(found for half, *pair in halves for found in Shape.reordered_keys(*pair, half))
        got, expected = (", ".join(map(str, some)) for some in keys)
        return f"expected {name} in the order ({expected}) as at capture, got ({got}): code may go by it, keep to one"

    def _difference_of_containers(self, number: int, other: int, containers: Containers) -> str:
        halves = zip(("args", "kwargs"), self.shape.children, strict=True)
        names = [name for half, shape in halves for name in shape.container_names(half)]
        counts = ("one", "two") if containers[number][0] is containers[other][0] else ("two", "one")
        what = f"{counts[0]} {type(containers[number][0]).__name__}{'s' if counts[0] == 'two' else ''}"
        return f"{names[number]} and {names[other]} are {what}; at capture they were {counts[1]}"

    def _difference(self, args: tuple, kwargs: dict[str, Any], parameters: Sequence[str]) -> str:
        sample_args, sample_kwargs = self.shape.children
        if len(args) != len(sample_args.children):
            return _C.difference_of_counts(len(sample_args.children), len(args))
        if extra := sorted(set(kwargs) - set(sample_kwargs.keys)):
            in_sample = f': capture with sample_kwargs={{"{extra[0]}": ...}} to give it'
            advice = ": capture with step_state= to pass it" if extra[0] == "is_first_microbatch" else in_sample
            return f"got keyword argument {extra[0]}, which was not given at capture{advice}"
        if missing := sorted(set(sample_kwargs.keys) - set(kwargs)):
            return f"expected keyword argument {missing[0]}, which was given at capture"
        pairs = [(f"args[{i}]", *pair) for i, pair in enumerate(zip(sample_args.children, args, strict=True))]
        given = zip(sample_kwargs.keys, sample_kwargs.children, strict=True)
        pairs += [(f"kwargs[{key!r}]", shape, kwargs[key]) for key, shape in given]
        for name, expected, got in pairs:
            if not flatten(got)[1].matches(expected):
                shown = _with_parameter(name, parameters)
                return f"expected {shown} nested as at capture, got a {type(got).__name__} of another structure"
        return "the arguments are nested in another way than at capture"


def _difference_of(constant: str, expected: Any, got: Any) -> str:
    if isinstance(got, Tensor):
        return f"expected {constant} to be {expected!r} as at capture, got tensor"
    attribute, expected, got = difference(expected, got)
    where = f"{attribute} of {constant}" if attribute else constant
    values = ["nothing" if attribute and one is NotImplemented else repr(one) for one in (expected, got)]
    return f"expected {where} to be {values[0]} as at capture, got {values[1]}"


@dataclass(frozen=True)
class ResultNest(_Nest):
    """The nest of a callable's results: tensors, each once, and constants."""

    @classmethod
    def of(
        cls, label: str, result: Any, kept: Collection[int] = (), reached: Container[int] = ()
    ) -> tuple[ResultNest, list[Any]]:
        """The nest of ``result`` and its tensors in order, each once; ``label`` is what messages call its callable.

        Objects whose identities are ``kept`` are not looked into and count as tensors. A container without tensors
        whose identity is among those ``reached``, since it was there before the call, is a constant.

        Raises:
            TypeError: a leaf is neither a tensor nor a constant, or a container cannot be made anew.
        """
        containers: Containers = []
        leaves, shape = flatten(result, kept, containers)
        if constants := {id(obj) for obj, _ in without_tensors(leaves, shape, containers) if id(obj) in reached}:
            containers.clear()
            leaves, shape = flatten(result, constants.union(kept), containers)
        for leaf in leaves:
            if id(leaf) not in kept and id(leaf) not in constants:
                _check_leaf(f"{label}: result", leaf)
        for _, inner in containers:
            _check_container(f"{label}: result", inner)
        nest = cls(shape, *cls._parts(leaves, kept), shapes_of_same(containers))
        return nest, nest.distinct(leaves)

    @property
    def is_tensor(self) -> bool:
        """True when the result is one tensor."""
        return self.shape.is_leaf and len(self.tensors) == 1
