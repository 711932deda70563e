"""Columns of scales and histories, and which of them are one module's."""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from te_graph import _C
from te_graph.common.own_objects import OwnObject
from te_graph.fp8.recipes import DelayedScaling, Recipe

FORWARD, BACKWARD = range(2)  # directions in which tensors are cast


class Role(enum.IntEnum):
    """The tensors of a module that are cast."""

    INPUT = 0
    WEIGHT = 1
    GRAD = 2


def is_shared(recipe: Recipe, group: dist.ProcessGroup | None) -> bool:
    """Whether ranks of ``group`` share the scales of ``recipe``."""
    return group is not None and isinstance(recipe, DelayedScaling) and recipe.reduce_amax


class Block(OwnObject):
    """Columns for a number of modules. They never move, so kernels of graphs find them.

    Attributes:
        order: among the blocks of its scope.
        tables: scales of the casts of each direction, FORWARD (inputs and weights) and BACKWARD (gradients); None under
            current scaling.
        history, scale, scale_inv: of both directions, [H, n], [n] and [n] each; empty under current scaling. Casts
            have inverses of their own.
        weight_scale: [capacity] fp32, with which the weights were cast.
        recorded_weight_scale: [capacity] fp32, the same of the last casts whose amaxes were recorded.
        weight_scale_inv: [capacity, 4] fp32, of which the first ones count: cuBLASLt wants multiples of 16 bytes.
        has_weight_scale: [capacity] bool; weights that were never cast with their amaxes recorded have none yet.
        free: numbers that no module has, the next one last.
        is_shared: ranks reduce amaxes, column by column.
    """

    def __init__(
        self, order: int, capacity: int, recipe: Recipe, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        self.order, self._capacity, self._group = order, capacity, group
        self.is_shared = is_shared(recipe, group)
        options = {"dtype": torch.float32, "device": device}
        self.weight_scale = torch.ones(capacity, **options)
        self.recorded_weight_scale = torch.ones(capacity, **options)
        self.weight_scale_inv = torch.ones(capacity, 4, **options)
        self.has_weight_scale = torch.zeros(capacity, dtype=torch.bool, device=device)
        self.free = list(reversed(range(capacity)))
        self.tables: list[_C.ScaleTable | None] = [None, None]
        self.history: list[Tensor] = []
        self.scale: list[Tensor] = []
        self.scale_inv: list[Tensor] = []
        if not isinstance(recipe, DelayedScaling):
            return
        formats = recipe.fp8_format.forward_dtype, recipe.fp8_format.backward_dtype
        for direction, (columns, dtype) in enumerate(zip((2 * capacity, capacity), formats, strict=True)):
            self.history.append(torch.zeros(recipe.amax_history_len, columns, **options))
            self.scale.append(torch.ones(columns, **options))
            self.scale_inv.append(torch.ones(columns, **options))
            table = _C.ScaleTable(
                self.history[direction],
                self.scale[direction],
                self.scale_inv[direction],
                torch.finfo(dtype).max,
                recipe.margin,
                recipe.amax_compute_algo,
            )
            self.tables[direction] = table
        self._share_amaxes()

    def _share_amaxes(self) -> None:
        """Let updates begin with a reduction of the newest amaxes, if ranks share them."""
        for table in self.tables if self.is_shared else ():
            table.set_reduce(lambda row: dist.all_reduce(row, dist.ReduceOp.MAX, self._group))

    @contextlib.contextmanager
    def without_updates(self) -> Iterator[None]:
        """Around writes of histories and scales: no other thread launches an update in between, which would go on with
        what was there before."""
        with contextlib.ExitStack() as held:
            for table in self.tables:
                if table is not None:
                    table.hold_updates()
                    held.callback(table.release_updates)
            yield

    def tensors(self) -> list[Tensor]:
        """Histories, scales and inverses, [H, n] or [n] each; of weights the scales of their casts, and which of them
        have a scale, [capacity] each."""
        return [*self.history, *self.scale, *self.scale_inv, *self._of_weights()]

    def _of_weights(self) -> list[Tensor]:
        """What there is of each weight, [capacity] each."""
        return [self.weight_scale, self.recorded_weight_scale, self.has_weight_scale]

    def captured_tensors(self) -> list[Tensor]:
        return [*self.tensors(), self.weight_scale_inv]

    def columns_of(self, numbers: Sequence[int]) -> list[tuple[Tensor, list[int]]]:
        """``tensors()``, with the columns of each that the modules with these numbers have."""
        of_directions: tuple[list[int], list[int]] = ([], [])
        for direction, column in (self.column_of(number, role) for number in numbers for role in Role):
            of_directions[direction].append(column)
        lists = (self.history, self.scale, self.scale_inv)
        pairs = [pair for tensors in lists for pair in zip(tensors, of_directions, strict=False)]
        return pairs + [(tensor, list(numbers)) for tensor in self._of_weights()]

    def column_of(self, number: int, role: Role) -> tuple[int, int]:
        """Direction and column of the tensor with ``role`` of the module with ``number``. Those of weights lie side by
        side, behind those of inputs."""
        direction = BACKWARD if role == Role.GRAD else FORWARD
        return direction, number + self._capacity * (role == Role.WEIGHT)

    def weight_columns(self, numbers: slice) -> slice:
        """Forward columns of the weights of modules that follow each other."""
        return slice(self._capacity + numbers.start, self._capacity + numbers.stop)


class Columns:
    """The columns of one module in ``block``. Free again when its member is gone, and all backwards and graphs that use
    them; not so where ranks share them, whose garbage collectors would free them at other times.

    Attributes:
        number: of the module in its block.
    """

    def __init__(self, block: Block) -> None:
        self.block, self.number = block, block.free.pop()
        if not block.is_shared:
            weakref.finalize(self, block.free.append, self.number).atexit = False

    def of(self, role: Role) -> tuple[int, int]:
        """Direction and column of the tensor with ``role``."""
        return self.block.column_of(self.number, role)
