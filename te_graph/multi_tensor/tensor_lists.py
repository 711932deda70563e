"""Lists of tensors for the multi-tensor ops: taken apart by device, tensor subclasses unwrapped."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from te_graph import _C
from te_graph.multi_tensor.traced_lists import TracedList, list_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass
class Part:
    """Tensors, [...] each, of one device, whose norm is shared with the ranks of the same process groups.

    Attributes:
        tensors: the local tensors.
        groups: the groups over which other parts of the same tensors lie.
    """

    tensors: _C.TensorList | TracedList
    groups: Sequence[ProcessGroup] = ()


@dataclass
class _Builder:
    """Collects the parts of a list that holds more than plain tensors, for a p-norm in ``op``."""

    op: str
    p: float
    tensors: dict[tuple, list[Tensor]] = field(default_factory=dict)
    groups: dict[tuple, tuple[ProcessGroup, ...]] = field(default_factory=dict)

    def add(self, tensor: Tensor) -> None:
        """Enter ``tensor`` [...]; of a DTensor what is on this rank."""
        groups: tuple[ProcessGroup, ...] = ()
        if is_dtensor(tensor):
            tensor, groups = local_part(tensor)
        if tensor.is_complex():
            if self.p != 2:
                raise TypeError(f"{self.op}: expected complex tensors with norm_type 2 only, got norm_type {self.p}")
            # What is to be conjugated has the norm of what lies in its memory, and is scaled by as much.
            tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
        key = (tensor.device, *(group.group_name for group in groups))
        self.tensors.setdefault(key, []).append(tensor)
        self.groups[key] = groups

    def parts(self) -> list[Part]:
        return [Part(list_of(tensors), self.groups[key]) for key, tensors in self.tensors.items()]


def is_dtensor(tensor: Any) -> bool:
    """True for DTensors, without importing them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Any) -> tuple[Tensor, tuple[ProcessGroup, ...]]:
    """What a DTensor [...] holds on this rank, and the groups over whose ranks the rest lies."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"expected a DTensor that is sharded or replicated, got placements {tensor.placements}: "
            "redistribute() it first"
        )
    groups = tuple(
        tensor.device_mesh.get_group(dimension)
        for dimension, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    )
    local = tensor._local_tensor
    return (local.wait() if hasattr(local, "wait") else local), groups


def note_grad_reads(tensors: Iterable[Tensor]) -> None:
    """Called before C++ reads ``.grad`` of ``tensors``, [...] each: in a capture Python reads it, too, whose watch sees
    which gradients matter, those included that are not there yet."""
    if not torch.compiler.is_compiling() and _C.in_session():
        for tensor in tensors:
            _ = tensor.grad


def parts_of(op: str, tensors: Sequence[Tensor], gradients: bool, p: float = 2.0) -> list[Part]:
    """The tensors, [...] each, or their gradients where they have one, by device and process groups, for a p-norm in
    ``op``."""
    if gradients:
        note_grad_reads(tensors)
    lists = None if torch.compiler.is_compiling() else _C.collect(tensors, gradients)
    if lists is not None:
        return [Part(tensors) for tensors in lists]
    builder = _Builder(op, p)
    for tensor in tensors:
        tensor = tensor.grad if gradients else tensor
        if tensor is not None:
            builder.add(tensor)
    return builder.parts()


def moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """``tensor`` [...] on ``device``. Copies to the CPU are waited for: what is there is read at once."""
    return tensor.to(device, dtype, non_blocking=device.type != "cpu")


def as_sequence(op: str, name: str, tensors: Tensor | Iterable[Tensor]) -> Sequence[Tensor]:
    """One tensor [...], or any iterable of them, as a list or tuple: the argument ``name`` of ``op``."""
    if isinstance(tensors, Tensor):
        return [tensors]
    if isinstance(tensors, list | tuple):
        return tensors
    try:
        items = iter(tensors)
    except TypeError:
        advice = ": pass its parameters()" if isinstance(tensors, nn.Module) else ""
        raise TypeError(
            f"{op}: expected {name} to be a tensor or an iterable of them, got {type(tensors).__name__}{advice}"
        ) from None
    return list(items)


def as_number(op: str, name: str, value: Any) -> float:
    """``value``, the argument ``name`` of ``op``, as a float."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(f"{op}: expected {name} to be a number, got {value!r:.100}") from error


def as_norm_type(op: str, value: Any) -> float:
    """``value``, the argument ``norm_type`` of ``op``, as a float: 0, positive or ``inf``."""
    norm_type = as_number(op, "norm_type", value)
    if not norm_type >= 0:
        raise ValueError(f"{op}: expected norm_type to be 0, positive or inf, got {value!r:.100}")
    return norm_type


def check_operands(op: str, **operands: Any) -> None:
    """Raise TypeError unless each is a tensor, [...], or None."""
    for name, operand in operands.items():
        if not (operand is None or isinstance(operand, Tensor)):
            raise TypeError(f"{op}: expected {name} to be a tensor, got {type(operand).__name__}")


def check_members(op: str, name: str, members: Sequence[Any]) -> None:
    """Raise TypeError unless each is a tensor, [...]."""
    for number, member in enumerate(members):
        if not isinstance(member, Tensor):
            raise TypeError(f"{op}: expected {name}[{number}] to be a tensor, got {type(member).__name__}")
