"""How a forward computes what depends on the values of its arguments, to tell whether two calls did the same."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from te_graph.common.dispatch import is_strided, leaves, storage_key
from te_graph.graphs.guards.plain_values import are_equal, is_value

_RESULTS = "the results"


@dataclass(frozen=True)
class _Operand:
    """A tensor that an operator is given.

    Attributes:
        which: the number of what depends on arguments, or the identity of a storage outside; None for what the call
            makes of neither. Later calls may have kept that.
        layout: how it lies in its storage.
    """

    which: tuple | None
    layout: tuple

    def is_like(self, later: _Operand) -> bool:
        return self.layout == later.layout and self.which in (None, later.which)


@dataclass
class ForwardSteps:
    """The operators of one call that are given what depends on its arguments, in order, with all that they are given.
    Those that only make views are left out: what is computed from a view tells how it lies.

    Attributes:
        is_open: more are added; the call has not returned.
    """

    is_open: bool = True
    _steps: list[tuple[Any, list]] = field(default_factory=list)

    def add(
        self,
        func: torch._ops.OpOverload,
        given: tuple,
        dependent: Mapping[int, int],
        externals: Container[int],
    ) -> None:
        """Add a call of ``func``.

        Args:
            given: its arguments.
            dependent: storages of what depends on the arguments of the forward, and their numbers.
            externals: storages of what lies outside.
        """
        if self.is_open and not func.is_view:
            self._steps.append((func, _operands(given, dependent, externals)))

    def close(self, results: Sequence[Tensor], dependent: Mapping[int, int], externals: Container[int]) -> None:
        """The call has returned ``results`` [...]."""
        if self.is_open:
            self._steps.append((_RESULTS, _operands(results, dependent, externals)))
        self.is_open = False

    def difference(self, later: ForwardSteps) -> str | None:
        """The first operator that a ``later`` call has not called in the same way; None if there is none."""
        for (operator, given), (other, given_later) in zip(self._steps, later._steps, strict=False):
            are_alike = operator == other and len(given) == len(given_later)
            if not (are_alike and all(map(_are_alike, given, given_later))):
                return str(operator)
        return None


def _operands(given: Any, dependent: Mapping[int, int], externals: Container[int]) -> list:
    operands = []
    for leaf in leaves(given):
        if isinstance(leaf, Tensor):
            operands.append(_operand(leaf, dependent, externals))
        else:
            operands.append(leaf if is_value(leaf) else type(leaf))
    return operands


def _operand(tensor: Tensor, dependent: Mapping[int, int], externals: Container[int]) -> _Operand:
    if not is_strided(tensor):
        return _Operand(None, (tensor.dtype, tensor.shape, tensor.layout))
    key = storage_key(tensor)
    number = dependent.get(key)
    which = ("number", number) if number is not None else ("outside", key) if key in externals else None
    return _Operand(which, (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()))


def _are_alike(one: Any, later: Any) -> bool:
    if isinstance(one, _Operand) and isinstance(later, _Operand):
        return one.is_like(later)
    return are_equal(one, later)
