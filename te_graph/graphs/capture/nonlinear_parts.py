"""Parts of a backward that some results alone lead to, and that a gradient of zeros does not keep from having effects.

A callable has one backward graph for all its results, which gets zeros for those without a gradient. Eager execution
passes by what only these lead to. That is the same where zeros become zeros, as in all backwards of torch's own. It is
not in an autograd Function that adds the gradient of an auxiliary loss, where a hook or a checkpoint writes a buffer,
or where random numbers are drawn.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_graph.common.dispatch import bypass_modes, has_subclass, is_strided, storage_key
from te_graph.graphs.guards.build_guard import own_tensors_of_modules
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.tracing.externals import TensorWatch

_ACCUMULATION = "torch::autograd::AccumulateGrad"
_DRAWS = "draws random numbers"
_WRITES = "writes a tensor outside"
_IS_NOT_ZERO = "makes other gradients than zeros of zeros"


@dataclass(frozen=True)
class NonlinearPart:
    """A part of a backward.

    Attributes:
        outputs: for each differentiable output, whether its gradient leads there.
        does: what it does, and where, in words.
    """

    outputs: tuple[bool, ...]
    does: str


class NonlinearParts:
    """Context of a backward, with zeros for all gradients, that finds what not all results lead to.

    Args:
        outputs: what the backward starts from, [...] each.
        sources: where the callable can get to.
        device: of the callable.
        watch: sees the backward.

    Attributes:
        found: one for each set of outputs.
    """

    def __init__(
        self, outputs: Sequence[Tensor], sources: list[Source], device: torch.device, watch: TensorWatch
    ) -> None:
        self.found: list[NonlinearPart] = []
        self._outputs, self._sources = outputs, sources
        self._own: set[int] = set()  # storages of te_graph's: amaxes, which zeros leave as they are
        self._watch = watch
        self._generator = (
            torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
        )
        self._reached_from: dict[Any, tuple[bool, ...]] = {}
        self._given_others: set[Any] = set()  # nodes that got what is not zero
        self._seen: tuple[int, Tensor] = (0, torch.empty(0))
        self._hooks: list[Any] = []

    def __enter__(self) -> NonlinearParts:
        below = [set(_nodes_below(output)) for output in self._outputs]
        nodes = dict.fromkeys(node for each in below for node in each)
        self._reached_from = {node: tuple(node in each for each in below) for node in nodes}
        if all(map(all, self._reached_from.values())):
            return self
        self._own = {storage_key(source.obj) for source in own_tensors_of_modules(self._sources)}
        for node in nodes:
            if node.name() != _ACCUMULATION:
                # The last of those that are there: what they do has been done.
                self._hooks.append(node.register_prehook(functools.partial(self._before, node)))
                self._hooks.append(node.register_hook(functools.partial(self._after, node)))
        self._seen = self._state()
        return self

    def __exit__(self, *failure: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._outputs, self._sources, self._hooks = [], [], []
        self._reached_from, self._given_others = {}, set()

    def _before(self, node: Any, grads: Sequence[Tensor | None]) -> None:
        """``node`` is about to be given ``grads`` [...]; hooks have been called."""
        where = f"a hook before {node.name()}"
        self._note_effects(node, where)
        if not all(self._reached_from[node]) and any(map(_is_not_zero, grads)):
            if node not in self._given_others:
                self._add(node, _IS_NOT_ZERO, where)
            self._given_others.add(node)

    def _after(self, node: Any, grads: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        """``node`` was ``given`` gradients and made ``grads``, [...] each."""
        self._note_effects(node, node.name())
        if all(self._reached_from[node]):
            return
        for grad, (following, _) in zip(grads, node.next_functions, strict=True):
            if not _is_not_zero(grad):
                continue
            # Where a derivative of torch's own is infinite, zero times that is NaN.
            if node not in self._given_others and (_is_python(node) or _is_finite_somewhere(grad)):
                self._add(node, _IS_NOT_ZERO, node.name())
            self._given_others.add(following)

    def _note_effects(self, node: Any, where: str) -> None:
        """Of what ran since the last look."""
        (writes, drawn), self._seen = self._seen, self._state()
        if writes != self._seen[0]:
            self._add(node, _WRITES, where)
        with bypass_modes():
            if not torch.equal(drawn, self._seen[1]):
                self._add(node, _DRAWS, where)

    def _state(self) -> tuple[int, Tensor]:
        """How often tensors outside were written, and the state of the generator, uint8 [size]."""
        own = sum(self._watch.writes[key] for key in self._own)
        with bypass_modes():
            return self._watch.writes.total() - own, self._generator.get_state()

    def _add(self, node: Any, does: str, where: str) -> None:
        outputs = self._reached_from[node]
        if not all(outputs) and all(part.outputs != outputs for part in self.found):
            self.found.append(NonlinearPart(outputs, f"{does} ({where})"))


def _nodes_below(output: Tensor) -> Iterator[Any]:
    """The nodes of the autograd graph of ``output`` [...], each once."""
    stack = [] if output.grad_fn is None else [output.grad_fn]
    seen = set(stack)
    while stack:
        yield (node := stack.pop())
        following = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= following
        stack.extend(following)


def _is_python(node: Any) -> bool:
    return isinstance(node, torch._C._FunctionBase)


def _is_not_zero(grad: Tensor | None) -> bool:  # [...]
    """Whether an element of ``grad`` is not zero, where it has any of its own."""
    if grad is None or not is_strided(grad) or grad.is_meta or has_subclass([type(grad)]):
        return False
    with bypass_modes(), torch.no_grad():
        return bool((grad != 0).any())


def _is_finite_somewhere(grad: Tensor) -> bool:  # [...]
    with bypass_modes(), torch.no_grad():
        return bool(((grad != 0) & grad.isfinite()).any())
