"""Gradient clipping on the device: two launches, no host sync, nothing written when nothing is clipped."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from te_graph import _C
from te_graph.common.gradient_parts import GradientParts
from te_graph.common.gradient_state import expect_whole_gradients
from te_graph.multi_tensor.norms import raise_if_nonfinite, total_norm
from te_graph.multi_tensor.tensor_lists import (
    Part,
    as_norm_type,
    as_number,
    as_sequence,
    check_operands,
    is_dtensor,
    moved,
    note_grad_reads,
    parts_of,
)
from te_graph.multi_tensor.traced_lists import list_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor] | GradientParts,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_groups: Sequence[ProcessGroup] = (),
    found_inf: Tensor | None = None,
) -> Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``; takes the place of ``torch.nn.utils``' function.

    ``grad *= min(1, max_norm / (total_norm + 1e-6))``, where the factor is computed on the device and, when it is 1,
    no gradient is read again or written: it stays as it is bit for bit. A NaN norm makes all gradients NaN, an infinite
    one makes finite gradients 0, as in torch, unless ``found_inf`` is given.

    Args:
        parameters: [...] each; those without a gradient are passed over. Their ``.grad`` is mutated. As for
            ``get_total_norm``: any dtypes and devices, DTensors (FSDP2, tensor parallel) by their shards. Or a
            ``FlatParameters``: all of its gradients, in ``.grad`` or ``main_grad``, each parameter once over its ranks
            and those of its ``tp_group``.
        max_norm: a number, 0 or positive; ``inf`` clips nothing.
        norm_type, error_if_nonfinite, foreach, process_groups: as for ``get_total_norm``.
        found_inf: [] or [1] float32 on the gradients' device. Set to 1 if the norm is not finite, in which case, or if
            it was set before, no gradient is touched. ``torch.optim.AdamW(fused=True)`` reads it as its attribute
            ``found_inf`` and skips the step. Mutated.

    Returns:
        The total norm before clipping, [] float32 (float64 with float64 gradients), a plain tensor, as from
        ``get_total_norm``; without gradients 0 on the device of the group or of the parameters.

    Raises:
        As ``get_total_norm``; ValueError also for a negative or NaN ``max_norm``, for one gradient met twice, and for a
        group in ``process_groups`` that a ``FlatParameters`` adds over by itself. RuntimeError for parameters that are
        flat with gradients in ``main_grad``, or on this rank in part: pass the ``FlatParameters``.

    Stream and capture: two launches and a memset on the current stream for up to 2000 gradients; see
    ``get_total_norm``. ``MultiTensorPlan.clip_norm_`` does the same to a prepared list.

    Source of the semantics: torch/nn/utils/clip_grad.py; products are rounded once, from fp32.
    """
    op = "clip_grad_norm_"
    max_norm, norm_type = as_max_norm(op, max_norm), as_norm_type(op, norm_type)
    check_operands(op, found_inf=found_inf)
    if isinstance(parameters, GradientParts):
        with parameters.gradient_parts() as own:
            _check_apart(op, process_groups, own.groups)
            beside = parts_of(op, own.beside, True, norm_type)
            norm = total_norm(op, [Part(list_of(own.counted), own.groups), *beside], norm_type, process_groups)
            if error_if_nonfinite:
                raise_if_nonfinite(norm, norm_type)
            clip_parts([Part(list_of(own.tensors)), *beside], max_norm, norm, _C.CLIP_EPS, found_inf)
        return norm
    sequence = _parameters(op, parameters)
    if not (process_groups or error_if_nonfinite or torch.compiler.is_compiling()):
        note_grad_reads(sequence)
        norm = _C.clip_plain_gradients(sequence, max_norm, norm_type, found_inf)
        if norm is not None:
            return norm
    parts = parts_of(op, sequence, True, norm_type)
    norm = total_norm(op, parts, norm_type, process_groups, sequence)
    if error_if_nonfinite:
        raise_if_nonfinite(norm, norm_type)
    clip_parts(parts, max_norm, norm, _C.CLIP_EPS, found_inf)
    return norm


def clip_grads_with_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
    *,
    found_inf: Tensor | None = None,
) -> None:
    """Scale all gradients for a norm that is known: the second half of ``clip_grad_norm_``, with its arguments.

    Args:
        parameters: [...] each; their ``.grad`` is mutated.
        max_norm: a number, 0 or positive.
        total_norm: one element of any floating dtype, on any device. Not mutated.
        foreach: taken for compatibility.
        found_inf: as for ``clip_grad_norm_``. Mutated.

    Raises:
        ValueError, TypeError: an argument is wrong, or one gradient is met twice.
        RuntimeError, NotImplementedError: as ``clip_grad_norm_``.

    Stream and capture: one launch for up to 2000 gradients; no allocation where ``total_norm`` is float32 on the
    gradients' device; no host sync unless it is on the CPU and they are not.
    """
    op = "clip_grads_with_norm_"
    max_norm = as_max_norm(op, max_norm)
    if not isinstance(total_norm, Tensor):
        raise TypeError(f"{op}: expected total_norm to be a tensor, got {type(total_norm).__name__}")
    check_operands(op, found_inf=found_inf)
    parts = parts_of(op, _parameters(op, parameters), True)
    clip_parts(parts, max_norm, total_norm, _C.CLIP_EPS, found_inf)


def clip_parts(parts: Sequence[Part], max_norm: float, norm: Tensor, eps: float, found_inf: Tensor | None) -> None:
    """Scale all parts by ``min(1, max_norm / (norm + eps))``, ``norm`` [] or [1]; checks all, then writes."""
    if is_dtensor(norm):
        norm = norm.full_tensor()
    dtype = torch.float64 if norm.dtype == torch.float64 else torch.float32
    if len(parts) > 1 and not torch.compiler.is_compiling():
        _C.check_distinct("multi_tensor_clip_", [part.tensors for part in parts], [])
        for part in parts:
            part.tensors.check_clip(_norm_on(norm, part.tensors.device, dtype), max_norm, eps, found_inf)
    for part in parts:
        part.tensors.clip_(_norm_on(norm, part.tensors.device, dtype), max_norm, eps, found_inf)
    if not parts and found_inf is not None:
        torch.ops.te_graph.multi_tensor_clip_(
            [], _norm_on(norm, found_inf.device, dtype), max_norm, eps=eps, found_inf=found_inf
        )


def _norm_on(norm: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """``norm`` [] or [1] on ``device``, with its tangent if it has one, which the op refuses."""
    with torch.no_grad():
        return moved(norm, device, dtype)


def as_max_norm(op: str, max_norm: float) -> float:
    """The argument ``max_norm`` of ``op`` as a float that is no less than 0."""
    if isinstance(max_norm, Tensor) and max_norm.device.type != "cpu":
        raise TypeError(f"{op}: expected max_norm to be a number, got a tensor on {max_norm.device}")
    max_norm = as_number(op, "max_norm", max_norm)
    if not max_norm >= 0:
        raise ValueError(f"{op}: expected max_norm to be 0 or positive, got {max_norm}")
    return max_norm


def _check_apart(op: str, process_groups: Sequence[ProcessGroup | None], own: Sequence[ProcessGroup]) -> None:
    """Raise ValueError if one of ``process_groups`` is among those that ``own`` gradients are added over anyway."""
    for group in process_groups:
        if group in own or (group is None and dist.group.WORLD in own):
            raise ValueError(
                f"{op}: expected process_groups over which the gradients of a FlatParameters are not added anyway, got "
                "that of its ranks or of its tp_group"
            )


def _parameters(op: str, parameters: Tensor | Iterable[Tensor]) -> Sequence[Tensor]:
    sequence = as_sequence(op, "parameters", parameters)
    if not (torch.compiler.is_compiling() or _C.in_session()):
        # Flat parameters have hooks, and few others do.
        hooked = [one for one in sequence if getattr(one, "_backward_hooks", None) is not None]
        expect_whole_gradients(op, hooked, "clip those of all parameters, by clip_grad_norm_(flat_parameters, ...)")
    if isinstance(parameters, types.GeneratorType) and not sequence:
        warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3)
    return sequence
