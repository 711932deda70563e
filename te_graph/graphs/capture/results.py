"""Where the results of a callable lie: in memory that its graph makes, in an argument or in a tensor outside."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.dispatch import bypass_modes, storage_key
from te_graph.graphs.capture.view_order import positions
from te_graph.graphs.guards.callable_guard import CallableGuard
from te_graph.graphs.tracing.externals import TensorWatch

_log = logging.getLogger("te_graph")
_Origin = _C.ResultSpec.Origin


@dataclass(frozen=True)
class Output:
    """A tensor that the graph makes and autograd has a node for.

    Attributes:
        result: number of the result that it is.
        is_base: it is what that result is a view of, which the callable does not return.
        is_cloned: it is a clone of that result, whose memory is not the graph's.
    """

    result: int
    is_base: bool = False
    is_cloned: bool = False

    def get(self, results: list[Tensor]) -> Tensor:
        """The output [...] among the ``results`` of a call, [...] each."""
        tensor = results[self.result]
        if self.is_base:
            return tensor._base
        return tensor.clone() if self.is_cloned else tensor


@dataclass(frozen=True)
class Result:
    """Where one result comes from.

    Attributes:
        origin: OUTPUT, INPUT or EXTERNAL.
        number: of the output or the input.
        view: what it is of that; None: the very tensor.
        tensor: [...] the result itself, where it lies in memory from outside.
        is_early: it is made before the nodes of autograd that use what it is a view of.
        is_added_separately: autograd adds its gradient to those of other uses inside before, between or after
            these, and a replay elsewhere, since what is outside of the graph comes before or after them all.
    """

    origin: Any
    number: int = 0
    view: Any = None
    tensor: Tensor | None = None
    is_early: bool = False
    is_added_separately: bool = False

    def tensor_in(self, outputs: list[Tensor], inputs: list[Tensor]) -> Tensor:
        """The result among the static ``outputs`` and ``inputs`` of a slot, [...] each."""
        tensor = (outputs if self.origin == _Origin.OUTPUT else inputs)[self.number]
        return tensor if self.view is None else self.view.of(tensor.detach())

    def spec(self, label: str, callable_guard: CallableGuard) -> _C.ResultSpec:
        """For C++; ``callable_guard`` is that of the external tensors.

        Raises:
            RuntimeError: it is part of a tensor outside that is found as something else, by other views.
        """
        if self.tensor is None:
            return _C.ResultSpec(self.origin, self.number, self.view, self.is_early)
        number = callable_guard.index_of(self.tensor)
        if number < 0 and self.tensor._is_view():
            number = callable_guard.index_of(self.tensor._base)
        if number < 0:
            key = storage_key(self.tensor)
            number = next(i for i, known in enumerate(callable_guard.tensors) if storage_key(known) == key)
        found = _as_view(self.tensor, callable_guard.tensors[number])
        if found is None:
            raise RuntimeError(
                f"{label}: a result of shape {list(self.tensor.shape)} lies in {callable_guard.names[number]} in a "
                "way that cannot be found again at each call: return a clone"
            )
        return _C.ResultSpec(self.origin, number, found.view, self.is_early)


@dataclass(frozen=True)
class ResultLayout:
    """What the graph has to make, and how the results follow from that, from the arguments and from what is outside.

    A result that shares memory with an argument, a parameter or a buffer is, at each call, that tensor or a view of it,
    as in eager execution: it sees, and does, later changes in place. Of results that overlap one is an output, and the
    others are views of it, so that autograd knows of changes in place. A tensor that is returned twice is one tensor.
    """

    outputs: tuple[Output, ...] = ()
    results: tuple[Result, ...] = ()

    @classmethod
    def of(cls, results: list[Tensor], inputs: list[Tensor], watch: TensorWatch) -> ResultLayout:
        """The layout for the ``results`` of a call on ``inputs``, [...] each, that ``watch`` has seen.

        External tensors that are returned are used: ``watch`` gets those that no operator has read.
        """
        planner = _Planner(results, inputs, watch)
        planned = [planner.result_of(number) for number in range(len(results))]
        layout = cls(tuple(planner.outputs))
        outputs = layout.outputs_of(results)
        views = {
            number: (results[number], outputs[one.number] if one.origin == _Origin.OUTPUT else None)
            for number, one in enumerate(planned)
            if results[number].grad_fn is not None and (one.origin != _Origin.OUTPUT or one.view is not None)
        }
        for number, position in positions(views, outputs).items():
            is_early = position.is_first and not position.is_last and planned[number].origin != _Origin.OUTPUT
            is_apart = position.is_tangled or not (position.is_last or is_early)
            planned[number] = dataclasses.replace(planned[number], is_early=is_early, is_added_separately=is_apart)
        return dataclasses.replace(layout, results=tuple(planned))

    def warn_about_rounding(self, label: str) -> None:
        """Log which results have their gradients added in another order than by eager execution."""
        for number, result in enumerate(self.results):
            if result.is_added_separately:
                _log.warning(
                    "%s: result %d is a view, and the callable uses it, or what it is a view of, as well: their "
                    "gradients may be added in another order than in eager execution, and round otherwise; return a "
                    "clone to have them added inside",
                    *(label, number),
                )

    def outputs_of(self, results: list[Tensor]) -> list[Tensor]:
        """The outputs among the ``results`` of a call, [...] each."""
        return [output.get(results) for output in self.outputs]

    def output_that_is(self, number: int) -> int | None:
        """The number of the output that is result ``number`` itself; None where there is none."""
        result = self.results[number]
        return result.number if result.origin == _Origin.OUTPUT and result.view is None else None

    def order_of_gradient(self, number: int, orders: Mapping[int, tuple[int, ...]]) -> tuple[int, ...] | None:
        """That of the dimensions of the gradient of output ``number``, where ``orders`` has it for its result."""
        output = self.outputs[number]
        return None if output.is_base else orders.get(output.result)

    def results_that_are(self, outputs: Collection[int]) -> set[int]:
        """The numbers of the results that are one of ``outputs`` themselves."""
        return {number for number in range(len(self.results)) if self.output_that_is(number) in outputs}

    def results_in(self, outputs: Collection[int]) -> set[int]:
        """The numbers of the results that are one of ``outputs`` or a view of it."""
        each = enumerate(self.results)
        return {number for number, one in each if one.origin == _Origin.OUTPUT and one.number in outputs}

    def lies_in_chain(self, number: int, links: Collection[int]) -> bool:
        """True when result ``number`` lies in memory of the graph, or in that of one of the inputs ``links``, which
        lie in a predecessor's."""
        result = self.results[number]
        return result.origin == _Origin.OUTPUT or (result.origin == _Origin.INPUT and result.number in links)

    def is_made(self, number: int) -> bool:
        """True when result ``number`` is a new tensor at each call, and no argument or tensor from outside."""
        result = self.results[number]
        return result.origin == _Origin.OUTPUT or (result.origin == _Origin.INPUT and result.view is not None)

    @property
    def clones(self) -> int:
        """Results that are copied inside the graph."""
        return sum(output.is_cloned for output in self.outputs)

    @property
    def is_plain(self) -> bool:
        """True when the results are the outputs, in order."""
        numbers = [r.number for r in self.results if r.origin == _Origin.OUTPUT and r.view is None]
        return numbers == list(range(len(self.results))) and len(self.outputs) == len(self.results)

    def returns_parameter(self, parameter: Tensor) -> bool:
        """True when a result is ``parameter`` [...] or a differentiable view of it."""
        outside = (result.tensor for result in self.results if result.tensor is not None)
        return any(t.requires_grad and storage_key(t) == storage_key(parameter) for t in outside)

    def returns_input(self, number: int) -> bool:
        """True when a result is input ``number`` or a view of it."""
        return any(result.origin == _Origin.INPUT and result.number == number for result in self.results)


class _Planner:
    """Finds where each of ``results`` lies, and which outputs they need; ``results`` and ``inputs`` are [...] each."""

    def __init__(self, results: list[Tensor], inputs: list[Tensor], watch: TensorWatch) -> None:
        self.outputs: list[Output] = []
        self._results = results
        self._inputs = inputs
        self._watch = watch
        self._overlapping = _overlapping(results)

    def result_of(self, number: int) -> Result:
        """Where result ``number`` comes from; adds an output where it needs a new one."""
        tensor = self._results[number]
        is_cloned = False
        for index, given in enumerate(self._inputs):
            if storage_key(given) == storage_key(tensor):
                if (found := _as_view(tensor, given)) is not None:
                    return Result(_Origin.INPUT, index, view=found.view)
                is_cloned = True
        if not is_cloned and storage_key(tensor) not in self._watch.produced_storages:
            outside = tensor._base if tensor._is_view() else tensor
            self._watch.note_use(outside)
            if outside.grad_fn is None and _as_view(tensor, outside) is not None:
                return Result(_Origin.EXTERNAL, tensor=tensor)
            is_cloned = True
        if not is_cloned and number in self._overlapping and tensor._is_view():
            base = tensor._base
            if _C.View.is_differentiable(tensor, base):
                return Result(_Origin.OUTPUT, self._output(number, base), view=_C.View(tensor, base))
        return Result(_Origin.OUTPUT, self._output(number, tensor, is_cloned))

    def _output(self, number: int, tensor: Tensor, is_cloned: bool = False) -> int:
        """The number of the output that is ``tensor`` [...], which result ``number`` is or is a view of."""
        first = next((i for i, result in enumerate(self._results) if result is tensor), None)
        output = Output(number, is_base=True) if first is None else Output(first, is_cloned=is_cloned)
        for index, known in enumerate(self.outputs):
            if known == output or (output.is_base and known.is_base and self._results[known.result]._base is tensor):
                return index
        self.outputs.append(output)
        return len(self.outputs) - 1


@contextlib.contextmanager
def views_kept() -> Iterator[None]:
    """Let view operators keep how they can be done again on another base."""
    was_on = torch._C._is_view_replay_enabled()
    torch._C._set_view_replay_enabled(True)
    try:
        yield
    finally:
        torch._C._set_view_replay_enabled(was_on)


def inner_outputs(outputs: list[Tensor]) -> list[bool]:
    """For each differentiable output [...], whether another one is computed from it."""
    ends = {(output.grad_fn, output.output_nr): number for number, output in enumerate(outputs) if output.grad_fn}
    is_inner, seen, stack = [False] * len(outputs), set(), [fn for fn, _ in ends]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for edge in node.next_functions:
            if edge[0] is not None:
                stack.append(edge[0])
            if edge in ends:
                is_inner[ends[edge]] = True
    return is_inner


@dataclass(frozen=True)
class _Found:
    """What a tensor is of a base: ``view`` of it, or, where that is None, the base itself."""

    view: Any


def _as_view(tensor: Tensor, base: Tensor) -> _Found | None:
    """What ``tensor`` [...] is of ``base`` [...], whose memory it shares; None when that is unknown."""
    if tensor is base:
        return _Found(None)
    if tensor._backward_hooks:  # of the callable's own: they belong into the graph
        return None
    return _Found(_C.View(tensor, base)) if _C.View.is_possible(tensor, base) else None


def _overlapping(results: list[Tensor]) -> set[int]:
    """Numbers of the differentiable results, [...] each, that share elements with another one."""
    groups: dict[int, list[int]] = {}
    for number, tensor in enumerate(results):
        if tensor.requires_grad and tensor.numel():
            groups.setdefault(storage_key(tensor), []).append(number)
    found: set[int] = set()
    for numbers in groups.values():
        for one, other in itertools.combinations(numbers, 2):
            if results[one] is not results[other] and _overlap(results[one], results[other]):
                found |= {one, other}
    return found


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two views [...] of one storage share an element."""
    if one.dtype != other.dtype:
        return True
    with bypass_modes(), torch.no_grad():
        count = one.untyped_storage().nbytes() // one.element_size()
        marks = torch.zeros(count, dtype=torch.bool, device="cpu")
        marks.as_strided(one.size(), one.stride(), one.storage_offset()).fill_(True)
        return bool(marks.as_strided(other.size(), other.stride(), other.storage_offset()).any())
