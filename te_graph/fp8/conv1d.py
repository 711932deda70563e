"""Hugging Face's ``Conv1D``, the linear layer of GPT-2, in FP8.

Its weight is [in, out]. The FP8 copies change places, so that its transposed copy is what ``te_graph.Linear`` has as
the copy of [out, in], and so do the operands of the product that is the weight's gradient.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import Tensor, nn

from te_graph.common.opaque import opaque
from te_graph.fp8.fp8_layer import FP8Layer
from te_graph.fp8.product import product_in_fp8
from te_graph.fp8.tensor_arguments import check_tensors

_HOME, _NAME, _CONVERTED = "transformers.pytorch_utils", "Conv1D", "ConvertedConv1D"


class FP8Conv1D(FP8Layer):
    """What all converted ones are, whichever transformers they are of."""

    __slots__ = ()
    inputs_first = True


def is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` is a ``Conv1D`` of transformers, which is not imported for the question, or of a subclass."""
    return any(kind.__module__ == _HOME and kind.__name__ == _NAME for kind in type(module).__mro__)


def plain_class() -> type[nn.Module]:
    """transformers' ``Conv1D``, which has been imported."""
    return getattr(sys.modules[_HOME], _NAME)


@functools.cache
def converted_class() -> type[nn.Module]:
    """The class of converted ones, made when the first one is needed."""
    base = plain_class()

    class ConvertedConv1D(base, FP8Conv1D):
        """What ``convert_to_fp8`` makes of a ``Conv1D``."""

        __qualname__ = _CONVERTED
        __getstate__, __setstate__, _apply = FP8Layer.__getstate__, FP8Layer.__setstate__, FP8Layer._apply

        @opaque
        def forward(self, x: Tensor) -> Tensor:
            """``y = x W + b``, as of a ``te_graph.Linear`` with W^T; its gradient is [in, out] and adds up in place.

            A GPU may add up that gradient by another kernel than that of W^T, and so in another order.

            Args:
                x: [..., in], of the weight's dtype, or any that ``torch.autocast`` casts. Not mutated.

            Returns:
                [..., out], new.

            Raises:
                TypeError, ValueError, RuntimeError: as of ``te_graph.Linear``.

            Stream and capture: as of ``te_graph.Linear``.
            """
            try:
                y = product_in_fp8(self, x, self.weight, self.bias)
                return super().forward(x) if y is None else y
            except (TypeError, AttributeError):
                check_tensors(_CONVERTED, x=x)
                raise

    return ConvertedConv1D


def __getattr__(name: str) -> Any:
    """The class by its name, for ``torch.load`` and ``pickle`` of whole models."""
    if name != _CONVERTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import transformers.pytorch_utils  # noqa: F401 -- only where a model with such a layer is loaded

    return converted_class()
