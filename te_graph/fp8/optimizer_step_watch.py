"""Steps of optimizers, which write parameters without telling autograd where they are fused or go through ``.data``."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from te_graph.common.dispatch import storage_key, storages_of
from te_graph.common.own_objects import OwnObject


class WatchedWeights(Protocol):
    """Gets notice of steps by the version counters of its ``weights``, [...] each."""

    @property
    def weights(self) -> list[Tensor]: ...


class OptimizerStepWatch(OwnObject):
    """Moves on the version counters of watched weights whose storages optimizers step.

    Which parameters have gradients is noted before the step, since a hook may drop them, and again after it, since one
    may bring them. Made once: removing a hook, as the garbage collector would, breaks a step that is calling its hooks.
    """

    def __init__(self) -> None:
        self._watched: weakref.WeakSet[WatchedWeights] = weakref.WeakSet()
        self._lock = threading.RLock()  # of that set
        # Identities alone: a parameter may refer to its optimizer, which would then never be freed.
        self._noted: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[int]] = weakref.WeakKeyDictionary()
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def watch(self, owner: WatchedWeights) -> None:
        """Move on the counters of ``owner.weights`` for as long as it has another owner."""
        with self._lock:
            self._watched.add(owner)

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._watched:
            is_known = not _may_make_gradients(optimizer, args, kwargs)
            parameters = _parameters_of(optimizer)
            self._noted[optimizer] = {id(p) for p in parameters if not is_known or _has_gradient(p)}

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self._watched:
            return
        noted = self._noted.get(optimizer, ())
        stepped = {
            key for p in _parameters_of(optimizer) if id(p) in noted or _has_gradient(p) for key in storages_of(p)
        }
        with self._lock:
            watched = list(self._watched)
        for owner in watched:
            changed = [weight for weight in owner.weights if storage_key(weight) in stepped]
            torch.autograd.graph.increment_version(changed)


@functools.cache
def optimizer_step_watch() -> OptimizerStepWatch:
    """The one of this process."""
    return OptimizerStepWatch()


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _has_gradient(parameter: Tensor) -> bool:
    """Whether ``parameter`` [...] has one of any kind."""
    return parameter.grad is not None or hasattr(parameter, "main_grad")


def _may_make_gradients(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> bool:
    """True where gradients may come after the first hook: from a closure, or from another hook."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first one is the optimizer
    return closure is not None or bool(optimizer._optimizer_step_pre_hooks)
