"""Gradients of views of a flat parameter, summed where the gradient of that lies, without a concat."""

from __future__ import annotations

import collections
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from te_graph import _C
from te_graph.flat.flattened_group import FlattenedGroup

_pending: weakref.WeakSet[ViewGradients] = weakref.WeakSet()
_due: dict[int, list[ViewGradients]] = {}  # what is handed over when all of a backward has ended, by its task


class ViewGradients:
    """Sums the gradients of the views of one flat parameter over backwards, and hands the sum over to it.

    Each view is a leaf. Its gradient, summed over its uses in one backward, is taken before autograd accumulates it:
    first stored in the view's part of a buffer, then added. The buffer itself becomes the gradient of the flat
    parameter, as if it came out of a backward through a ``split``.

    Attributes:
        flat: the flat parameter, [n].
    """

    def __init__(self, flat: nn.Parameter, group: FlattenedGroup, enter: Callable[[], None]) -> None:
        """
        Args:
            flat: [n].
            group: its parts.
            enter: called in each backward before anything is written.
        """
        self.flat, self._group, self._enter = flat, group, enter
        self._lock = threading.Lock()
        self._forget()
        _refuse_steps_without_gradients()

    def _forget(self) -> None:
        self._memory: Tensor | None = None  # [n], between the first backward and the last
        self._parts: list[Tensor] = []  # [...] of it, like the views
        self._stored: set[int] = set()  # views whose part has been written
        self._reached: set[int] = set()  # ... by the backward under way
        self._passed_over: set[int] = set()  # views that some backward did not reach
        _pending.discard(self)

    @property
    def is_pending(self) -> bool:
        """Whether there are gradients that have not been handed over."""
        return self._memory is not None

    def watch(self, views: Sequence[Tensor]) -> None:
        """Take the gradients of ``views`` [...], which are leaves, from now on."""
        for number, view in enumerate(views):
            # Torch would clear the hook when Python's first one comes, so Python's dictionary is put there before.
            view._backward_hooks = collections.OrderedDict()
            _C.take_gradients(view, functools.partial(_take, weakref.ref(self), number))

    def take(self, number: int, grad: Tensor) -> None:
        """Add ``grad`` [...] of view ``number`` to its part of the buffer."""
        name = self._group.names[number]
        if grad.requires_grad or torch.is_grad_enabled():
            raise RuntimeError(
                f"FlattenParamsWrapper: the gradient of {name} has a graph of its own (create_graph=True), which a sum "
                "in place would lose: pass optimize_backward_concat=False for gradients of gradients"
            )
        if grad.layout != torch.strided:
            raise TypeError(
                f"FlattenParamsWrapper: expected a dense gradient of {name}, got one of layout {grad.layout} "
                "(torch.nn.Embedding: sparse=False)"
            )
        self._enter()
        with self._lock:
            if self._memory is None:
                self._memory = torch.empty_like(self.flat)
                self._parts = self._group.split(self._memory)
                _pending.add(self)
            if number in self._stored:
                self._parts[number].add_(grad)
            else:
                self._parts[number].copy_(grad)
                self._stored.add(number)
            self._reached.add(number)

    def end_backward(self) -> None:
        """Note which views the backward that ends has not reached: the concat has zeros there."""
        with self._lock:
            if self._reached:
                self._passed_over |= set(range(len(self._parts))) - self._reached
                self._reached = set()

    @torch.no_grad()
    def give_away(self) -> Tensor | None:
        """[0], whose derivative is the sum; None: there is none. The buffer is nobody else's from now on."""
        with self._lock:
            memory, parts, stored, passed_over = self._memory, self._parts, self._stored, self._passed_over
            self._forget()
        if memory is None or not self.flat.requires_grad:
            return None
        if never := [part for number, part in enumerate(parts) if number not in stored]:
            torch._foreach_zero_(never)
        # Zeros change but one number, -0.0, wherever among the others they are added.
        if partly := [parts[number] for number in sorted(passed_over & stored)]:
            torch._foreach_add_(partly, 0.0)
        with torch.enable_grad():
            return _Gradient.apply(self.flat, [memory])

    def drop(self) -> None:
        """Forget what has not been handed over."""
        with self._lock:
            self._forget()


class _Gradient(torch.autograd.Function):
    """Has a gradient that was computed before."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, given: list[Tensor]) -> Tensor:  # [n]; [n] in a list -> [0]
        ctx.given = given
        return flat.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:  # [0] -> [n]
        return ctx.given.pop(), None


def hand_over(several: Iterable[ViewGradients]) -> None:
    """Let autograd accumulate the sums into the flat parameters, in one backward, in which their hooks run."""
    results = [result for gradients in several if (result := gradients.give_away()) is not None]
    if results:
        torch.autograd.backward(results, [torch.empty_like(result) for result in results])


def hand_over_at_end(several: Sequence[ViewGradients]) -> None:
    """Called at the end of a backward: ``hand_over`` after all others that are called at its end, together with what
    other wrappers hand over then."""
    task = torch._C._current_graph_task_id()
    if task not in _due:
        _due[task] = []
        torch.autograd.Variable._execution_engine.queue_callback(lambda: hand_over(_due.pop(task)))
    _due[task].extend(several)


def _take(reference: weakref.ref[ViewGradients], number: int, grad: Tensor) -> None:
    """``grad``: [...]."""
    gradients = reference()
    if gradients is not None:
        gradients.take(number, grad)


@functools.cache
def _refuse_steps_without_gradients() -> None:
    """From now on a step of an optimizer raises while gradients of a parameter of its own are pending."""
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    if not _pending:
        return
    pending = {id(gradients.flat) for gradients in list(_pending)}
    if any(id(parameter) in pending for group in optimizer.param_groups for parameter in group["params"]):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: a FlattenParamsWrapper has gradients that its flat parameter has not "
            "got yet: run the last backward outside of no_sync(), or call hand_over_gradients() after it, or "
            "zero_grad() of the wrapper to drop them"
        )
