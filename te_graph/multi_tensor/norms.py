"""Norms over lists of tensors, devices and process groups: fp32, no host sync, independent of how they are split."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from te_graph import _C
from te_graph.multi_tensor.tensor_lists import (
    Part,
    as_norm_type,
    as_sequence,
    check_members,
    check_operands,
    moved,
    parts_of,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def get_total_norm(
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_groups: Sequence[ProcessGroup | None] = (),
) -> Tensor:
    """Norm of all elements of all tensors together, as if they were one vector.

    ``(sum |x|^p)^(1/p)``; for p = inf ``max |x|``; for p = 0 the number of elements that are not zero. Takes the place
    of ``torch.nn.utils.get_total_norm``, with a result in fp32 that depends neither on the order of the list nor on its
    grouping by dtype, device or rank, and is the same bits in every run: sums of chunks of 8192 elements are taken in
    fp32 and then added exactly (csrc/multi_tensor/norm.h).

    Args:
        tensors: [...] each, any mix of float32, float64, float16, bfloat16 and devices, empty ones included; complex
            for ``norm_type=2``. DTensors count with all their shards, replicated ones once. Not mutated.
        norm_type: p; 0, positive or ``inf``.
        error_if_nonfinite: raise if the norm is NaN or infinite. The only thing here that waits for the device.
        foreach: taken for compatibility; there is one implementation.
        process_groups: groups whose ranks hold other parts of the same vector (pipeline stages, tensor-parallel or
            sharded parameters); None is torch's default group. One all-reduce of 576 bytes each.

    Returns:
        [] on the device of the first tensor: float32, or float64 if there are float64 tensors here. New memory. 0 for
        an empty list, on the device that the groups communicate on, on the CPU without groups.

    Raises:
        ValueError: ``norm_type`` is negative or NaN; a tensor's elements overlap; a DTensor is a partial sum.
        TypeError: integer or sparse tensors, or complex ones with another ``norm_type`` than 2; in ``process_groups``
            something else than process groups that this rank is in.
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.

    Stream and capture: one launch on the current stream for up to 2000 tensors and one memset, allocates 576 bytes and
    the result. In a capture the addresses of the tensors are frozen; ``te_graph.graphed`` guards them, and
    ``MultiTensorPlan`` makes them exchangeable.

    Source of the semantics: torch/nn/utils/clip_grad.py, but for the dtype of the result, p = 0 and empty lists.
    """
    op = "get_total_norm"
    sequence, norm_type = as_sequence(op, "tensors", tensors), as_norm_type(op, norm_type)
    norm = total_norm(op, parts_of(op, sequence, False, norm_type), norm_type, process_groups, sequence)
    if error_if_nonfinite:
        raise_if_nonfinite(norm, norm_type)
    return norm


def multi_tensor_norms(tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Norm of each tensor by itself, as training logs show them for each layer.

    ``(sum |x|^p)^(1/p)`` of each; for p = inf ``max |x|``; for p = 0 the number of elements that are not zero.

    Args:
        tensors: [n] of any shapes, float32, float64, float16 or bfloat16, on one device, empty ones included. Not
            mutated.
        norm_type: p; 0, positive or ``inf``.

    Returns:
        [n] on the device of the tensors: float32, or float64 if one of them is. New memory. Each number has the bits of
        ``get_total_norm([tensor])``, rounded once.

    Raises:
        ValueError: ``norm_type`` is negative or NaN; tensors on several devices; a tensor's elements overlap.
        TypeError: integer, complex or sparse tensors, or what is no tensor.

    Stream and capture: one launch on the current stream for up to 2000 tensors, allocates the result and 576 bytes for
    each tensor, waits for nothing. A replay overwrites the result.

    Source of the semantics: torch._foreach_norm, with one result.
    """
    op = "multi_tensor_norms"
    sequence, p = as_sequence(op, "tensors", tensors), as_norm_type(op, norm_type)
    try:
        return torch.ops.te_graph.multi_tensor_norms(list(sequence), p)
    except RuntimeError:  # the dispatcher's, which does not say which one it is
        check_members(op, "tensors", sequence)
        raise


def total_norm(
    op: str, parts: Sequence[Part], p: float, process_groups: Sequence[ProcessGroup], tensors: Sequence[Tensor] = ()
) -> Tensor:
    """Norm of all parts and ranks, []; of nothing, 0 on the device of ``process_groups`` or else of ``tensors``."""
    process_groups = _own_groups(op, process_groups)
    if len(parts) == 1 and not parts[0].groups and not process_groups:
        return parts[0].tensors.norm(p)
    partials: dict[tuple, tuple[Tensor, Sequence[ProcessGroup]]] = {}
    for part in parts:
        key = tuple(group.group_name for group in part.groups)
        partial = part.tensors.norm_partial(p)
        if key in partials:
            partial = _joined(partials[key][0], partial, p)
        partials[key] = partial, part.groups
    device = parts[0].tensors.device if parts else _device_for(process_groups, tensors)
    partial = torch.zeros(_C.NORM_PARTIAL_WORDS, dtype=torch.int64, device=device)
    for own, groups in partials.values():
        partial = _joined(partial, _reduced(own, groups, p), p)
    dtype = torch.float64 if any(part.tensors.has_double for part in parts) else torch.float32
    return torch.ops.te_graph.multi_tensor_norm_finish(_reduced(partial, process_groups, p), p, dtype)


def new_sum_squares(device: torch.device | str) -> Tensor:
    """The sum of the squares of nothing, for ``update_hp_grads(sum_squares=)``; ``zero_()`` resets it.

    Args:
        device: where it lies.

    Returns:
        [72] int64 zeros, new: a partial norm of p = 2.

    Stream and capture: allocates 576 bytes, one memset.
    """
    return torch.zeros(_C.NORM_PARTIAL_WORDS, dtype=torch.int64, device=device)


def norm_of_sum_squares(sum_squares: Tensor, process_groups: Sequence[ProcessGroup] = ()) -> Tensor:
    """The 2-norm of everything whose squares were added; bit for bit what ``get_total_norm`` finds in that.

    Args:
        sum_squares: [72] int64 from ``new_sum_squares``. Not mutated.
        process_groups: as for ``get_total_norm``.

    Returns:
        [] float32 on the device of ``sum_squares``. New memory.

    Raises:
        TypeError, ValueError: an argument is wrong.

    Stream and capture: one launch on the current stream, and one all-reduce of 576 bytes for each group; allocates the
        result, which a replay overwrites; no host sync.
    """
    op = "norm_of_sum_squares"
    check_operands(op, sum_squares=sum_squares)
    reduced = _reduced(sum_squares, _own_groups(op, process_groups), 2.0)
    return torch.ops.te_graph.multi_tensor_norm_finish(reduced, 2.0)


def raise_if_nonfinite(norm: Tensor, norm_type: float) -> None:
    """Wait for ``norm`` [] and raise unless it is a finite number."""
    if not math.isfinite(norm.item()):
        raise RuntimeError(
            f"The total norm of order {float(norm_type)} for gradients from `parameters` is non-finite, so it cannot "
            "be clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


def _joined(a: Tensor, b: Tensor, p: float) -> Tensor:
    """Two partials [72] as one, on the device of the first."""
    b = moved(b, a.device, b.dtype)
    return torch.maximum(a, b) if math.isinf(p) else a + b


def _own_groups(op: str, process_groups: Sequence[ProcessGroup]) -> Sequence[ProcessGroup]:
    """As given; torch passes over the operations of groups that this rank is not in, and its norm would be another."""
    if not process_groups:
        return ()
    if not isinstance(process_groups, Iterable):
        raise TypeError(f"{op}: expected process_groups to be a sequence of them, got {process_groups!r:.100}")
    groups = tuple(process_groups)
    for number, group in enumerate(groups):
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"{op}: expected process_groups[{number}] to be a process group that this rank is in, got "
                f"{group!r:.100}"
            )
    return groups


def _reduced(partial: Tensor, groups: Sequence[ProcessGroup], p: float) -> Tensor:
    """``partial`` [72] of all ranks of the groups; integers, so the order of the ranks does not matter."""
    if groups:
        partial = partial.clone()
    for group in groups:
        dist.all_reduce(partial, dist.ReduceOp.MAX if math.isinf(p) else dist.ReduceOp.SUM, group)
    return partial


def _device_for(groups: Sequence[ProcessGroup], tensors: Sequence[Tensor]) -> torch.device:
    """Of a norm of nothing: where the groups communicate, or else that of ``tensors``, [...] each."""
    if groups:
        return torch.device("cuda", torch.cuda.current_device()) if _uses_nccl(groups[0]) else torch.device("cpu")
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _uses_nccl(group: ProcessGroup | None) -> bool:
    """Whether ranks of the group, torch's default one if None, have their tensors on GPUs: gloo, too, names CUDA among
    its devices."""
    group = dist.distributed_c10d._get_default_group() if group is None else group
    try:
        return "nccl" in group._get_backend(torch.device("cuda")).name().lower()
    except RuntimeError:
        return False
