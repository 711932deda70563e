"""Collectives over a ``PeerGroup``: thin wrappers of torch.ops.te_graph.*, for eager code, captures and traces alike.

All of them read x wherever it lies and write ordinary memory. A GPU's sums are taken in fp32 in the order of the ranks
and rounded once, so all ranks find the same bits, at any size. Gradients are those of a loss that is the sum of all
ranks' losses; ``te_graph.tensor_parallel`` has the regions with Megatron-LM's convention. In forward mode a tangent is
sent by a call of its own, so x has one on all ranks or on none.

Raises, all of them: ValueError or TypeError for bad arguments, before anything is launched, and then the operation does
not count on this rank: where the others go on with it, call ``group.abort()``, or this rank's next one meets it.
RuntimeError if the group was aborted, with the rank, the operation and its number; so it is where ranks call different
operations, or along different dims, or of different numbers of elements.

Stream and capture: on the current stream; the functional forms allocate their result, all allocate copies of tensors
that are not contiguous; no host sync. A replay overwrites the results.

torch.compile keeps all of them, used or not, in the order of the program (te_graph/collectives/effects.py); those that
write into their arguments are traced as the functional form and a copy.
"""

from typing import Any

import torch
from torch import Tensor

from te_graph.collectives.peer_group import PeerGroup

# Looked up once: finding an overload takes a tenth of the time of a call.
_ALL_REDUCE = torch.ops.te_graph.all_reduce.default
_ALL_REDUCE_ = torch.ops.te_graph.all_reduce_.default
_ALL_REDUCE_OUT = torch.ops.te_graph.all_reduce_out.default
_REDUCE_SCATTER = torch.ops.te_graph.reduce_scatter.default
_REDUCE_SCATTER_OUT = torch.ops.te_graph.reduce_scatter_out.default
_ALL_GATHER = torch.ops.te_graph.all_gather.default
_ALL_GATHER_OUT = torch.ops.te_graph.all_gather_out.default


def name_of(group: PeerGroup, op: str) -> str:
    """The name by which ops find ``group``."""
    if not isinstance(group, PeerGroup):
        raise TypeError(f"{op}: expected group to be a te_graph.PeerGroup, got {type(group).__name__}")
    return group.name


def _options(scale: float | Tensor, wire_dtype: torch.dtype | None, op: str) -> dict[str, Any]:
    """``scale``, [] or [1] where it is a tensor, and ``wire_dtype`` as the ops take them."""
    if isinstance(scale, Tensor):
        return {"scale_tensor": scale, "wire_dtype": wire_dtype}
    if isinstance(scale, (int, float)):
        return {"scale": scale, "wire_dtype": wire_dtype}
    raise TypeError(f"{op}: expected scale to be a number or a tensor, got {type(scale).__name__}")


def all_reduce(x: Tensor, group: PeerGroup, reduction: str = "sum") -> Tensor:
    """The sum, or largest, of all ranks' x.

    Args:
        x: [...], fp32, fp16 or bf16, of the same shape and dtype on all ranks.
        group: of ranks; x is on its device.
        reduction: "sum"; for fp32 also "max", which passes NaN on and has no derivative.

    Returns:
        [...], new and contiguous, of x's dtype.

    Raises:
        ValueError, TypeError: an argument is wrong; before anything is launched.
        RuntimeError: the group was aborted, or ranks call different operations.

    Stream and capture: on the current stream; allocates the result, and a copy of an x that is not contiguous; no
        host sync. A replay overwrites the result.
    """
    return _ALL_REDUCE(x, name_of(group, "all_reduce"), reduction)


def all_reduce_(x: Tensor, group: PeerGroup, reduction: str = "sum") -> Tensor:
    """``all_reduce`` into x itself.

    Args:
        x: [...], as of ``all_reduce``. Mutated. No gradients.
        group, reduction: as of ``all_reduce``.

    Returns:
        x [...] itself.

    Raises:
        ValueError, TypeError: an argument is wrong; before anything is launched.
        RuntimeError: the group was aborted, or ranks call different operations.

    Stream and capture: on the current stream; allocates nothing but copies of tensors that are not contiguous; no
        host sync.
    """
    _ALL_REDUCE_(x, name_of(group, "all_reduce_"), reduction)
    return x


def all_reduce_out(
    out: Tensor,
    x: Tensor,
    group: PeerGroup,
    reduction: str = "sum",
    *,
    scale: float | Tensor = 1.0,
    wire_dtype: torch.dtype | None = None,
) -> None:
    """``all_reduce`` into a given tensor, times a factor.

    Args:
        out: [...] of x's shape and dtype, on x's device; may be x. Mutated. No gradients.
        x: [...], as of ``all_reduce``. Not mutated.
        group, reduction: as of ``all_reduce``.
        scale: a number, or [] or [1] fp32 on x's device, which a replay reads anew. The sum is multiplied by it in
            fp32, before it is rounded. The same on all ranks; 1 with reduction "max". Not traced by torch.compile.
        wire_dtype: torch.bfloat16 for an x of fp32: each rank's x is rounded to it where it is loaded, and sent so; the
            sum is taken in fp32, and rounded to it after ``scale``. None: x's own. The same on all ranks; not for
            reduction "max", not traced by torch.compile.

    Raises:
        ValueError, TypeError: an argument is wrong; before anything is launched.
        RuntimeError: the group was aborted, or ranks call different operations.

    Stream and capture: on the current stream; allocates nothing but copies of tensors that are not contiguous; no
        host sync.
    """
    _ALL_REDUCE_OUT(
        out, x, name_of(group, "all_reduce_out"), reduction, **_options(scale, wire_dtype, "all_reduce_out")
    )


def reduce_scatter(x: Tensor, group: PeerGroup, dim: int = 0, reduction: str = "sum") -> Tensor:
    """This rank's part, along a dimension, of the sum or the largest of all ranks' x.

    Args:
        x: [..., world_size * n, ...], fp32, fp16 or bf16, of the same shape and dtype on all ranks.
        group: of ranks; x is on its device.
        dim: that is divided, the same on all ranks. Other dimensions than the first one cost a copy.
        reduction: as of ``all_reduce``.

    Returns:
        [..., n, ...], new and contiguous, of x's dtype.

    Raises:
        ValueError, TypeError: an argument is wrong; before anything is launched.
        RuntimeError: the group was aborted, or ranks call different operations.

    Stream and capture: on the current stream; allocates the result, and a copy of an x that is not contiguous; no
        host sync. A replay overwrites the result.
    """
    name = name_of(group, "reduce_scatter")
    return _REDUCE_SCATTER(x, dim, group.world_size, name, reduction)


def reduce_scatter_out(
    out: Tensor,
    x: Tensor,
    group: PeerGroup,
    dim: int = 0,
    reduction: str = "sum",
    *,
    scale: float | Tensor = 1.0,
    wire_dtype: torch.dtype | None = None,
) -> None:
    """``reduce_scatter`` into a given tensor, times a factor.

    Args:
        out: [..., n, ...] of x's dtype, on x's device; may be this rank's part of x. Mutated. No gradients.
        x: [..., world_size * n, ...], as of ``reduce_scatter``. Not mutated.
        group, dim, reduction: as of ``reduce_scatter``.
        scale: as of ``all_reduce_out``.
        wire_dtype: as of ``all_reduce_out``, but the sum, which is not sent, stays fp32.

    Raises:
        ValueError, TypeError: an argument is wrong; before anything is launched.
        RuntimeError: the group was aborted, or ranks call different operations.

    Stream and capture: on the current stream; allocates nothing but copies of tensors that are not contiguous, and of x
        where out is a part of it other than this rank's; no host sync.
    """
    name = name_of(group, "reduce_scatter_out")
    options = _options(scale, wire_dtype, "reduce_scatter_out")
    _REDUCE_SCATTER_OUT(out, x, dim, group.world_size, name, reduction, **options)


def all_gather(x: Tensor, group: PeerGroup, dim: int = 0) -> Tensor:
    """All ranks' x, one behind the other along a dimension.

    Args:
        x: [..., n, ...], any dtype, of the same shape and dtype on all ranks.
        group: of ranks; x is on its device.
        dim: along which they are joined, the same on all ranks. Other dimensions than the first one cost a copy.

    Returns:
        [..., world_size * n, ...], new and contiguous, of x's dtype.

    Raises:
        ValueError, TypeError: an argument is wrong; before anything is launched.
        RuntimeError: the group was aborted, or ranks call different operations.

    Stream and capture: on the current stream; allocates the result, and a copy of an x that is not contiguous; no
        host sync. A replay overwrites the result.
    """
    name = name_of(group, "all_gather")
    return _ALL_GATHER(x, dim, group.world_size, name)


def all_gather_out(out: Tensor, x: Tensor, group: PeerGroup, dim: int = 0) -> None:
    """``all_gather`` into a given tensor.

    Args:
        out: [..., world_size * n, ...] of x's dtype, on x's device. Mutated. No gradients.
        x: [..., n, ...], as of ``all_gather``; may be this rank's part of out, which keeps its values.
        group, dim: as of ``all_gather``.

    Raises:
        ValueError, TypeError: an argument is wrong; before anything is launched.
        RuntimeError: the group was aborted, or ranks call different operations.

    Stream and capture: on the current stream; allocates nothing but copies of tensors that are not contiguous, and of x
        where it is a part of out other than this rank's; no host sync.
    """
    name = name_of(group, "all_gather_out")
    _ALL_GATHER_OUT(out, x, dim, group.world_size, name)
