"""One step of a model, run for real and watched for uses of parameters; afterwards the model is as it was before."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from te_graph.common.capture_lock import capture_lock, watched_call
from te_graph.common.dispatch import is_in_backward, is_leaf, is_strided, storage_key, storages_of
from te_graph.common.gradient_state import gradient_state, main_grad_of
from te_graph.common.kept_state import state_kept
from te_graph.graphs.guards.effects.kept_memory import is_small_array
from te_graph.graphs.guards.effects.random_generators import HostRandom
from te_graph.graphs.guards.effects.rollback import ContainerState
from te_graph.graphs.guards.sources import Source
from te_graph.graphs.layers.held import holders_in, values_held_by
from te_graph.graphs.layers.layer_calls import LayerCalls
from te_graph.graphs.tracing.externals import TensorWatch
from te_graph.graphs.tracing.source_lines import user_site

_NAME = "graph_layers"
_APPLY = torch.autograd.Function.apply.__func__.__code__
_ADVICE = "give what comes before it: the forward, or forward and backward (lambda: loss_fn(model(x), y).backward())"


@dataclass(frozen=True)
class Use:
    """One operator that was given a parameter.

    Attributes:
        inside: the modules that were under way.
        is_cast: the operator casts it to another dtype, as autocast does.
    """

    inside: frozenset[nn.Module]
    is_cast: bool


class StepWatch(TensorWatch):
    """A ``TensorWatch`` of a step that puts back the tensors of a model, and the gradients of other leaves that it
    uses, and no others: what else is written may go with state that the watch does not know, as buckets and maps of
    DistributedDataParallel's reducer do.

    Args:
        model: whose weights, buffers and gradients are put back.
        calls: of its modules.

    Attributes:
        uses: of each parameter that requires a gradient, by identity, in order.
    """

    def __init__(self, model: nn.Module, calls: LayerCalls) -> None:
        super().__init__()
        self._calls = calls
        self._weights = {storage_key(p): name for name, p in model.named_parameters() if is_strided(p)}
        self._parameters = {id(p) for p in model.parameters()}
        grads = (grad for parameter in model.parameters() for grad in _gradients_of(parameter))
        others = (value for value in values_held_by(model) if isinstance(value, Tensor))
        self._kept = {*self._weights, *(key for tensor in (*others, *grads) for key in storages_of(tensor))}
        self._leaves_known = 0  # whose gradients are among these
        self._op = ""
        self.uses: dict[int, list[Use]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._op = str(func)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def keep(self, tensor: Tensor) -> None:
        self._check_change(tensor, self._op)
        self.keep_value(tensor)

    def note_plan(self, writes: Sequence[Tensor]) -> None:
        for tensor in writes:
            self._check_change(tensor, "MultiTensorPlan")
        super().note_plan(writes)

    def note_exchange(self, tensor: Tensor) -> None:
        self._check_change(tensor, "tensor.data = ...")

    def _check_change(self, tensor: Tensor, how: str) -> None:
        """Refuse that ``how`` changes ``tensor`` [...] if that is a weight, outside of forwards."""
        key = storage_key(tensor) if is_strided(tensor) else None
        if key in self._weights and not self._calls.under_way:
            raise RuntimeError(
                f"{_NAME}: the step changes {self._weights[key]} ({how}), and one step before the training begins "
                f"must leave the weights alone: {_ADVICE}; at {user_site()}"
            )

    def keep_value(self, tensor: Tensor) -> None:
        if storage_key(tensor) in self._kept:
            super().keep_value(tensor)

    def keep_grads(self, tensor: Tensor) -> None:
        super().keep_grads(tensor)
        if self._leaves_known == len(self._grads):
            return
        # Of a list: threads of the backward may add others meanwhile.
        seen = [leaf for leaf, _ in list(self._grads.values())[self._leaves_known :]]
        self._leaves_known += len(seen)
        for leaf in filter(is_leaf, seen):
            self._kept.update(key for grad in _gradients_of(leaf) for key in storages_of(grad))

    def _see(self, tensor: Tensor, op: str, keeps: bool | None) -> None:
        is_parameter = id(tensor) in self._parameters and tensor.requires_grad and not is_in_backward()
        # Within an autograd Function gradients are off. It is one use, but may be counted as several.
        if is_parameter and (torch.is_grad_enabled() or _is_given_to_function(tensor)):
            is_cast = op.startswith("aten._to_copy") and torch.is_grad_enabled()
            self.uses.setdefault(id(tensor), []).append(Use(frozenset(self._calls.under_way), is_cast))
        super()._see(tensor, op, keeps)


def _gradients_of(leaf: Tensor) -> list[Tensor]:
    """``grad`` and ``main_grad`` of ``leaf`` [...], of its shape, as far as it has them."""
    grads = (getattr(leaf, name, None) for name in ("grad", "main_grad"))
    return [grad for grad in grads if isinstance(grad, Tensor)]


def _is_given_to_function(tensor: Tensor) -> bool:
    """Whether an autograd Function that is under way got ``tensor`` [...]."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _APPLY and any(one is tensor for one in frame.f_locals["args"]):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def watched(model: nn.Module, calls: LayerCalls) -> Iterator[StepWatch]:
    """Around a step of ``model`` that is watched: generators, weights, buffers, gradients, attributes and scales of FP8
    layers are afterwards as before, whether it raises or not.

    Raises:
        RuntimeError: the step calls an optimizer, or changes weights; it has not changed them.
    """
    watch = StepWatch(model, calls)
    with contextlib.ExitStack() as stack:
        stack.enter_context(capture_lock())
        stack.enter_context(watched_call())
        stack.enter_context(_generators_kept(model))
        stack.enter_context(state_kept())
        stack.callback(watch.restore)
        stack.enter_context(_grads_kept(model))
        stack.callback(watch.restore_grads)
        stack.enter_context(attributes_kept(model))  # of other shapes, weights do not take their gradients back
        stack.callback(torch.clear_autocast_cache)  # whose casts lead to what the step computed
        refuse = functools.partial(_refuse_step, threading.get_ident())
        stack.callback(register_optimizer_step_pre_hook(refuse).remove)
        stack.enter_context(calls)
        stack.enter_context(watch)
        yield watch


@contextlib.contextmanager
def attributes_kept(model: nn.Module, only_on_failure: bool = False) -> Iterator[None]:
    """Put back the attributes of the modules and tensors, what containers and small arrays among these hold, flags and
    hooks of modules and tensors, and where tensors lie.

    Other objects, such as a configuration, keep what a first call sets in them: if that were put back, the next call
    would set it again, after the capture, and guards would find it changed. Hooks that it puts on tensors stay with
    that, unless it fails.
    """
    values = (one for one in values_held_by(model) if isinstance(one, Tensor) or is_small_array(one))
    state = ContainerState(Source(one, "") for one in (*holders_in(model), *values))
    try:
        yield
    except BaseException:
        state.restore()
        raise
    if not only_on_failure:
        state.restore(with_hooks=False)


def _refuse_step(thread: int, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    if threading.get_ident() != thread:  # that of another training
        return
    raise RuntimeError(
        f"{_NAME}: the step calls {type(optimizer).__name__}.step(), and one step before the training begins must "
        f"leave weights and optimizers alone: {_ADVICE}"
    )


@contextlib.contextmanager
def _generators_kept(model: nn.Module) -> Iterator[None]:
    others = HostRandom((Source(value, "") for value in values_held_by(model)), with_torch=True)
    host, has_cuda = torch.get_rng_state(), torch.cuda.is_available() and torch.cuda.is_initialized()
    states = torch.cuda.get_rng_state_all() if has_cuda else []
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if has_cuda:
            torch.cuda.set_rng_state_all(states)
        others.restore()


@contextlib.contextmanager
def _grads_kept(model: nn.Module) -> Iterator[None]:
    """Put back which tensors the gradients are, and whether the next one overwrites ``main_grad``; the watch puts back
    their values."""
    names = ("grad", "main_grad")
    before = [(p, name, vars(p).get(name) if name != "grad" else p.grad) for p in model.parameters() for name in names]
    resets = [gradient_state(p).main_grad_reset for p in model.parameters() if main_grad_of(p) is not None]
    pending = [reset.is_pending for reset in resets]
    try:
        yield
    finally:
        for reset, is_pending in zip(resets, pending, strict=True):
            reset.is_pending = is_pending
        for parameter, name, tensor in before:
            if name == "grad":
                parameter.grad = tensor
            elif tensor is not None:
                parameter.main_grad = tensor
