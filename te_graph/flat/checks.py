"""What cannot be flat, told by name before anything is changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from te_graph import _C
from te_graph.common.capture_state import is_captured
from te_graph.common.gradient_state import flat_of, main_grad_of
from te_graph.common.parameter_marks import is_split

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from te_graph.flat.flat_buffer import FlatBuffer

SHARDS = ("none", "optimizer")
_GRADIENTS_LIVE = (
    "FlatParameters: shard='grads' is not offered: until the last micro-batch a rank adds to the gradients of all "
    "parameters, and graphs hold their addresses; shard='optimizer' shards masters and optimizer state"
)


def named_parameters(module_or_params: Any) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Names and parameters [...] that require a gradient, and those that are frozen, each once.

    Raises:
        TypeError: ``module_or_params`` is neither a module nor an iterable of tensors.
        ValueError: none requires a gradient.
    """
    if isinstance(module_or_params, nn.Module):
        named = list(module_or_params.named_parameters())
    elif isinstance(module_or_params, Iterable) and not isinstance(module_or_params, Tensor):
        named = [_with_name(number, one) for number, one in enumerate(module_or_params)]
    else:
        raise TypeError(
            "FlatParameters: expected a module, or parameters with or without their names, got "
            f"{type(module_or_params).__name__}"
        )
    once = list(reversed({id(parameter): (name, parameter) for name, parameter in reversed(named)}.values()))
    chosen = [(name, parameter) for name, parameter in once if parameter.requires_grad]
    if not chosen:
        raise ValueError("FlatParameters: expected parameters that require a gradient, got none")
    return chosen, [(name, parameter) for name, parameter in once if not parameter.requires_grad]


def _with_name(number: int, member: Any) -> tuple[str, Tensor]:
    name, parameter = member if isinstance(member, tuple) and len(member) == 2 else (f"parameter {number}", member)
    if not isinstance(parameter, Tensor):
        raise TypeError(f"FlatParameters: expected parameters, got {type(parameter).__name__} as {name}")
    return str(name), parameter


def other_tensors(module_or_params: Any, named: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """What else a module has, frozen parameters and buffers [...] with their names, where it can be broadcast: dense,
    on the device of the ``named`` parameters."""
    if not isinstance(module_or_params, nn.Module):
        return []
    chosen, device = {id(parameter) for _, parameter in named}, named[0][1].device
    found = itertools.chain(module_or_params.named_parameters(), module_or_params.named_buffers())
    plain = [
        (name, one)
        for name, one in found
        if id(one) not in chosen and type(one) in (nn.Parameter, nn.Buffer, Tensor) and _is_there(one, device)
    ]
    return [(name, one) for name, one in ((name, _as_it_lies(one)) for name, one in plain) if _C.is_dense(one)]


def _is_there(tensor: Tensor, device: torch.device) -> bool:
    """Whether ``tensor`` [...] has memory on ``device`` that can be written."""
    is_strided = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_nested)
    return is_strided and tensor.device == device and tensor.numel() > 0 and not tensor.is_inference()


def _as_it_lies(tensor: Tensor) -> Tensor:  # [...] -> [...]
    """Over the memory of ``tensor``, which is its conjugate or its negative perhaps."""
    memory = tensor.detach()
    memory = memory.conj() if memory.is_conj() else memory
    return torch._neg_view(memory) if memory.is_neg() else memory


def check_places(buffers: Sequence[FlatBuffer]) -> None:
    """Raise RuntimeError if a parameter is no longer where ``buffers`` have it, naming it. Where all have become copies
    of themselves on the same CPU, they are put back."""
    change = _first_change(buffers)
    if change and not is_captured(buffers[0].data.device) and all(buffer.is_copied() for buffer in buffers):
        for buffer in buffers:
            buffer.put_back_()
        change = _first_change(buffers)
    if change:
        raise RuntimeError(
            f"FlatParameters: {change}: the flat buffers would not follow. Move, convert, freeze and load with "
            "assign=True before (.to('cpu:0') copies what is on 'cpu', too); call close() first where that comes later"
        )


def _first_change(buffers: Iterable[FlatBuffer]) -> str:
    return next(filter(None, (buffer.all_gradients.first_change() for buffer in buffers)), "")


def check_parameters(named: Sequence[tuple[str, Tensor]], grad_dtype: torch.dtype) -> None:
    """Raise unless all ``named`` parameters [...] can lie in flat buffers.

    Args:
        grad_dtype: of gradients.

    Raises:
        ValueError, TypeError: what is expected of the first one that cannot, and what it is.
        RuntimeError: a capture is under way.
    """
    first_name, first = named[0]
    if is_captured(first.device):
        raise RuntimeError("FlatParameters: expected to be made before a capture, not inside of one")
    for name, parameter in named:
        _check_kind(name, parameter)
        if parameter.device != first.device:
            raise ValueError(
                f"FlatParameters: expected all parameters on one device, got {name} on {parameter.device} and "
                f"{first_name} on {first.device}"
            )
        if torch.promote_types(parameter.dtype, grad_dtype) != grad_dtype:
            raise ValueError(
                f"FlatParameters: expected grad_dtype to hold the gradient of {name}, {parameter.dtype}, got "
                f"{grad_dtype}"
            )
        if flat_of(parameter) is not None:
            raise ValueError(
                f"FlatParameters: {name} is in another FlatParameters already: call close() of that one first"
            )
        if getattr(parameter, "grad_dtype", parameter.dtype) not in (None, parameter.dtype):
            raise ValueError(
                f"FlatParameters: expected {name}.grad_dtype to be {parameter.dtype}, got {parameter.grad_dtype}: "
                "FlatParameters(grad_dtype=...) keeps gradients of another dtype, in main_grad"
            )
        for which, grad in (("grad", parameter.grad), ("main_grad", main_grad_of(parameter))):
            if grad is not None and (grad.layout != torch.strided or grad.shape != parameter.shape):
                raise ValueError(
                    f"FlatParameters: expected {name}.{which} to be dense and of shape {list(parameter.shape)}, got "
                    f"layout {grad.layout} and shape {list(grad.shape)}"
                )
    _check_apart(named)


def _check_apart(named: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ValueError if two of ``named`` parameters [...], which are dense, share memory."""
    places = sorted(
        (parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes, name)
        for name, parameter in named
        if parameter.numel() > 0
    )
    for (_, end, name), (begin, _, other) in itertools.pairwise(places):
        if begin < end:
            raise ValueError(
                f"FlatParameters: expected parameters that share no memory, got {name} and {other}, which would be "
                "apart in a flat buffer: tie them by making them one Parameter"
            )


def _check_kind(name: str, parameter: Tensor) -> None:
    def refuse(expected: str, got: Any) -> None:
        raise TypeError(f"FlatParameters: expected {name} to be {expected}, got {got}")

    if type(parameter) not in (nn.Parameter, Tensor):
        refuse("a torch.nn.Parameter", f"{type(parameter).__name__}, whose memory is its own to lay out")
    if not parameter.is_leaf:
        refuse("a leaf", f"the result of {type(parameter.grad_fn).__name__}")
    if parameter.layout != torch.strided:
        refuse("dense", f"one of layout {parameter.layout}")
    if parameter.is_inference():
        refuse("made outside of inference mode", "an inference tensor")
    if parameter.device.type == "meta":
        refuse("on a device", "one on meta: materialize the model before")
    if not (parameter.is_floating_point() and not parameter.is_quantized):
        refuse("of a floating-point dtype", f"{parameter.dtype}")
    if not _C.is_dense(parameter):
        refuse("without gaps", f"strides {list(parameter.stride())} for shape {list(parameter.shape)}")


def check_shard(shard: str) -> None:
    """Raise ValueError unless ``shard`` is one of ``SHARDS``."""
    if shard == "grads":
        raise ValueError(_GRADIENTS_LIVE)
    if shard not in SHARDS:
        raise ValueError(f"FlatParameters: expected shard to be one of {SHARDS}, got {shard!r}")


def check_overlap_param_gather(modules: Any, shard: str, named: Sequence[tuple[str, Tensor]]) -> dict[str, nn.Module]:
    """The ``modules`` that are to wait for their parameters, by what tells them apart on all ranks.

    Raises:
        TypeError, ValueError: they are none, have none of ``named`` parameters [...], or nothing is gathered.
    """
    if isinstance(modules, nn.Module) and not isinstance(modules, Iterable):
        raise TypeError(
            f"FlatParameters: expected overlap_param_gather to be modules in a list, got {type(modules).__name__}"
        )
    names = {id(parameter): name for name, parameter in named}
    found = {}
    for number, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"FlatParameters: expected overlap_param_gather to be modules, got {type(module).__name__} as number "
                f"{number}"
            )
        if getattr(module.forward, "__func__", None) is nn.Module.forward:
            raise ValueError(
                f"FlatParameters: expected modules in overlap_param_gather that are called, got a "
                f"{type(module).__name__} as number {number}: list its members"
            )
        own = [names[id(parameter)] for parameter in module.parameters() if id(parameter) in names]
        if not own:
            raise ValueError(
                "FlatParameters: expected modules in overlap_param_gather to have parameters that are to be flat, got "
                f"{type(module).__name__} without one as number {number}"
            )
        found[f"overlap_param_gather {number} of {len(own)} from {own[0]} to {own[-1]}"] = module
    if found and shard == "none":
        raise ValueError(
            "FlatParameters: expected shard='optimizer' with overlap_param_gather, got 'none': nothing is gathered then"
        )
    return found


def check_reduce_dtype(reduce_dtype: torch.dtype | None, grad_dtype: torch.dtype) -> None:
    """Raise ValueError unless gradients of ``grad_dtype`` can be sent as ``reduce_dtype``; None: as they are."""
    if reduce_dtype in (None, grad_dtype) or (grad_dtype, reduce_dtype) == (torch.float32, torch.bfloat16):
        return
    raise ValueError(
        "FlatParameters: expected reduce_dtype to be grad_dtype, or torch.bfloat16 for torch.float32, got "
        f"{reduce_dtype} for {grad_dtype}"
    )


def check_grad_dtype(grad_dtype: torch.dtype, process_group: ProcessGroup | None) -> None:
    """Raise ValueError unless a ``PeerGroup`` over ``process_group`` can add what is of ``grad_dtype``."""
    is_alone = process_group is None or process_group.size() == 1
    if not is_alone and grad_dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            "FlatParameters: expected grad_dtype to be torch.float32, torch.float16 or torch.bfloat16 on several "
            f"ranks, got {grad_dtype}"
        )


def check_mesh(mesh: DeviceMesh | None, device: torch.device) -> None:
    """Raise ValueError unless ``mesh``, if there is one, is of the kind of ``device``, where parameters are."""
    if mesh is not None and mesh.device_type != device.type:
        raise ValueError(
            f"FlatParameters: expected mesh to be of the parameters' device, {device.type}, got {mesh.device_type}"
        )


def check_tp_group(
    named: Sequence[tuple[str, Tensor]], tp_group: ProcessGroup | None, reduced_over: Sequence[ProcessGroup]
) -> None:
    """Raise ValueError unless ``named`` parameters [...] are marked where they are split over ``tp_group``, and only
    there, and this rank is the only one that it has in common with groups that gradients are ``reduced_over``."""
    split = next((name for name, parameter in named if is_split(parameter)), None)
    if tp_group is None:
        if split is not None:
            raise ValueError(
                f"FlatParameters: expected tp_group, since {split} is marked tensor_model_parallel: norms of gradients "
                "are taken over its ranks"
            )
        return
    if split is None and tp_group.size() > 1:
        raise ValueError(
            "FlatParameters: expected parameters that are marked tensor_model_parallel with a tp_group, got none: what "
            "all of its ranks have is not added over it"
        )
    for process_group in reduced_over:
        common = set(dist.get_process_group_ranks(tp_group)) & set(dist.get_process_group_ranks(process_group))
        if len(common) > 1:
            raise ValueError(
                f"FlatParameters: expected tp_group to have one rank in common with process_group or mesh, got "
                f"{sorted(common)}: gradients of what is split are no mean over tp_group"
            )


def described(named: Sequence[tuple[str, Tensor]]) -> list[str]:
    """What has to be alike on all ranks of ``named`` parameters [...]."""
    return [
        f"{name} {list(parameter.shape)} {parameter.dtype}{' split' if is_split(parameter) else ''}"
        for name, parameter in named
    ]
