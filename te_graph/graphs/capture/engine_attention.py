"""Attention of TransformerEngine with a cuDNN that is wrong in graphs.

By name, because TransformerEngine need not be there, nor be imported to find out.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

_KERNELS = "transformer_engine_torch"
# Whoever captured it, its backward reads wrong memory in a replay. 9.15 mended that.
_WRONG = range(91300, 91500)


def refuse_wrong_attention(label: str, modules: Iterable[Any]) -> None:
    """Refuse to capture ``modules`` if one is TransformerEngine's attention and may run on such a cuDNN.

    Raises:
        RuntimeError: it may; says what to do.
    """
    kernels = sys.modules.get(_KERNELS)
    if kernels is None or os.environ.get("NVTE_FUSED_ATTN", "1") == "0" or not any(map(_is_attention, modules)):
        return
    version = kernels.get_cudnn_version()
    if version in _WRONG:
        raise RuntimeError(
            f"{label}: TransformerEngine runs its attention on cuDNN {version // 10000}.{version % 10000 // 100}, "
            "whose backward gives wrong gradients in CUDA graphs: let it load cuDNN 9.15 or newer (CUDNN_HOME names "
            "the folder; torch brings one), or set NVTE_FUSED_ATTN=0"
        )


def _is_attention(module: Any) -> bool:
    kind = type(module)
    return kind.__name__ == "DotProductAttention" and kind.__module__.startswith("transformer_engine.")
