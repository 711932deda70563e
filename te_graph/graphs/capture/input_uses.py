"""How the gradients of an input become one that a callable uses several times.

A slot keeps the gradients of all uses apart (csrc/graphs/callables/uses.h), for where others use the input as well.
Those of two uses the gradient table adds up, in the memory of one of them and in the launch that it has anyway, or
leaves apart. Autograd, too, adds in place where the memory has no other owner.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.dispatch import storage_key
from te_graph.graphs.tracing.externals import TensorWatch


class Uses:
    """The uses of the inputs of one backward.

    Args:
        outputs: what it starts from, [...] each.
        inputs: of the callable, [...] each.
        numbers: of those that get a gradient.

    Attributes:
        leaves: what the backward is to compute gradients of, for one use after the other.
        in_table: numbers of the inputs that have entries in the table.
        summed: of each of ``in_table``: its number where the table adds up its gradients; -1 where ``sums`` has.
        sources: of each of ``in_table``: what its entry adds, [...].
        grads_per_use: for each input with several uses the gradients of these, [...] each.
    """

    def __init__(self, outputs: list[Tensor], inputs: list[Tensor], numbers: list[int]) -> None:
        self._numbers = numbers
        self._leaves = [_C.split_uses(outputs, inputs[number]) or [inputs[number]] for number in numbers]
        self.leaves = list(itertools.chain(*self._leaves))
        self.in_table = [
            number
            for number, each in zip(numbers, self._leaves, strict=True)
            if len(each) == 2 and _is_added_by_table(inputs[number].dtype)
        ]
        self.summed: list[int] = []
        self.sources: list[Tensor] = []
        self.grads_per_use: dict[int, list[Tensor]] = {}

    def sums(self, parameter_grads: list[Tensor], grads: list[Tensor | None], births: TensorWatch) -> list[Tensor]:
        """The gradients [...] of the inputs, in their order, where ``grads`` are those of ``leaves``, and
        ``parameter_grads`` the others of the backward that ``births`` has seen."""
        keys = Counter(storage_key(grad) for grad in (*parameter_grads, *grads) if grad is not None)
        own = {key for key, count in keys.items() if count == 1 and key in births.produced_storages}
        following, sums = iter(grads), []
        for number, leaves in zip(self._numbers, self._leaves, strict=True):
            each = [grad for _, grad in zip(leaves, following, strict=False) if grad is not None]
            if len(each) > 1:
                self.grads_per_use[number] = each
            sums.append(self._sum_in_table(number, each, own) if number in self.in_table else _sum(each))
        return sums

    def _sum_in_table(self, number: int, each: list[Tensor], own: set[int]) -> Tensor:
        """The one of ``each`` [...], in memory of its own, that the table adds the other to, or else their sum."""
        is_flat = len(each) == 2 and each[0].stride() == each[1].stride() and all(map(_C.is_dense, each))
        total = next((grad for grad in each if is_flat and storage_key(grad) in own), None)
        if total is None:
            total = _sum(each)
            self.summed.append(-1)
            self.sources.append(total if _C.is_dense(total) else total.contiguous())
        else:
            self.summed.append(number)
            self.sources.append(each[1] if total is each[0] else each[0])
        return total


def _sum(each: list[Tensor]) -> Tensor:
    """Of ``each`` [...], in their order."""
    return functools.reduce(torch.add, each)


def _is_added_by_table(dtype: torch.dtype) -> bool:
    """Torch adds complex numbers otherwise: it multiplies by a complex 1."""
    return not dtype.is_complex and _C.GradientTable.takes(dtype, dtype)
