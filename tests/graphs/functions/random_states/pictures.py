"""Pictures of Python state: two are equal where code could not tell the one state from the other."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NUMBERS = (types.NoneType, bool, int, float, complex, str, bytes, np.generic)
_BY_VALUE = (*_NUMBERS, type, range, slice, torch.dtype, types.ModuleType, types.BuiltinFunctionType)


def picture(root: Any) -> Any:
    """Nested tuples of what ``root`` leads to. What may be changed has a number, by which it is named where it is met
    again; tuples, partials, functions and read-only mappings are told apart by what they hold alone."""
    return _Painter().of(root)


class _Painter:
    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._memories: dict[int, int] = {}  # of arrays
        self._kept: list[Any] = []  # so that no other object gets the identity of one that was met

    def of(self, obj: Any) -> Any:
        kind = type(obj).__name__
        if isinstance(obj, _BY_VALUE):
            return kind, repr(obj)
        if isinstance(obj, tuple | partial | types.FunctionType | types.MappingProxyType):
            return kind, *self._parts(obj)
        if id(obj) in self._numbers:
            return "again", self._numbers[id(obj)]
        return kind, self._number_of(obj, self._numbers), *self._parts(obj)

    def _number_of(self, obj: Any, numbers: dict[int, int]) -> int:
        self._kept.append(obj)
        return numbers.setdefault(id(obj), len(numbers))

    def _parts(self, obj: Any) -> Iterator[Any]:
        """What ``obj`` holds."""
        if isinstance(obj, Tensor):
            yield from _facts(obj)
            yield self.of(obj.grad) if obj.is_leaf else None
        elif isinstance(obj, np.ndarray):
            # Which arrays share memory, not whose it is.
            memory = self._number_of(obj if obj.base is None else obj.base, self._memories)
            yield obj.shape, str(obj.dtype), obj.tobytes(), memory
        elif isinstance(obj, bytearray):
            yield bytes(obj)
        elif isinstance(obj, dict | types.MappingProxyType):
            yield from ((self.of(key), self.of(value)) for key, value in obj.items())
        elif isinstance(obj, set | frozenset):
            yield sorted(map(repr, obj))
        elif isinstance(obj, list | tuple | deque):
            yield from map(self.of, obj)
        elif isinstance(obj, partial):
            yield from map(self.of, (obj.func, obj.args, obj.keywords))
        elif isinstance(obj, types.FunctionType):
            yield obj.__qualname__
            yield from map(self.of, (obj.__defaults__, *(cell.cell_contents for cell in obj.__closure__ or ())))
        yield from ((name, self.of(value)) for name, value in _attributes(obj))


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    """All that is seen of a tensor [...] besides which it is."""
    values = tensor.detach().cpu().contiguous().numpy()
    return str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad, values.tobytes()


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    """In the dictionary and the slots of an object."""
    if isinstance(obj, Tensor | np.ndarray | tuple | partial | types.FunctionType):
        return
    yield from sorted(getattr(obj, "__dict__", {}).items())
    for base in type(obj).__mro__:
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and hasattr(obj, name):
                yield name, getattr(obj, name)


def difference(one: Any, other: Any, path: tuple[int, ...] = ()) -> str:
    """Where two pictures differ first; empty where they do not."""
    if one == other:
        return ""
    if isinstance(one, tuple | list) and isinstance(other, tuple | list) and len(one) == len(other):
        number = next(number for number, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
        return difference(one[number], other[number], (*path, number))
    return f"at {path}: {_short(one)}, {_short(other)}"


def _short(part: Any) -> str:
    return str(part)[:160]
