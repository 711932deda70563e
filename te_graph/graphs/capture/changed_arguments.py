"""Arguments that a callable changes in place, such as ``nn.ReLU(inplace=True)`` as its first module does.

The graph changes a copy of its own, which becomes a further result. After a replay the caller's tensor is given the
values and the history of that result, as in eager execution.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.dispatch import storage_key
from te_graph.graphs.capture.layout import may_overlap


class ChangedInputs:
    """Finds, in the first run of a callable, which inputs it changes.

    Attributes:
        numbers: of those inputs; None until the first run.
        rewritten: of those whose history it changes as well.
        views: (number of the result, of the input, what it is of that) of results that are views of changed inputs.
    """

    def __init__(self) -> None:
        self.numbers: tuple[int, ...] | None = None
        self.rewritten: set[int] = set()
        self.views: list[tuple[int, int, _C.View]] = []

    def given(self, inputs: list[Tensor]) -> list[Tensor]:
        """What the callable is to be called with for ``inputs`` [...]: copies of those that it may change."""
        return [
            _copy_of(tensor) if self.numbers is None or number in self.numbers else tensor
            for number, tensor in enumerate(inputs)
        ]

    def results(self, inputs: list[Tensor], given: list[Tensor]) -> tuple[Tensor, ...]:
        """What has become of those that the callable has changed, [...] each, after it was called with ``given``."""
        if self.numbers is None:
            self.numbers = tuple(number for number, tensor in enumerate(given) if tensor._version > 0)
        # What was changed behind autograd's back keeps the history that the caller's tensor has.
        self.rewritten = {number for number in self.numbers if not _is_copy(given[number], inputs[number])}
        has_own_history = {n for n in self.numbers if n in self.rewritten or given[n].grad_fn is None}
        return tuple(given[n] if n in has_own_history else given[n].detach() for n in self.numbers)

    def find_views(
        self, label: str, names: list[str], results: list[Tensor], copies: list[Tensor], hidden: Collection[int]
    ) -> None:
        """Find which of ``results`` [...] are views of ``copies`` [...] of changed inputs, and not these themselves, as
        those with the numbers ``hidden`` are.

        Raises:
            RuntimeError: one shares memory with a copy in a way that cannot be found again in the caller's tensor.
        """
        for number, result in enumerate(results):
            for changed, copy in zip(self.numbers, copies, strict=True):
                if number in hidden or result is copy or storage_key(result) != storage_key(copy):
                    continue
                if not _C.View.is_possible(result, copy):
                    raise RuntimeError(
                        f"{label}: result {number} shares memory with {names[changed]}, which the callable changes in "
                        "place: return a clone"
                    )
                self.views.append((number, changed, _C.View(result, copy)))


def _copy_of(tensor: Tensor) -> Tensor:
    """A copy of ``tensor`` [...] with its history."""
    copy = tensor.clone()
    return copy if copy.requires_grad == tensor.requires_grad else copy.requires_grad_()


def _is_copy(given: Tensor, original: Tensor) -> bool:
    """True when ``given`` [...] has no other history than that it was copied from ``original`` [...]."""
    if given.grad_fn is None or not original.requires_grad:
        return given.grad_fn is None
    (node, _), *others = given.grad_fn.next_functions
    return given.grad_fn.name() == "CloneBackward0" and not others and getattr(node, "variable", None) is original


@dataclass(frozen=True)
class ChangedArguments:
    """The arguments that a captured callable changes.

    Attributes:
        label: what messages call it.
        places: for each, the number of its tensor, and of the result that it becomes.
        rewritten: the former of those that get the history of that result.
        names: of all tensors among the arguments.
        others: addresses of the memory of the tensors that the capture uses besides.
        views: as of ``ChangedInputs``.
        inner: numbers of those from which the graph computes a result, so that part of their gradient stays inside.
    """

    label: str
    places: tuple[tuple[int, int], ...]
    rewritten: frozenset[int]
    names: list[str]
    others: frozenset[int]
    views: tuple[tuple[int, int, _C.View], ...]
    inner: frozenset[int]

    @classmethod
    def of(
        cls,
        label: str,
        inputs: ChangedInputs,
        results: list[int],
        names: list[str],
        externals: Iterable[Tensor],
        inner_results: Collection[int],
    ) -> ChangedArguments | None:
        """Of a capture with ``externals`` [...], the results with the numbers ``results`` being what its ``inputs``
        become; None where it changes none. ``inner_results``: those from which another one is computed."""
        if not inputs.numbers:
            return None
        others = frozenset(tensor.untyped_storage().data_ptr() for tensor in externals)
        places = tuple(zip(inputs.numbers, results, strict=True))
        inner = frozenset(number for number, result in places if number in inputs.rewritten and result in inner_results)
        return cls(label, places, frozenset(inputs.rewritten), names, others, tuple(inputs.views), inner)

    def obstacle(self, tensors: list[Tensor]) -> str | None:
        """Why a replay with ``tensors`` [...] would be wrong: what is changed is part of something else, or lies in the
        same memory several times; or None.

        Raises:
            RuntimeError: one is a leaf that requires a gradient, or a view of one, as eager execution does.
        """
        try:
            addresses = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        except NotImplementedError:  # sparse, or of a transform of torch.func: the replay refuses it and says why
            return None
        for number, _ in self.places:
            tensor, name = tensors[number], self.names[number]
            leaf = tensor._base if tensor._is_view() else tensor
            if number in self.rewritten and leaf.requires_grad and leaf.is_leaf:
                what = "a leaf Variable" if leaf is tensor else "a view of a leaf Variable"
                raise RuntimeError(
                    f"{what} that requires grad is being used in an in-place operation: {name} is changed by the call"
                )
            if tensor.numel() and (addresses.count(addresses[number]) > 1 or addresses[number] in self.others):
                return f"{name}, which the call changes in place, shares memory with something else that it uses"
            if may_overlap(tensor):
                return f"{name}, which the call changes in place, has elements that share memory (expand, unfold)"
            if tensor.retains_grad:  # the gradient inside the graph would not reach it
                return f"{name}, which the call changes in place, retains its gradient"
        return None

    def write(self, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        """Let ``tensors`` [...] of the caller become what the replay made of them, and be results where they are.

        Mutates those of ``tensors`` that the callable changes, and the list ``outputs`` [...].
        """
        for number, output in self.places:
            tensor = tensors[number]
            if number in self.rewritten and not tensor._is_view():
                _Become.apply(tensor, outputs[output])
            else:  # autograd's own copy is what goes on with the history of the whole that a view is part of
                with torch.set_grad_enabled(number in self.rewritten):
                    tensor.copy_(outputs[output])
            if number in self.inner:
                for looked_at in (tensor, tensor._base) if tensor._is_view() else (tensor,):
                    _C.refuse_observers(looked_at, f"{self.label}: {self.names[number]}")
            outputs[output] = tensor
        for output, number, view in self.views:
            outputs[output] = view.of(tensors[number])


class _Become(torch.autograd.Function):
    """tensor := value, with the history of the value alone."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:  # [...] each, of one shape and dtype
        ctx.mark_dirty(tensor)
        return tensor.copy_(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad
