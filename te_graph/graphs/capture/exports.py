"""Addresses of results that leave torch: NumPy, DLPack and the CUDA array interface."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from te_graph import _C


def move_exported_results() -> None:
    """From now on a result of a replay gets memory of its own before its address is handed to another library.

    Results lie in memory that later replays overwrite. A tensor that is held keeps its value, because it is
    moved before; a holder of its address alone would not notice. The entry points of torch that hand out addresses are
    therefore wrapped, when the first callable is captured: ``Tensor.numpy`` (which ``__array__`` calls),
    ``__dlpack__``, ``__cuda_array_interface__`` and ``torch.utils.dlpack.to_dlpack``. ``data_ptr()`` and DLPack's C
    exchange interface are not: an address taken there is valid until the next call of the callable.

    Stream and capture: moving a result copies it on the current stream.
    """
    if getattr(Tensor.__dlpack__, "_te_graph_moves", False):
        return
    Tensor.numpy, Tensor.__dlpack__ = _moving(Tensor.numpy), _moving(Tensor.__dlpack__)
    interface = Tensor.__cuda_array_interface__
    Tensor.__cuda_array_interface__ = property(_moving(interface.fget), doc=interface.__doc__)
    torch.utils.dlpack.to_dlpack = torch.to_dlpack = _moving(torch.utils.dlpack.to_dlpack)


def _moving(export: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(export)
    def moving(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, Tensor) and _C.has_memory(tensor):
            _C.move_if_lent(tensor)
        return export(tensor, *args, **kwargs)

    moving._te_graph_moves = True
    return moving
