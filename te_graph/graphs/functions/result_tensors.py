"""The tensors among the results of a ``graphed`` function: which are lent, found, or made of others at each call."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._C._autograd import CreationMeta, _get_creation_meta

from te_graph.graphs.functions.made_objects import part
from te_graph.graphs.functions.result_views import ResultView
from te_graph.graphs.tracing.refusals import CaptureError

_Place = tuple[str, int]  # of a tensor: among those that are "lent", "found" or "made", and its number there


@dataclass(frozen=True)
class FoundResult:
    """A result that the function did not make, or what one lies in the memory of: found anew at each call.

    Attributes:
        step: of the guard, to the tensor, or to the one whose ``.grad`` it is.
        is_grad: the latter.
        path: of keys, to an object in what the step leads to, where that is compared as a whole.
    """

    step: int
    is_grad: bool = False
    path: tuple[Any, ...] = ()

    def get(self, found: Any) -> Any:
        """The tensor [...] or other object, where the guard's step has ``found`` one."""
        return found.grad if self.is_grad else functools.reduce(part, self.path, found)


@dataclass(frozen=True, eq=False)
class Alias:
    """A result in memory that the function did not make.

    Attributes:
        tensor: [...], the result.
        found: [...], whose memory it is.
        source: where that is found.
    """

    tensor: Tensor
    found: Tensor
    source: FoundResult


@dataclass(eq=False)
class ResultTensors:
    """How the results of a replay come about.

    Attributes:
        lent: what the graph made, [...] each: results, and what they are views of.
        found_results: where others are found.
        found_steps: their steps of the guard.
        made: from which one of all, by its number, and how; each after that one.
        order: of each result, the number among all: those lent, found, made.
        is_lent_alone: the results are what is lent, in its order.
    """

    lent: list[Tensor] = field(default_factory=list)
    found_results: list[FoundResult] = field(default_factory=list)
    found_steps: list[int] = field(default_factory=list)
    made: list[tuple[int, ResultView]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    is_lent_alone: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_lent_alone = not self.found_results and not self.made and self.order == [*range(len(self.lent))]

    def found(self, objects: list[Any]) -> list[Any]:
        """Those of ``found_results``, where the guard's steps have found ``objects``, and perhaps more."""
        return [source.get(one) for source, one in zip(self.found_results, objects, strict=False)]

    def build(self, lent: list[Tensor], found: list[Any]) -> list[Any]:
        """The results, from what a replay has left in ``lent`` [...] each, and what was ``found`` before it."""
        pool = [*lent, *found]
        for number, view in self.made:
            pool.append(view.make(pool[number]))
        return [pool[number] for number in self.order]


def result_tensors(label: str, ends: list[Tensor | FoundResult | Alias]) -> ResultTensors:
    """How the results come about of which ``ends`` tells: a tensor [...] that the graph made, or where it is found.

    Raises:
        CaptureError: a result cannot be made anew; names ``label``.
    """
    return _Results(label, ends).tensors()


class _Results:
    """Gives each result, and what they are views of, a place."""

    def __init__(self, label: str, ends: list[Tensor | FoundResult | Alias]) -> None:
        self._label = label
        self._ends = ends
        own = {id(one): one for one in ends if isinstance(one, Tensor)}
        views = [one for one in own.values() if one._base is not None]
        # What autograd does to a view it does to others of the same memory, and it rounds otherwise than for a tensor
        # apart. Views made without gradients, and those of unbind and the like, it refuses to change.
        changeable = {id(one._base) for one in views if _get_creation_meta(one) == CreationMeta.DEFAULT}
        self._bases = {id(one._base) for one in views if id(one._base) in own or id(one._base) in changeable}
        self._lent: list[Tensor] = []
        self._found: list[FoundResult] = []
        self._made: list[tuple[_Place, ResultView]] = []
        self._places: dict[int, _Place] = {}  # by identity of the tensor

    def tensors(self) -> ResultTensors:
        places = [self._place(end) for end in self._ends]
        first = {"lent": 0, "found": len(self._lent), "made": len(self._lent) + len(self._found)}
        made = [(first[kind] + number, view) for (kind, number), view in self._made]
        order = [first[kind] + number for kind, number in places]
        return ResultTensors(self._lent, self._found, [source.step for source in self._found], made, order)

    def _place(self, end: Tensor | FoundResult | Alias) -> _Place:
        if isinstance(end, FoundResult):
            return self._place_found(end)
        tensor = end.tensor if isinstance(end, Alias) else end
        if id(tensor) not in self._places:
            self._places[id(tensor)] = self._place_of_alias(end) if isinstance(end, Alias) else self._place_of_own(end)
        return self._places[id(tensor)]

    def _place_found(self, source: FoundResult) -> _Place:
        if source not in self._found:
            self._found.append(source)
        return "found", self._found.index(source)

    def _place_of_own(self, tensor: Tensor) -> _Place:
        base = tensor._base
        if id(base) in self._bases and ResultView.between(tensor, base) is not None:
            return self._make(tensor, base, self._place(base))
        if id(base) in self._bases and tensor.has_names():
            raise self._refusal(tensor)
        self._lent.append(tensor)
        lent = "lent", len(self._lent) - 1
        return lent if type(tensor) is Tensor and not vars(tensor) else self._make(tensor, tensor, lent)

    def _place_of_alias(self, alias: Alias) -> _Place:
        tensor, found, base = alias.tensor, alias.found, alias.tensor._base
        if base is None or base is root_of(found):
            return self._make(tensor, found, self._place_found(alias.source))
        return self._make(tensor, base, self._place(Alias(base, found, alias.source)))

    def _make(self, tensor: Tensor, source: Tensor, place: _Place) -> _Place:
        view = ResultView.between(tensor, source)
        if view is None:
            raise self._refusal(tensor)
        self._made.append((place, view))
        return "made", len(self._made) - 1

    def _refusal(self, tensor: Tensor) -> CaptureError:
        return CaptureError(
            f"{self._label}: a result of shape {list(tensor.shape)} has names of dimensions, or reads the memory of "
            "another one otherwise, which cannot be made anew at each call: return a clone"
        )


def root_of(tensor: Tensor) -> Tensor:
    """What ``tensor`` [...] is a view of, if it is one."""
    return tensor if tensor._base is None else tensor._base
