"""Forward pre-hooks that compute an attribute of their module from its parameters and buffers, and do nothing else.

torch's ``weight_norm``, ``spectral_norm`` and ``prune`` are made of them. Below the callable they run inside the
capture. What they leave in the module then belongs to the graph: a placeholder stands there. On the callable itself
they run around each replay, like any hook, and what they compute is one more input of the graph.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from te_graph.common.dispatch import version_of
from te_graph.graphs.guards.readers.library_names import names_in_library

# The packages' functions of the same names hide the modules.
_WeightNorm = sys.modules["torch.nn.utils.weight_norm"].WeightNorm
_SpectralNorm = sys.modules["torch.nn.utils.spectral_norm"].SpectralNorm
# Loaded by code that prunes, and not before.
_PRUNE = "torch.nn.utils.prune"
ARGUMENT = "computed by hooks"  # among the keyword arguments of a capture


class ComputedInGraph:
    """Stands where a hook would have left the tensor that it computed: replays leave nothing there."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self) -> RuntimeError:
        return RuntimeError(
            f"te_graph: {self._name} is computed inside a graph, and a replay does not leave it in the module: compute "
            "it from the module's parameters, or call .te_graph.reset() on the graphed callable first"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        raise next(one for one in given if isinstance(one, cls))._refuse()

    def __reduce__(self) -> Any:
        return ComputedInGraph, (self._name,)

    def __repr__(self) -> str:
        return f"<{self._name}, computed inside a graph>"


@dataclass(frozen=True)
class Computed:
    """The attribute ``name`` of a module, which a hook computes."""

    module: weakref.ref[nn.Module]
    name: str

    def get(self) -> Any:
        """What is there; None where nothing is."""
        module = self.module()
        return None if module is None else vars(module).get(self.name)

    def set(self, value: Any) -> None:
        """Leave ``value`` there, if the module is still there and has not got a parameter of this name."""
        module = self.module()
        if module is not None and self.name not in module._parameters:
            vars(module)[self.name] = value

    def mark(self) -> None:
        """Leave a placeholder there."""
        self.set(ComputedInGraph(f"{self.name} of a {type(self.module()).__name__}"))

    def compute(self) -> None:
        """Leave what the hook would compute there, in the place of a placeholder."""
        module = self.module()
        if isinstance(self.get(), ComputedInGraph):
            hook = next((hook for hook in _pure_hooks(module) if _attribute_of(hook) == self.name), None)
            if hook is None:
                del vars(module)[self.name]
            elif _prunes(hook):
                self.set(hook.apply_mask(module))
            elif isinstance(hook, _SpectralNorm):
                self.set(hook.compute_weight(module, do_power_iteration=False))
            else:
                self.set(hook.compute_weight(module))


def is_pure_hook(hook: Any) -> bool:
    """True for hooks that compute one attribute from parameters and buffers."""
    kind = type(hook)
    if kind in (_WeightNorm, _SpectralNorm):
        return True
    if not _prunes(hook):
        return False
    base = sys.modules[_PRUNE].BasePruningMethod
    return kind.__call__ is base.__call__ and kind.apply_mask is base.apply_mask


def settings_of(hook: Any) -> list[str]:
    """Names of the attributes by which a pure ``hook`` computes: those that its methods of torch read at a call."""
    return sorted(vars(hook).keys() & names_in_library(type(hook), frozenset()))


def _prunes(hook: Any) -> bool:
    return _PRUNE in sys.modules and isinstance(hook, sys.modules[_PRUNE].BasePruningMethod)


def computed_by_hooks(module: nn.Module) -> list[Computed]:
    """The attributes of ``module`` itself that pure hooks compute, in their order."""
    return [Computed(weakref.ref(module), name) for name in dict.fromkeys(map(_attribute_of, _pure_hooks(module)))]


def _pure_hooks(module: nn.Module) -> list[Any]:
    return [hook for hook in module._forward_pre_hooks.values() if is_pure_hook(hook)]


def _attribute_of(hook: Any) -> str:
    return hook._tensor_name if _prunes(hook) else hook.name


@contextlib.contextmanager
def taken_away(candidates: list[Computed]) -> Iterator[list[Computed]]:
    """Leave placeholders, at the end, for those of ``candidates`` that were computed inside: what a capture computes
    is not to outlive it. Yields a list that they are put into."""
    before = [one.get() for one in candidates]
    computed: list[Computed] = []
    try:
        yield computed
    finally:
        computed += [one for one, old in zip(candidates, before, strict=True) if one.get() is not old]
        for one in computed:
            one.mark()


@contextlib.contextmanager
def values_of(module: Any, values: tuple[Tensor, ...]) -> Iterator[None]:
    """Let ``values``, [...] each, be what the hooks of ``module`` have computed, in their order."""
    computed = computed_by_hooks(module) if values else []
    before = [one.get() for one in computed]
    try:
        for one, value in zip(computed, values, strict=True):
            one.set(value)
        yield
    finally:
        for one, value in zip(computed, before, strict=True):
            one.set(value)


def current_values(module: Any) -> tuple[Tensor, ...]:
    """What the pure hooks of ``module`` left there before this call, [...] each; empty for what is no module."""
    computed = computed_by_hooks(module) if isinstance(module, nn.Module) and module._forward_pre_hooks else []
    return tuple(one.get() for one in computed)


def sample_values(module: Any) -> tuple[Tensor, ...]:
    """As ``current_values``, computed now; buffers and attributes are afterwards as before."""
    if not isinstance(module, nn.Module) or not _pure_hooks(module):
        return ()
    held = [buffer for buffer in module._buffers.values() if buffer is not None]
    buffers = [(buffer, buffer.detach().clone(), version_of(buffer)) for buffer in held]
    with values_of(module, current_values(module)):
        for hook in _pure_hooks(module):
            hook(module, ())
        values = current_values(module)
    with torch.no_grad():
        for buffer, value, version in buffers:
            if version_of(buffer) != version:  # what was only read may be saved for the backward of the values
                buffer.copy_(value)
    return values
