"""The options of make_graphed_callables: what a capture is like, and what calls do that a graph does not fit."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from te_graph.graphs.tracing.backends import ERROR_MODES
from te_graph.graphs.tracing.pool_and_stream import check_pool

_NAME = "make_graphed_callables"
_CHOICES = {
    "capture_error_mode": ERROR_MODES,
    "hooks": ("refuse", "captured"),
    "on_mismatch": ("raise", "eager", "capture"),
    "on_exhausted": ("raise", "eager"),
    "externals": ("refuse", "keep"),
}
_MINIMA = {"num_warmup_iters": 0, "max_in_flight": 1, "max_captures": 1}


@dataclass(frozen=True)
class Options:
    """As documented in ``make_graphed_callables``. Checked when made.

    Raises:
        TypeError, ValueError: an option is wrong; names it, what was expected and what came.
    """

    num_warmup_iters: int = 3
    allow_unused_input: bool = False
    pool: Any = None
    capture_error_mode: str = "thread_local"
    max_in_flight: int = 1
    chain: bool = False
    accumulate_grads: bool = True
    autograd_params: tuple[weakref.ref[Tensor], ...] = ()
    grad_dtype: torch.dtype | None = None
    hooks: str = "refuse"
    on_mismatch: str = "raise"
    on_exhausted: str = "raise"
    max_captures: int = 8
    show_progress: bool | None = None
    ignore_attributes: tuple[str, ...] = ()
    externals: str = "refuse"

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{_NAME}: expected {name} in {allowed}, got {getattr(self, name)!r}")
        for name, least in _MINIMA.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{_NAME}: expected {name} to be an int, got {type(value).__name__}")
            if value < least:
                raise ValueError(f"{_NAME}: expected {name} >= {least}, got {value}")
        for name in ("allow_unused_input", "accumulate_grads", "chain"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{_NAME}: expected {name} to be a bool, got {type(getattr(self, name)).__name__}")
        if self.show_progress is not None and not isinstance(self.show_progress, bool):
            kind = type(self.show_progress).__name__
            raise TypeError(f"{_NAME}: expected show_progress to be a bool or None, got {kind}")
        check_pool(_NAME, self.pool)
        names = self.ignore_attributes
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"{_NAME}: expected ignore_attributes to be a tuple of names, got {names!r}")
        if self.grad_dtype is not None and not (
            isinstance(self.grad_dtype, torch.dtype) and self.grad_dtype.is_floating_point
        ):
            raise TypeError(f"{_NAME}: expected grad_dtype to be a floating point torch.dtype, got {self.grad_dtype!r}")

    def is_for_autograd(self, parameter: Tensor) -> bool:
        """True when the gradient of ``parameter`` [...] is to go through autograd."""
        return not self.accumulate_grads or any(reference() is parameter for reference in self.autograd_params)


def chosen_parameters(callables: Any, chosen: Any) -> tuple[weakref.ref[Tensor], ...]:
    """The parameters of ``callables`` that ``chosen`` names, by reference or as in ``named_parameters()``.

    The references do not keep them alive: options live as long as any of the callables.

    Raises:
        TypeError, ValueError: one is not a parameter, or not one of theirs.
    """
    if isinstance(chosen, Tensor | str) or not isinstance(chosen, Iterable):
        raise TypeError(f"{_NAME}: expected autograd_params to be several parameters, got {type(chosen).__name__}")
    each = callables if isinstance(callables, tuple) else (callables,)
    modules = [target for target in each if isinstance(target, nn.Module)]
    named = [(name, parameter) for module in modules for name, parameter in module.named_parameters()]
    found: list[Tensor] = []
    for position, one in enumerate(chosen):
        if isinstance(one, str):
            parameters = [parameter for name, parameter in named if name == one]
            what = repr(one)
        elif isinstance(one, Tensor) and one.is_leaf:
            # Those of functions are not known yet.
            may_be_theirs = len(modules) < len(each) or any(one is parameter for _, parameter in named)
            parameters = [one] if may_be_theirs else []
            what = f"one of shape {list(one.shape)}"
        else:
            kind = "a computed tensor" if isinstance(one, Tensor) else type(one).__name__
            raise TypeError(f"{_NAME}: expected autograd_params[{position}] to be a parameter or its name, got {kind}")
        if not parameters:
            raise ValueError(
                f"{_NAME}: expected autograd_params[{position}] to be a parameter of the callables, got {what}"
            )
        found += parameters
    return tuple(weakref.ref(parameter) for parameter in found)
