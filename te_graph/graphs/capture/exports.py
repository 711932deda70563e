"""Addresses of results that leave torch: NumPy, DLPack and the CUDA array interface."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor

from te_graph import _C
from te_graph.common.loaded_names import replace_in_modules
from te_graph.common.own_objects import OwnObject

_replacing = threading.Lock()


def move_exported_results() -> None:
    """From now on a result of a replay, or a flat gradient, gets memory of its own before its address is handed to
    another library.

    Results lie in memory that later replays overwrite. A tensor that is held keeps its value, because it is moved
    before; a holder of its address alone would not notice. The entry points of torch that hand out addresses are
    therefore wrapped, when the first callable is captured or the first FlatParameters made: ``Tensor.numpy`` (which
    ``__array__`` calls), ``__dlpack__``, ``__cuda_array_interface__`` and ``torch.utils.dlpack.to_dlpack``, under
    every name that a loaded module has for them (``from torch.utils.dlpack import to_dlpack``). ``data_ptr()`` and
    DLPack's C exchange interface are not, nor are functions that only a local variable, attribute or container holds:
    an address taken there is valid until the next call of the callable.

    Stream and capture: moving a result copies it on the current stream.
    """
    with _replacing:  # several threads may capture first callables
        if isinstance(Tensor.__dlpack__, _Moving):
            return
        moving = {one: _Moving(one) for one in (Tensor.numpy, Tensor.__dlpack__, torch.utils.dlpack.to_dlpack)}
        by_id = {id(export): one for export, one in moving.items()}
        Tensor.numpy, Tensor.__dlpack__ = moving[Tensor.numpy], moving[Tensor.__dlpack__]
        interface = Tensor.__cuda_array_interface__
        Tensor.__cuda_array_interface__ = property(_Moving(interface.fget), doc=interface.__doc__)
        replace_in_modules(by_id)


class _Moving(OwnObject):
    """What hands out the address of a tensor, which is moved before.

    Equal to ``export``, for which it stands: tables of functions, such as a tensor subclass has, know it as that.
    """

    def __init__(self, export: Callable[..., Any]) -> None:
        functools.update_wrapper(self, export)

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(tensor, Tensor) and _C.has_memory(tensor):
            _C.move_if_lent(tensor)
        return self.__wrapped__(tensor, *args, **kwargs)

    def __get__(self, tensor: Any, owner: type | None = None) -> Any:
        return self if tensor is None else types.MethodType(self, tensor)

    def __eq__(self, other: object) -> bool:
        return self.__wrapped__ == (other.__wrapped__ if isinstance(other, _Moving) else other)

    def __hash__(self) -> int:
        return hash(self.__wrapped__)
