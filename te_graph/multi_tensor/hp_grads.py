"""The optimizer side of mixed precision under DeepSpeed's names: low-precision gradients into fp32 ones, norm, clip."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from te_graph import _C
from te_graph.multi_tensor.clip import as_max_norm, clip_parts
from te_graph.multi_tensor.norms import get_total_norm
from te_graph.multi_tensor.tensor_lists import (
    as_number,
    as_sequence,
    check_operands,
    is_dtensor,
    local_part,
    note_grad_reads,
    parts_of,
)
from te_graph.multi_tensor.traced_lists import TracedList, list_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def get_global_norm_of_tensors(
    input_tensors: Tensor | Iterable[Tensor], norm_type: float = 2.0, process_groups: Sequence[ProcessGroup] = ()
) -> Tensor:
    """``get_total_norm`` under DeepSpeed's name.

    DeepSpeed returns -1 where the norm is not finite; this returns the norm as it is, on the device, and nothing waits.

    Args:
        input_tensors: [...] each, over all ranks; as ``tensors`` of ``get_total_norm``. Not mutated.
        norm_type, process_groups: as for ``get_total_norm``.

    Returns:
        [] float32, or float64 if there are float64 tensors here. New memory.

    Raises:
        As ``get_total_norm``.

    Stream and capture: as ``get_total_norm``.
    """
    return get_total_norm(input_tensors, norm_type, process_groups=process_groups)


def clip_tensors_by_global_norm(
    input_tensors: Tensor | Iterable[Tensor],
    max_norm: float = 1.0,
    global_norm: Tensor | None = None,
    process_groups: Sequence[ProcessGroup] = (),
    eps: float = _C.CLIP_EPS,
) -> Tensor:
    """Scale tensors in place by ``min(1, max_norm / (global_norm + eps))``, deciding on the device.

    Args:
        input_tensors: [...] each; mutated, unless nothing is to be clipped.
        max_norm: a number, 0 or positive.
        global_norm: one element, on any device; None to compute it over ``process_groups``. Not mutated.
        process_groups: as for ``get_total_norm``.
        eps: added to the norm.

    Returns:
        The norm before clipping, [].

    Raises:
        As ``clip_grad_norm_``; NotImplementedError, where gradients are recorded, for a result that requires one: what
        is written here has no gradient.

    Stream and capture: as ``clip_grad_norm_``.
    """
    op = "clip_tensors_by_global_norm"
    max_norm, eps = as_max_norm(op, max_norm), as_number(op, "eps", eps)
    check_operands(op, global_norm=global_norm)
    tensors = as_sequence(op, "input_tensors", input_tensors)
    parts = parts_of(op, tensors, False)
    for part in parts:
        part.tensors.check_not_followed(op)
    if global_norm is None:
        global_norm = get_global_norm_of_tensors(tensors, process_groups=process_groups)
    clip_parts(parts, max_norm, global_norm, eps, None)
    return global_norm


def update_hp_grads(
    lp_params: Iterable[Tensor],
    hp_grads: Iterable[Tensor],
    *,
    store: bool = False,
    sum_squares: Tensor | None = None,
    found_inf: Tensor | None = None,
    noop: Tensor | None = None,
) -> None:
    """Add the gradients of low-precision parameters into high-precision ones and zero them in place, in one pass.

    ``hp_grad += lp.grad`` in fp32, rounded once; then ``lp.grad = 0``, in the same memory, never None: whatever holds
    the address (a graph, a bucket) stays right.

    Args:
        lp_params: [...] each, with ``.grad`` in bfloat16, float16 or the dtype of its hp gradient; ``.grad`` is zeroed.
            A parameter without a gradient changes nothing (with ``store``: its hp gradient becomes 0).
        hp_grads: one for each, float32 or the gradient's dtype, of the gradient's shape, or flat where the gradient
            is contiguous (or the gradient is flat). Mutated.
        store: overwrite instead of adding, for the first micro-batch: no memset, and 4 bytes per element less.
        sum_squares: [72] int64 from ``new_sum_squares``: the squares of all ``hp_grads``, as they are afterwards, are
            added, and ``norm_of_sum_squares`` is then their norm without reading what is written again. Mutated.
        found_inf: [] or [1] float32, set to 1 if anything written is not finite. Mutated.
        noop: [] or [1] float32: where it is not 0, nothing is written or zeroed. Not the same tensor as ``found_inf``.

    Raises: before anything is written,
        ValueError: lists of different lengths, shapes that do not fit, memory met twice, or a number or flag that lies
            in it.
        TypeError: a gradient of a dtype that cannot be added into its hp gradient.
        NotImplementedError: a result that requires a gradient, where gradients are recorded, or a tensor with a tangent
            is to be written: that has no derivative.

    Stream and capture: one launch on the current stream for up to 1328 pairs, no host sync; allocates nothing but for
        parameters without a gradient, whose hp gradients take two launches more with ``sum_squares`` or ``noop``.

    Source of the semantics: DeepSpeed's BF16_Optimizer.update_hp_grads.
    """
    op = "update_hp_grads"
    check_operands(op, sum_squares=sum_squares, found_inf=found_inf, noop=noop)
    params, hps = as_sequence(op, "lp_params", lp_params), as_sequence(op, "hp_grads", hp_grads)
    if len(params) != len(hps):
        raise ValueError(f"{op}: expected as many hp_grads as lp_params, {len(params)}, got {len(hps)}")
    pairs = _pairs_by_device(params, hps)
    for destinations, sources, unused in pairs:
        for written in (destinations, sources, unused) if store else (destinations, sources):
            written.check_not_followed(op)
    is_traced = torch.compiler.is_compiling()  # the operators check, each for itself
    is_unused_concerned = store or sum_squares is not None or found_inf is not None
    is_several = len(pairs) > 1 or (is_unused_concerned and any(len(unused) for _, _, unused in pairs))
    if is_several and not is_traced:
        _check(pairs, store, sum_squares, found_inf, noop)
    for destinations, sources, unused in pairs:
        if len(destinations):
            destinations.accumulate_(sources, store, True, sum_squares, found_inf, noop)
        if not len(unused):
            continue
        if store and noop is None:
            unused.zero_()
        elif store:
            zeros = list_of([torch.zeros_like(tensor) for tensor in unused.tensors])
            unused.accumulate_(zeros, True, False, None, None, noop)
        elif sum_squares is not None:
            partial = unused.norm_partial(2.0)
            sum_squares.add_(partial if noop is None else partial * (noop == 0))


# Of one device: destinations, the gradients that go there, and destinations whose parameter has no gradient.
_List = _C.TensorList | TracedList
_Pairs = tuple[_List, _List, _List]


def _check(
    pairs: Sequence[_Pairs],
    store: bool,
    sum_squares: Tensor | None,
    found_inf: Tensor | None,
    noop: Tensor | None,
) -> None:
    """Raise what the ops on one of these lists will raise, before any is written; for destinations without a gradient
    what they would raise with one."""
    written = [destinations for destinations, _, _ in pairs]
    if store:
        written += [unused for _, _, unused in pairs]
    _C.check_distinct("multi_tensor_accumulate_", written, [sources for _, sources, _ in pairs])
    for destinations, sources, unused in pairs:
        if len(destinations):
            destinations.check_accumulate(sources, store, True, sum_squares, found_inf, noop)
        if len(unused) and (store or sum_squares is not None or found_inf is not None):
            unused.check_destinations(store, sum_squares, found_inf, noop)


def _pairs_by_device(params: Sequence[Tensor], hps: Sequence[Tensor]) -> list[_Pairs]:
    """The lists of each device; ``params`` and ``hps`` are [...] each."""
    note_grad_reads(params)
    pairs = None if torch.compiler.is_compiling() else _C.collect_pairs(params, hps)
    if pairs is not None:
        return [(pair.destinations, pair.sources, pair.unused) for pair in pairs]
    lists: dict[torch.device, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {}
    for number, (parameter, hp) in enumerate(zip(params, hps, strict=True)):
        lp, hp = _local(parameter.grad), _local(hp)
        destinations, sources, unused = lists.setdefault(hp.device, ([], [], []))
        if lp is None:
            unused.append(hp)
        else:
            _check_shapes_fit(number, lp, hp)
            destinations.append(hp)
            sources.append(lp)
    return [tuple(map(list_of, lists_of_device)) for lists_of_device in lists.values()]


def _check_shapes_fit(number: int, grad: Tensor, hp: Tensor) -> None:
    """Raise unless ``hp`` [...], ``hp_grads[number]``, is for ``grad`` [...]: csrc/multi_tensor/bindings.cpp does so
    for plain tensors that no compiler traces."""
    is_flat = grad.dim() == 1 or hp.dim() == 1
    if grad.numel() != hp.numel() if is_flat else grad.shape != hp.shape:
        raise ValueError(
            f"update_hp_grads: expected hp_grads[{number}] of shape {list(grad.shape)} or flat, got {list(hp.shape)}"
        )


def _local(tensor: Tensor | None) -> Tensor | None:
    """What is on this rank of ``tensor`` [...]."""
    return local_part(tensor)[0] if is_dtensor(tensor) else tensor
