"""Memory of tensors and arrays that an undone call may have exchanged or written where no operator tells."""

from __future__ import annotations

import array
import ctypes
from typing import Any

import torch
from torch import Tensor

from te_graph.common.dispatch import bypass_modes, has_subclass, is_leaf, is_strided, place_of
from te_graph.graphs.guards.values import np

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_MAX_BYTES = 1 << 20  # as guards compare
_OF_CTYPES = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)
_set_data = Tensor.data.__set__  # whatever stands there while a capture watches


class TensorState:
    """Where a tensor lies, and of a leaf whether it requires a gradient and which hooks it has. Values are none of it.

    Args:
        tensor: [...]. Its memory is kept until this object goes.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._lies_somewhere = is_strided(tensor) and not has_subclass([type(tensor)])
        self._requires_grad: bool | None = None
        self._hooks: dict[str, tuple[dict | None, dict]] = {}
        with bypass_modes(), torch.no_grad():
            if self._lies_somewhere:
                self._alias, self._place = tensor.detach(), place_of(tensor)
            if is_leaf(tensor):
                self._requires_grad = tensor.requires_grad
                tables = {name: getattr(tensor, name) for name in _HOOKS}
                self._hooks = {name: (table, dict(table or {})) for name, table in tables.items()}

    def restore(self, with_hooks: bool = True) -> None:
        """Put it back, without a new version."""
        tensor = self._tensor
        with bypass_modes():
            if self._lies_somewhere and place_of(tensor) != self._place:
                _set_data(tensor, self._alias)
            if self._requires_grad is None or not tensor.is_leaf:
                return
            if tensor.requires_grad != self._requires_grad:
                tensor.requires_grad_(self._requires_grad)
            for name, (table, hooks) in self._hooks.items() if with_hooks else ():
                if table is not None and table != hooks:
                    table.clear()
                    table.update(hooks)
                if getattr(tensor, name) is not table:
                    setattr(tensor, name, table)


class ArrayContents:
    """What a small array of numbers holds.

    Args:
        values: for which ``is_small_array`` is true.
    """

    def __init__(self, values: Any) -> None:
        self.values = values
        self._kept = np.array(values) if _is_of_numpy(values) else _bytes_in(values)[:]

    def has_changed(self) -> bool:
        """Whether it holds something else by now."""
        if isinstance(self.values, memoryview) and not _is_writeable(self.values):
            return True  # released since
        if not _is_of_numpy(self.values):
            return _bytes_in(self.values)[:] != self._kept
        now = np.asarray(self.values)
        return now.shape != self._kept.shape or now.tobytes() != self._kept.tobytes()

    def restore(self, with_hooks: bool = True) -> None:
        """Put it back."""
        if isinstance(self.values, memoryview) and not _is_writeable(self.values):
            return  # released since
        if not _is_of_numpy(self.values):
            _bytes_in(self.values)[:] = self._kept
        elif self.values.flags.writeable and self.values.size == self._kept.size:
            if self.values.shape != self._kept.shape:
                self.values.shape = self._kept.shape
            np.asarray(self.values)[...] = self._kept


def is_small_array(obj: Any) -> bool:
    """Whether ``obj`` is an array, or other memory with numbers, that guards compare, hence is put back."""
    if _is_of_numpy(obj):
        return obj.nbytes <= _MAX_BYTES
    if isinstance(obj, memoryview):
        return _is_writeable(obj) and obj.nbytes <= _MAX_BYTES
    if isinstance(obj, _OF_CTYPES):
        return obj._objects is None and ctypes.sizeof(obj) <= _MAX_BYTES  # else there are pointers in it
    return isinstance(obj, bytearray | array.array) and len(obj) * getattr(obj, "itemsize", 1) <= _MAX_BYTES


def _is_writeable(view: memoryview) -> bool:
    try:
        return not view.readonly and view.c_contiguous
    except ValueError:  # it was released
        return False


def _bytes_in(values: Any) -> Any:
    """What can be read and written at ``[:]``: the array itself, or all bytes of the memory."""
    if isinstance(values, bytearray | array.array):
        return values
    size = values.nbytes if isinstance(values, memoryview) else ctypes.sizeof(values)
    return (ctypes.c_char * size).from_buffer(values)


def _is_of_numpy(obj: Any) -> bool:
    return np is not None and isinstance(obj, np.ndarray)
