"""Gradients that lie in flat buffers, for functions that take parameters."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class OwnGradients(NamedTuple):
    """What a rank has of the gradients of many parameters.

    Attributes:
        tensors: [n] each, all of it; what is missing as zeros.
        counted: [n] each, of these, what no other rank of ``groups`` counts in a norm, perhaps with zeros between.
        groups: the groups of which other ranks have the rest.
        beside: parameters [...] each, whose ``.grad``, if they have one, is clipped together with these.
    """

    tensors: list[Tensor]
    counted: list[Tensor]
    groups: Sequence[ProcessGroup]
    beside: Sequence[Tensor] = ()


class GradientParts(abc.ABC):
    """What has the gradients of many parameters in a few tensors, and perhaps not all of them on this rank."""

    @abc.abstractmethod
    def gradient_parts(self) -> AbstractContextManager[OwnGradients]:
        """While the context is open they may be read and changed there."""
