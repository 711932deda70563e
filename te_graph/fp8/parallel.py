"""One rank's part of a linear layer: tensor and sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from te_graph.collectives.peer_group import PeerGroup
from te_graph.common.parameter_marks import mark_as_split
from te_graph.tensor_parallel import copy_to_tp, gather_from_sp, reduce_from_tp, reduce_scatter_to_sp

_MODES = ("column", "row")


class Shard:
    """How a layer is split over ranks. A copy of a module has the same one.

    Args:
        mode: "column" splits the output features, "row" the input features.
        group: the ranks.
        sequence_parallel: outside of the layer, ranks have rows (dimension 0) of activations between them.
        stride: the features that are split are so many blocks, one behind the other, of each of which a rank has a
            part: as Megatron-LM's.
    """

    def __init__(self, mode: str, group: PeerGroup, sequence_parallel: bool, stride: int = 1) -> None:
        self.mode, self.group, self.sequence_parallel, self.stride = mode, group, sequence_parallel, stride

    @classmethod
    def of(
        cls, mode: str | None, group: Any, sequence_parallel: bool, stride: int, inputs: int, outputs: int
    ) -> Shard | None:
        """That of a layer of so many features; None where it is not split.

        Raises:
            TypeError, ValueError: the arguments do not go together.
        """
        if mode is None:
            if group is not None or sequence_parallel:
                raise ValueError(
                    "te_graph.Linear: expected parallel_mode='column' or 'row' with tp_group or sequence_parallel, got "
                    "None"
                )
            return None
        if mode not in _MODES:
            raise ValueError(f"te_graph.Linear: expected parallel_mode to be 'column', 'row' or None, got {mode!r}")
        if not isinstance(group, PeerGroup):
            raise TypeError(
                f"te_graph.Linear: expected tp_group to be a te_graph.PeerGroup, got {type(group).__name__}"
            )
        name, features = ("in_features", inputs) if mode == "row" else ("out_features", outputs)
        if features % (stride * group.world_size):
            blocks = "" if stride == 1 else f", in {stride} blocks,"
            raise ValueError(
                f"te_graph.Linear: expected {name}{blocks} that the {group.world_size} ranks of tp_group divide, got "
                f"{features}"
            )
        return cls(mode, group, bool(sequence_parallel), stride)

    @property
    def is_row(self) -> bool:
        """Whether the input features are split."""
        return self.mode == "row"

    def own(self, inputs: int, outputs: int) -> tuple[int, int]:
        """Of the features of the whole layer those of this rank."""
        ranks = self.group.world_size
        return (inputs // ranks, outputs) if self.is_row else (inputs, outputs // ranks)

    def whole(self, inputs: int, outputs: int) -> tuple[int, int]:
        """Of the features of this rank those of the whole layer."""
        ranks = self.group.world_size
        return (inputs * ranks, outputs) if self.is_row else (inputs, outputs * ranks)

    def part(self, tensor: Tensor) -> Tensor:
        """This rank's part of a weight [out, in] or of a bias [out] of the whole layer."""
        dim = 1 if self.is_row else 0
        blocks = tensor.chunk(self.stride, dim)
        return torch.cat([block.chunk(self.group.world_size, dim)[self.group.rank] for block in blocks], dim)

    def mark(self, weight: nn.Parameter | None, bias: nn.Parameter | None) -> None:
        """Say of ``weight`` [out, in] and ``bias`` [out] of this rank which of them are parts."""
        if self.group.world_size > 1:
            mark_as_split(weight)
            if not self.is_row:
                mark_as_split(bias)

    def enter(self, x: Tensor) -> Tensor:
        """What a column-parallel layer multiplies, of x [..., in]."""
        return gather_from_sp(x, self.group) if self.sequence_parallel else copy_to_tp(x, self.group)

    def leave(self, y: Tensor) -> Tensor:
        """The sum of the products y [..., out] of a row-parallel layer, or this rank's rows of it."""
        return reduce_scatter_to_sp(y, self.group) if self.sequence_parallel else reduce_from_tp(y, self.group)

    def whole_bias(self, bias: Tensor | None) -> Tensor | None:
        """A vector that all ranks have, as the bias [out] of a row-parallel layer: its gradient is that of the rows of
        all ranks."""
        return copy_to_tp(bias, self.group) if bias is not None and self.sequence_parallel else bias

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        return self

    def __str__(self) -> str:
        text = f"parallel_mode={self.mode}, ranks={self.group.world_size}"
        return text + (", sequence_parallel=True" if self.sequence_parallel else "")
