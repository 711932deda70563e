"""Gradients that lie in flat buffers, for functions that take parameters."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class GradientParts(abc.ABC):
    """What has the gradients of many parameters in a few tensors, and perhaps not all of them on this rank."""

    @abc.abstractmethod
    def gradient_parts(self) -> AbstractContextManager[tuple[list[Tensor], Sequence[ProcessGroup]]]:
        """While the context is open all gradients of this rank lie in the tensors [n] that it gives, those that are
        missing as zeros, and may be changed there; over the groups lie others."""
