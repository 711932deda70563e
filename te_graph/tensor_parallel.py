"""Where tensors enter and leave tensor- and sequence-parallel regions, with gradients as in Megatron-LM.

| region                      | forward              | backward                                   |
|-----------------------------|----------------------|--------------------------------------------|
| copy_to_tp                  | x                    | all_reduce                                 |
| reduce_from_tp              | all_reduce           | gradient                                   |
| scatter_to_tp               | own part, last dim   | all_gather, last dim                       |
| gather_from_tp              | all_gather, last dim | own part, last dim                         |
| all_gather_last_dim_from_tp | all_gather, last dim | reduce_scatter, last dim                   |
| scatter_to_sp               | own part, dim 0      | all_gather, dim 0                          |
| gather_from_sp              | all_gather, dim 0    | reduce_scatter, dim 0, or own part, dim 0  |
| reduce_scatter_to_sp        | reduce_scatter, dim 0 | all_gather, dim 0                         |

The loss is one number that all ranks find, not a sum of the ranks' losses as for the bare ops: hence the gradient of a
sum that all ranks have is passed on as it is.

Source of the semantics: megatron/core/tensor_parallel/mappings.py.
"""

from typing import Any

import torch
from torch import Tensor

from te_graph.peer_group import PeerGroup


def copy_to_tp(x: Tensor, group: PeerGroup) -> Tensor:
    """x [...] for a column-parallel layer: each rank's share of its gradient is summed.

    Returns:
        [...], a view of x.
    """
    return _Region.apply(x, _facts(group), "keep", "all_reduce")


def reduce_from_tp(x: Tensor, group: PeerGroup) -> Tensor:
    """The sum of all ranks' x [...] after a row-parallel layer. Returns: [...], new."""
    return _Region.apply(x, _facts(group), "all_reduce", "keep")


def scatter_to_tp(x: Tensor, group: PeerGroup) -> Tensor:
    """This rank's columns of x [..., world_size * n], the same on all ranks. Returns: [..., n], maybe a view."""
    return _Region.apply(x, _facts(group), "take_last", "all_gather_last")


def gather_from_tp(x: Tensor, group: PeerGroup) -> Tensor:
    """All ranks' columns x [..., n], for what all ranks then do alike. Returns: [..., world_size * n], new."""
    return _Region.apply(x, _facts(group), "all_gather_last", "take_last")


def all_gather_last_dim_from_tp(x: Tensor, group: PeerGroup) -> Tensor:
    """All ranks' columns x [..., n], for what each rank then does its part of. Returns: [..., world_size * n], new."""
    return _Region.apply(x, _facts(group), "all_gather_last", "reduce_scatter_last")


def scatter_to_sp(x: Tensor, group: PeerGroup) -> Tensor:
    """This rank's rows of x [world_size * n, ...], the same on all ranks. Returns: [n, ...], maybe a view."""
    return _Region.apply(x, _facts(group), "take", "all_gather")


def gather_from_sp(x: Tensor, group: PeerGroup, tensor_parallel_output_grad: bool = True) -> Tensor:
    """All ranks' rows x [n, ...].

    Args:
        x: [n, ...] on the group's device.
        group: of ranks.
        tensor_parallel_output_grad: whether each rank then does its part of the work, so that gradients are summed;
            False where all ranks do the same.

    Returns:
        [world_size * n, ...], new.
    """
    return _Region.apply(x, _facts(group), "all_gather", "reduce_scatter" if tensor_parallel_output_grad else "take")


def reduce_scatter_to_sp(x: Tensor, group: PeerGroup) -> Tensor:
    """This rank's rows of the sum of all ranks' x [world_size * n, ...]. Returns: [n, ...], new."""
    return _Region.apply(x, _facts(group), "reduce_scatter", "all_gather")


def _facts(group: PeerGroup) -> tuple[str, int, int]:
    return group.name, group.world_size, group.rank


def _move(x: Tensor, group: tuple[str, int, int], way: str) -> Tensor:
    """What goes one way through a region; `way` ends in _last where the last dimension is meant, not the first one."""
    name, world, rank = group
    dim = -1 if way.endswith("_last") else 0
    way = way.removesuffix("_last")
    if way == "keep":
        return x.view_as(x)
    if way == "all_reduce":
        return torch.ops.te_graph.all_reduce.default(x, name)
    if way == "all_gather":
        return torch.ops.te_graph.all_gather.default(x, dim, world, name)
    if way == "reduce_scatter":
        return torch.ops.te_graph.reduce_scatter.default(x, dim, world, name)
    if x.size(dim) % world != 0:
        raise ValueError(
            f"tensor_parallel: expected a size in dim {dim} that {world} ranks can share, got {x.size(dim)}"
        )
    part = x.chunk(world, dim)[rank]
    # Dynamo (torch 2.11) gives a function whose result is `contiguous()` of a contiguous view no gradient: zeros.
    return part if part.is_contiguous() else part.contiguous()


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: tuple[str, int, int], there: str, back: str) -> Tensor:
        ctx.group, ctx.there, ctx.back = group, there, back
        return _move(x, group, there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if not torch.is_grad_enabled():
            return _move(gradient, ctx.group, ctx.back), None, None, None
        # To be differentiated in turn, so a region itself: the derivatives of the bare ops are other ones.
        return _Region.apply(gradient, ctx.group, ctx.back, ctx.there), None, None, None
