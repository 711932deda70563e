"""Entering and leaving tensor- and sequence-parallel regions, with gradients as in Megatron-LM.

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

from te_graph.collectives.ops import name_of
from te_graph.collectives.peer_group import PeerGroup


def copy_to_tp(x: Tensor, group: PeerGroup) -> Tensor:
    """x for a column-parallel layer: each rank's share of its gradient is summed.

    Args:
        x: [...], on the group's device, of the same shape and dtype on all ranks. Not mutated.
        group: of ranks.

    Returns:
        [...], a view of x.

    Raises:
        ValueError, TypeError: an argument is wrong.
        RuntimeError: the group was aborted, or ranks call different operations.

    Stream and capture: on the current stream; forward launches nothing, backward communicates; no host sync.
    """
    return _apply("copy_to_tp", x, group, "keep", "all_reduce")


def reduce_from_tp(x: Tensor, group: PeerGroup) -> Tensor:
    """The sum of all ranks' x, after a row-parallel layer.

    Args:
        x: [...] fp32, fp16 or bf16, on the group's device, of the same shape and dtype on all ranks. Not mutated.
        group: of ranks.

    Returns:
        [...], new.

    Raises:
        ValueError, TypeError: an argument is wrong.
        RuntimeError: the group was aborted, or ranks call different operations.

    Stream and capture: on the current stream; forward communicates, backward launches nothing; no host sync.
    """
    return _apply("reduce_from_tp", x, group, "all_reduce", "keep")


def scatter_to_tp(x: Tensor, group: PeerGroup) -> Tensor:
    """This rank's columns of an x that is the same on all ranks.

    Args:
        x: [..., world_size * n], on the group's device, of the same shape and dtype on all ranks. Not mutated.
        group: of ranks.

    Returns:
        [..., n], maybe a view of x.

    Raises:
        ValueError, TypeError: an argument is wrong, or x has a size that the ranks cannot share.
        RuntimeError: the group was aborted, or ranks call different operations.

    Stream and capture: on the current stream; forward copies at most, backward communicates; no host sync.
    """
    return _apply("scatter_to_tp", x, group, "own_part_last", "all_gather_last")


def gather_from_tp(x: Tensor, group: PeerGroup) -> Tensor:
    """All ranks' columns x, for what all ranks then do alike.

    Args:
        x: [..., n], on the group's device, of the same shape and dtype on all ranks. Not mutated.
        group: of ranks.

    Returns:
        [..., world_size * n], new.

    Raises:
        ValueError, TypeError: an argument is wrong.
        RuntimeError: the group was aborted, or ranks call different operations.

    Stream and capture: on the current stream; forward communicates, backward copies at most; no host sync.
    """
    return _apply("gather_from_tp", x, group, "all_gather_last", "own_part_last")


def all_gather_last_dim_from_tp(x: Tensor, group: PeerGroup) -> Tensor:
    """All ranks' columns x, for what each rank then does its part of.

    Args:
        x: [..., n], on the group's device, of the same shape and dtype on all ranks. Not mutated.
        group: of ranks.

    Returns:
        [..., world_size * n], new.

    Raises:
        ValueError, TypeError: an argument is wrong.
        RuntimeError: the group was aborted, or ranks call different operations.

    Stream and capture: on the current stream; forward communicates, backward communicates; no host sync.
    """
    return _apply("all_gather_last_dim_from_tp", x, group, "all_gather_last", "reduce_scatter_last")


def scatter_to_sp(x: Tensor, group: PeerGroup) -> Tensor:
    """This rank's rows of an x that is the same on all ranks.

    Args:
        x: [world_size * n, ...], on the group's device, of the same shape and dtype on all ranks. Not mutated.
        group: of ranks.

    Returns:
        [n, ...], maybe a view of x.

    Raises:
        ValueError, TypeError: an argument is wrong, or x has a size that the ranks cannot share.
        RuntimeError: the group was aborted, or ranks call different operations.

    Stream and capture: on the current stream; forward copies at most, backward communicates; no host sync.
    """
    return _apply("scatter_to_sp", x, group, "own_part", "all_gather")


def gather_from_sp(x: Tensor, group: PeerGroup, tensor_parallel_output_grad: bool = True) -> Tensor:
    """All ranks' rows x.

    Args:
        x: [n, ...], on the group's device, of the same shape and dtype on all ranks. Not mutated.
        group: of ranks.
        tensor_parallel_output_grad: whether each rank then does its part of the work, so that gradients are summed;
            False where all ranks do the same.

    Returns:
        [world_size * n, ...], new.

    Raises:
        ValueError, TypeError: an argument is wrong.
        RuntimeError: the group was aborted, or ranks call different operations.

    Stream and capture: on the current stream; forward communicates, backward communicates; no host sync.
    """
    return _apply(
        "gather_from_sp", x, group, "all_gather", "reduce_scatter" if tensor_parallel_output_grad else "own_part"
    )


def reduce_scatter_to_sp(x: Tensor, group: PeerGroup) -> Tensor:
    """This rank's rows of the sum of all ranks' x.

    Args:
        x: [world_size * n, ...] fp32, fp16 or bf16, on the group's device, of the same shape and dtype on all ranks.
        Not mutated.
        group: of ranks.

    Returns:
        [n, ...], new.

    Raises:
        ValueError, TypeError: an argument is wrong.
        RuntimeError: the group was aborted, or ranks call different operations.

    Stream and capture: on the current stream; forward communicates, backward communicates; no host sync.
    """
    return _apply("reduce_scatter_to_sp", x, group, "reduce_scatter", "all_gather")


def _apply(region: str, x: Tensor, group: PeerGroup, forward: str, backward: str) -> Tensor:
    """Apply a region to x [...]: ``forward`` and ``backward`` name what is done with x and with its gradient."""
    name = name_of(group, region)
    if not isinstance(x, Tensor):
        raise TypeError(f"{region}: expected x to be a tensor, got {type(x).__name__}")
    if forward.startswith("own_part"):
        dim = -1 if forward.endswith("_last") else 0
        if x.dim() == 0 or x.size(dim) % group.world_size != 0:
            got = x.size(dim) if x.dim() > 0 else "a scalar"
            raise ValueError(
                f"{region}: expected x of a size in dim {dim} that {group.world_size} ranks can share, got {got}"
            )
    return _Region.apply(x, (name, group.world_size, group.rank), forward, backward)


def _communicate(x: Tensor, group: tuple[str, int, int], step: str) -> Tensor:
    """One direction of a region, of x [...]; ``step`` ends in _last for the last dimension instead of the first one."""
    name, world, rank = group
    dim = -1 if step.endswith("_last") else 0
    step = step.removesuffix("_last")
    if step == "keep":
        return x.view_as(x)
    if step == "all_reduce":
        return torch.ops.te_graph.all_reduce.default(x, name)
    if step == "all_gather":
        return torch.ops.te_graph.all_gather.default(x, dim, world, name)
    if step == "reduce_scatter":
        return torch.ops.te_graph.reduce_scatter.default(x, dim, world, name)
    part = x.chunk(world, dim)[rank]
    # Dynamo (torch 2.11) gives a function whose result is ``contiguous()`` of a contiguous view no gradient: zeros.
    return part if part.is_contiguous() else part.contiguous()


class _Region(torch.autograd.Function):
    """A region of x [...]; ``forward`` and ``backward`` name its steps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: tuple[str, int, int], forward: str, backward: str) -> Tensor:
        ctx.group, ctx.steps = group, (forward, backward)
        return _communicate(x, group, forward)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        forward, backward = ctx.steps
        if not torch.is_grad_enabled():
            return _communicate(gradient, ctx.group, backward), None, None, None
        # A region itself, for double backward: the derivatives of the bare ops are different.
        return _Region.apply(gradient, ctx.group, backward, forward), None, None, None
