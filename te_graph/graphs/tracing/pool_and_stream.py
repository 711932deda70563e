"""The arguments ``pool`` and ``stream`` of captures, checked."""

from __future__ import annotations

from typing import Any

import torch


def check_pool(name: str, pool: Any) -> None:
    """Raise TypeError, in the name of the function ``name``, unless ``pool`` is None or names a memory pool."""
    if pool is not None and not (isinstance(pool, tuple) and [type(part) for part in pool] == [int, int]):
        raise TypeError(
            f"{name}: expected pool to be what torch.cuda.graph_pool_handle() returns (or the id of a "
            f"torch.cuda.MemPool), got {type(pool).__name__}"
        )


def check_stream(name: str, stream: Any) -> None:
    """Raise TypeError, in the name of the function ``name``, unless ``stream`` is None or a CUDA stream."""
    if stream is not None and not isinstance(stream, torch.cuda.Stream):
        raise TypeError(f"{name}: expected stream to be a torch.cuda.Stream, got {type(stream).__name__}")
