"""What a rank has of a tensor, for torch.distributed.checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class TensorPart(Tensor):
    """Elements ``begin`` to ``end``, in the order of memory, of a tensor that has ``shape`` and ``stride``.

    A checkpoint knows a tensor by boxes of its indices: this writes and reads those that its elements fill, at most
    2 n - 1 in n dimensions. Without values it is written as None, and makes memory for them where it is read.

    Attributes:
        values: [end - begin]; None: there are none.

    Source of the semantics: torch.distributed._checkpointable._Checkpointable, the protocol that DTensor implements.
    """

    values: Tensor | None

    @staticmethod
    def __new__(cls, values: Tensor | None, like: Tensor, begin: int, end: int, dtype: torch.dtype) -> TensorPart:
        """``like`` [...] has the shape, the strides and the device of the whole."""
        part = Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device)
        part.values = values
        part._numel = end - begin
        # Dimensions of one element may be anywhere; memory has the others in descending order of strides.
        order = sorted(range(like.dim()), key=lambda dim: like.stride(dim), reverse=True)
        part._back = [order.index(dim) for dim in range(like.dim())]
        part._boxes = boxes_of([like.shape[dim] for dim in order], begin, end)
        return part

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def __repr__(self) -> str:
        return f"TensorPart({self._numel} elements of shape {list(self.shape)}, {self.dtype})"

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        if self.values is None:
            return [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)]
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self.values is None:
            self.values = torch.zeros(self._numel, dtype=self.dtype, device=self.device)
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor | None:
        """The values in the box at ``index.offset``; None where there are no values."""
        if self.values is None:
            return None
        first = 0
        for chunk, (_, sizes) in zip(self._chunks(), self._boxes, strict=True):
            numel = math.prod(sizes)
            if chunk.offsets == index.offset:
                return self.values[first : first + numel].view(sizes).permute(self._back)
            first += numel
        raise KeyError(index)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.new_empty.default:
            # Asynchronous saves make one like this, and copy its attributes.
            part, device = args[0], kwargs["device"]
            return Tensor._make_wrapper_subclass(
                cls, part.shape, strides=part.stride(), dtype=part.dtype, device=device
            )
        raise TypeError(f"{func}: expected tensors, got a part of one, which is for torch.distributed.checkpoint alone")

    def _chunks(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(*(torch.Size([numbers[dim] for dim in self._back]) for numbers in box))
            for box in self._boxes
        ]


def boxes_of(shape: Sequence[int], begin: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of boxes that hold elements ``begin`` to ``end`` of a contiguous tensor of ``shape``, in their
    order: what is left of a row, rows, and what is of the last one."""
    if begin == end or not shape:
        return [((0,) * len(shape), tuple(shape))]
    row = math.prod(shape[1:])
    (first, skipped), (last, rest) = divmod(begin, row), divmod(end, row)

    def in_row(number: int, row_begin: int, row_end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [((number, *offsets), (1, *sizes)) for offsets, sizes in boxes_of(shape[1:], row_begin, row_end)]

    if first == last:
        return in_row(first, skipped, rest)
    boxes = []
    if skipped:
        boxes += in_row(first, skipped, row)
        first += 1
    if first < last:
        boxes.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if rest:
        boxes += in_row(last, 0, rest)
    return boxes
