"""What is watched while a function runs that ``graphed`` is to capture: its devices, its tensors, its host work."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from te_graph.common.dispatch import (
    base_name,
    has_subclass,
    is_in_backward,
    is_operator,
    is_shape_of_zero,
    is_strided,
    storage_key,
    tells_of_writes,
    tensors_in,
    written_tensors,
)
from te_graph.graphs.tracing.externals import TensorWatch
from te_graph.graphs.tracing.host_access import USES_OF_GRAD, MethodWatch
from te_graph.graphs.tracing.refusals import (
    BUILDS_ON_HOST,
    COPIES,
    LEAVES_DEVICE,
    READS_HOST_TENSOR,
    READS_VALUE,
    CaptureError,
    HostAccessMode,
    Refusals,
    first_line,
    is_about_captures,
    reason_for_no_graph,
)

_ADDS_HISTORY = (
    "it adds to what autograd knows of a tensor from outside, which each call would do and a replay does not: write a "
    "detached value (value.detach(), torch.no_grad()), or return the result"
)
_DRAWS_ON_HOST = "it draws random numbers on the CPU, and a replay would go on with those of the capture"
_BUILDERS = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor})


class RegionWatch(TensorWatch):
    """A ``TensorWatch`` that notes the devices and, for a capture on a GPU, refuses work of the host.

    CPU tensors that the region makes from constants are constants of the capture and may be used; what else happens on
    the CPU, or between CPU and GPU, a replay would leave out. Errors that CUDA raises besides name the operation.

    Args:
        device: of a capture on a GPU; None: no work of the host is refused here.
        restorable: as for ``TensorWatch``.
        is_capture: refuse what gives a tensor from outside a history.

    Attributes:
        devices: where the tensors are that the region has used or made.
        multiplies: it has multiplied matrices.
        runs_backward: autograd has computed gradients.
        told_writes: identities of the storages whose version counters it has moved on, or ought to have.
    """

    def __init__(self, device: torch.device | None = None, restorable: bool = False, is_capture: bool = False) -> None:
        super().__init__(restorable=restorable)
        self.devices: set[torch.device] = set()
        self.multiplies = False
        self.runs_backward = False
        self.told_writes: set[int] = set()
        self._device = device
        self._is_capture = is_capture
        self.refusals = Refusals()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if kind is None and self.refusals.first is not None:
            raise CaptureError(self.refusals.first)

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if has_subclass(types):
            return NotImplemented
        if self._device is not None and (reason := self._reason_to_refuse(func, args, kwargs)) is not None:
            raise self.refusals.error(str(func), reason)
        if self._is_capture and self._adds_history(func, args, kwargs):
            raise self.refusals.error(str(func), _ADDS_HISTORY)
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except RuntimeError as error:
            if self._device is None or not is_about_captures(error):
                raise
            raise self.refusals.error(str(func), first_line(error)) from error
        used = tensors_in((args, kwargs, result))
        self.devices.update(tensor.device for tensor in used if not is_shape_of_zero(tensor))
        self.runs_backward |= is_in_backward()
        if is_operator(func) and tells_of_writes(func):
            written = (tensor for tensor, _ in written_tensors(func, args, kwargs) if is_strided(tensor))
            self.told_writes.update(map(storage_key, written))
        self.multiplies |= is_operator(func) and any(part in base_name(func) for part in ("mm", "mv", "dot", "linear"))
        return result

    def _reason_to_refuse(self, func: Any, args: tuple, kwargs: dict) -> str | None:
        if not is_operator(func):
            return reason_for_no_graph(func, args, kwargs, self._device)
        if base_name(func) == "lift_fresh":
            return None  # built from Python data this very moment; DeviceAccessMode tells where that copies
        tensors = list(tensors_in((args, kwargs)))
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if any(map(is_shape_of_zero, tensors)) or (target == "meta" and is_in_backward()):
            return None
        on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        if not all(self._is_constant(tensor) for tensor in on_host):
            return READS_HOST_TENSOR
        for tensor in tensors:
            if tensor.device.type != "cpu" and tensor.device != self._device:
                return f"it uses a tensor on {tensor.device} in a capture on {self._device}"
        is_on_device = len(on_host) < len(tensors) if tensors else target not in (None, "cpu")
        if not is_on_device:
            if target not in (None, "cpu"):
                return LEAVES_DEVICE
            return _DRAWS_ON_HOST if torch.Tag.nondeterministic_seeded in func.tags else None
        mixes = on_host and (base_name(func) in COPIES or any(tensor.dim() > 0 for tensor in on_host))
        if mixes or target not in (None, self._device.type):
            return LEAVES_DEVICE
        return reason_for_no_graph(func, args, kwargs, self._device)

    def _adds_history(self, func: Any, args: tuple, kwargs: dict) -> bool:
        """Whether autograd will note, after it, that a tensor from outside was changed. Running statistics and the like
        are written by operators that are not in place, and have no history."""
        if not (torch.is_grad_enabled() and is_operator(func) and base_name(func).endswith("_")):
            return False
        if not any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
            return False
        written = (tensor for tensor, _ in written_tensors(func, args, kwargs) if is_strided(tensor))
        return any(
            (tensor.is_floating_point() or tensor.is_complex()) and storage_key(tensor) not in self.produced_storages
            for tensor in written
        )

    def _is_constant(self, tensor: Tensor) -> bool:
        return is_strided(tensor) and storage_key(tensor) in self.produced_storages


class GradUses(MethodWatch):
    """Sees of which tensors a region reads, sets or deletes the ``.grad``: without one to begin with, that leaves none.

    Attributes:
        used: their identities, those that are gone by now included.
    """

    def __init__(self) -> None:
        self.used: set[int] = set()

    def see(self, func: Any, args: tuple, kwargs: dict) -> None:
        if func in USES_OF_GRAD:
            self.used.add(id(args[0]))


class DeviceAccessMode(HostAccessMode):
    """What ``HostAccessMode`` refuses, and tensors built from Python data on the device: they are copied there."""

    def __torch_function__(self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _BUILDERS and _leaves_host(func, args, kwargs):
            raise self._refusals.error(f"torch.{func.__name__}", BUILDS_ON_HOST)
        if func in _BUILDERS and _reads_device(func, args, kwargs):
            raise self._refusals.error(f"torch.{func.__name__}", READS_VALUE)
        if all(isinstance(arg, Tensor) and arg.device.type == "cpu" for arg in args[:1]) and args:
            return func(*args, **kwargs)  # of constants: see RegionWatch
        return super().__torch_function__(func, types, args, kwargs)


def _data_of(func: Any, args: tuple, kwargs: dict) -> Any:
    if func is torch.Tensor.new_tensor:
        return args[1] if len(args) > 1 else kwargs["data"]
    return args[0] if args else kwargs.get("data", kwargs.get("obj"))


def _reads_device(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether it takes the values of tensors on a device out of a list."""
    data = _data_of(func, args, kwargs)
    return not isinstance(data, Tensor) and any(tensor.device.type != "cpu" for tensor in tensors_in(data))


def _leaves_host(func: Any, args: tuple, kwargs: dict) -> bool:
    data = _data_of(func, args, kwargs)
    default = args[0].device if func is torch.Tensor.new_tensor else torch.get_default_device()
    device = torch.device(kwargs.get("device") or default)
    return device.type != "cpu" and not (isinstance(data, Tensor) and data.device.type == device.type)
