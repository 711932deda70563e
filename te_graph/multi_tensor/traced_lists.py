"""Lists of tensors as torch.compile traces them: their operators, one call each, in place of the lists of C++."""

from __future__ import annotations

import torch
from torch import Tensor

from te_graph import _C


class TracedList:
    """A ``_C.TensorList`` in a function that is compiled. The operators check what they are given when they run.

    Attributes:
        tensors: [...] each, of one device.
    """

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def has_double(self) -> bool:
        return any(tensor.dtype == torch.float64 for tensor in self.tensors)

    def check_not_followed(self, op: str) -> None:
        """The operators do."""

    def norm(self, p: float) -> Tensor:
        """[]."""
        return torch.ops.te_graph.multi_tensor_norm(self.tensors, p)

    def norm_partial(self, p: float) -> Tensor:
        """[72] int64."""
        return torch.ops.te_graph.multi_tensor_norm_partial(self.tensors, p)

    def clip_(self, total_norm: Tensor, max_norm: float, eps: float, found_inf: Tensor | None) -> None:
        """``total_norm``, ``found_inf``: [] or [1]."""
        torch.ops.te_graph.multi_tensor_clip_(self.tensors, total_norm, max_norm, eps=eps, found_inf=found_inf)

    def zero_(self) -> None:
        """All elements."""
        torch.ops.te_graph.multi_tensor_zero_(self.tensors)

    def accumulate_(
        self,
        sources: TracedList,
        store: bool,
        zero_source: bool,
        sum_squares: Tensor | None,  # [72]
        found_inf: Tensor | None,  # [] or [1]
        noop: Tensor | None,  # [] or [1]
    ) -> None:
        """``sources``: one for each."""
        torch.ops.te_graph.multi_tensor_accumulate_(
            self.tensors,
            sources.tensors,
            store=store,
            zero_source=zero_source,
            sum_squares=sum_squares,
            found_inf=found_inf,
            noop=noop,
        )


def list_of(tensors: list[Tensor]) -> _C.TensorList | TracedList:
    """``tensors``, [...] each, of one device, for the operators."""
    return TracedList(tensors) if torch.compiler.is_compiling() else _C.TensorList(tensors)
