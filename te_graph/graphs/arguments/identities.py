"""Which object each container of a nest is: code can tell that by ``is``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from te_graph.graphs.arguments.nest import Shape, flatten, unflatten

Containers = list[tuple[Any, Shape]]  # as ``flatten`` collects them


def first_of_each(objects: Sequence[Any]) -> tuple[int, ...]:
    """For each of ``objects``, the number of the first one that is the same object."""
    seen: dict[int, int] = {}
    return tuple(seen.setdefault(id(one), number) for number, one in enumerate(objects))


def shapes_of_same(containers: Containers) -> dict[Shape, Shape]:
    """The shape of each container that is the same object as an earlier one, and the shape of the first."""
    first = first_of_each([container for container, _ in containers])
    return {containers[number][1]: containers[one][1] for number, one in enumerate(first) if one != number}


@dataclass(frozen=True)
class GivenContainers:
    """The containers among the arguments of a call.

    Attributes:
        whole: (container, its leaves) of each that holds no tensor, by its shape: captured code is given the very
            object.
        same: of those that are one object, as ``shapes_of_same`` tells.
        numbers: of those with tensors, among all, but for ``args`` and ``kwargs`` themselves.
        first: for each of these, which of them is the first that is the same object.
    """

    whole: dict[Shape, tuple[Any, list[Any]]]
    same: dict[Shape, Shape]
    numbers: tuple[int, ...]
    first: tuple[int, ...]

    @classmethod
    def of(cls, leaves: list[Any], shape: Shape, containers: Containers) -> GivenContainers:
        """Those of the nest ``(args, kwargs)`` that ``flatten`` has found to have ``leaves`` and ``shape``."""
        inside = [(obj, inner) for obj, inner in containers if inner is not shape and inner not in shape.children]
        without = without_tensors(leaves, shape, inside)
        whole = {inner: (obj, flatten(obj)[0]) for obj, inner in without if not _is_taken_apart(inner)}
        with_tensors = {inner for _, inner in inside}.difference(inner for _, inner in without)
        numbers = tuple(number for number, (_, inner) in enumerate(containers) if inner in with_tensors)
        first = first_of_each([containers[number][0] for number in numbers])
        return cls(whole, shapes_of_same(containers), numbers, first)

    def difference(self, containers: Containers) -> tuple[int, int] | None:
        """The numbers of two of ``containers``, of arguments of the same shape, that are one object where these are
        not, or the other way round; None where there are none."""
        first = first_of_each([containers[number][0] for number in self.numbers])
        for number, pair in enumerate(zip(first, self.first, strict=True)):
            if pair[0] != pair[1]:
                return self.numbers[number], self.numbers[min(pair)]
        return None

    def unflatten(self, leaves: list[Any], shape: Shape) -> Any:
        """The arguments with ``leaves``: what has no tensors as it was given, unless it has changed since."""
        made = {inner: obj for inner, (obj, before) in self.whole.items() if _is_as_before(obj, inner, before)}
        return unflatten(leaves, shape, made, self.same)


def without_tensors(leaves: list[Any], shape: Shape, containers: Containers) -> Containers:
    """Those of ``containers``, of a nest of ``leaves`` and ``shape``, that hold no tensor, however deep."""
    tensors_before = [0, *itertools.accumulate(isinstance(leaf, Tensor) for leaf in leaves)]
    found = {
        inner: tensors_before[begin] == tensors_before[begin + inner.count] for inner, begin in _beginnings(shape, 0)
    }
    return [one for one in containers if found[one[1]]]


def _beginnings(shape: Shape, begin: int) -> Iterator[tuple[Shape, int]]:
    """Each container in a nest of ``shape``, and the number of its first leaf, from ``begin`` on."""
    yield shape, begin
    for child in shape.children:
        if not child.is_leaf:
            yield from _beginnings(child, begin)
        begin += child.count


def _is_taken_apart(shape: Shape) -> bool:
    """Whether there is a container in it of which the leaves may not be all that it holds."""
    return shape.is_registered or any(map(_is_taken_apart, shape.children))


def _is_as_before(container: Any, shape: Shape, before: list[Any]) -> bool:
    now, shape_now = flatten(container)
    return shape_now.matches(shape) and all(one is other for one, other in zip(now, before, strict=True))
