"""Modules that were given a state, and what keeps the marks of their weights right until it is used."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from te_graph import _C
from te_graph.common.own_objects import OwnObject
from te_graph.fp8.fp8_module import FP8Module
from te_graph.fp8.marked_state import MarkedState
from te_graph.fp8.optimizer_step_watch import optimizer_step_watch
from te_graph.fp8.weight_mark import is_marked, mark_of_plain, plain_weight

if TYPE_CHECKING:
    from te_graph.fp8.member import Member


class LoadedModules(OwnObject):
    """Those of this process. Steps of optimizers move the versions of their weights, as of those that are cast."""

    def __init__(self) -> None:
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._lock = threading.RLock()  # of that set
        optimizer_step_watch().watch(self)

    @property
    def weights(self) -> list[Tensor]:
        """[out, in] each, of the modules that are in no scope yet, which would see to it."""
        held = (plain_weight(module) for module in self._present() if module.loaded_state is not None)
        return [weight for weight in held if weight is not None]

    def add(self, module: nn.Module) -> None:
        """``module`` has been given a state."""
        with self._lock:
            self._modules.add(module)

    def discard(self, module: nn.Module) -> None:
        """``module`` has no state any more."""
        with self._lock:
            self._modules.discard(module)

    def _present(self) -> list[Any]:
        """Those that compute in FP8 still: others may have given a module back its former class."""
        with self._lock:
            modules = list(self._modules)
        return [module for module in modules if hasattr(type(module), "loaded_state")]

    @contextlib.contextmanager
    def marks_kept_over_copy(self, weight: Tensor | None, source: Any) -> Iterator[None]:
        """Around a copy from ``source`` [out, in] into ``weight`` [out, in]. Tied layers load it several times:
        where that changes nothing, their marks stay right."""
        same = [module for module in self._present() if weight is not None and plain_weight(module) is weight]
        marked = {module: marked_members(module) for module in same if is_marked(recorded_mark_of(module), weight)}
        is_equal = bool(marked) and isinstance(source, Tensor) and are_equal(source, weight)
        yield
        for module, members in marked.items() if is_equal else ():
            mark_again(module, members)


def are_equal(source: Tensor, weight: Tensor) -> bool:
    """Whether both, [out, in], hold the same."""
    is_like = source.shape == weight.shape and source.dtype == weight.dtype and not source.is_meta
    return is_like and torch.equal(source.detach().to(weight.device), weight.detach())


def members_of(module: FP8Module) -> list[Member]:
    """What ``module`` trains and evaluates with, each once."""
    return [member for member in dict.fromkeys((module.fp8, module.fp8_evaluated)) if member is not None]


def untrained_state_of(module: FP8Module) -> MarkedState | None:
    """What ``module`` has loaded, or taken from another scope, if it has recorded nothing since."""
    return module.loaded_state if module.fp8 is None else module.fp8.untrained_state


def recorded_mark_of(module: FP8Module) -> _C.WeightMark | None:
    """Of the weight of ``module`` as it was when its amax was last recorded, here or as a loaded state says."""
    if module.fp8 is not None:
        return module.fp8.known_mark
    return None if module.loaded_state is None else module.loaded_state.mark


def marked_members(module: FP8Module) -> list[Member]:
    """What ``module`` trains and evaluates with, of which the weight is as it was when its amax was recorded."""
    weight = plain_weight(module)
    return [member for member in members_of(module) if is_marked(member.known_mark, weight)]


def mark_again(module: FP8Module, members: Iterable[Member]) -> None:
    """The weight of ``module`` is another tensor, of the same values; ``members`` were marked with the one before."""
    mark = mark_of_plain(plain_weight(module))
    for member in members:
        member.mark_again(mark)
    if module.fp8 is None and module.loaded_state is not None:
        module.loaded_state = MarkedState(module.loaded_state.state, mark)


@functools.cache
def loaded_modules() -> LoadedModules:
    """Those of this process."""
    return LoadedModules()
