"""Addresses of results that leave torch: NumPy, DLPack and the CUDA array interface."""

from __future__ import annotations

import functools
import sys
import types
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
    ``__dlpack__``, ``__cuda_array_interface__`` and ``torch.utils.dlpack.to_dlpack``, under every name that a loaded
    module has for them (``from torch.utils.dlpack import to_dlpack``). ``data_ptr()`` and DLPack's C exchange
    interface are not, nor are functions that only a local variable, attribute or container holds: an address taken
    there is valid until the next call of the callable.

    Stream and capture: moving a result copies it on the current stream.
    """
    if getattr(Tensor.__dlpack__, "_te_graph_moves", False):
        return
    exports = (Tensor.numpy, Tensor.__dlpack__, torch.utils.dlpack.to_dlpack)
    moving = {export: _moving(export) for export in exports}
    Tensor.numpy, Tensor.__dlpack__ = moving[Tensor.numpy], moving[Tensor.__dlpack__]
    interface = Tensor.__cuda_array_interface__
    Tensor.__cuda_array_interface__ = property(_moving(interface.fget), doc=interface.__doc__)
    _replace_in_modules(moving)


def _replace_in_modules(replacements: dict[Callable[..., Any], Callable[..., Any]]) -> None:
    """Bind the names that loaded modules have for a key of ``replacements`` to its value."""
    by_id = {id(old): new for old, new in replacements.items()}
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            names = vars(module)
            for name in [name for name, value in list(names.items()) if id(value) in by_id]:
                names[name] = by_id[id(names[name])]


def _moving(export: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(export)
    def moving(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, Tensor) and _C.has_memory(tensor):
            _C.move_if_lent(tensor)
        return export(tensor, *args, **kwargs)

    moving._te_graph_moves = True
    return moving
