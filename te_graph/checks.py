"""The arguments of make_graphed_callables, checked before anything is run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from te_graph.backends import ERROR_MODES
from te_graph.capturing import is_capturing
from te_graph.signature import Signature

_NAME = "make_graphed_callables"


@dataclass(frozen=True)
class Request:
    """What is to be captured: one entry per callable in each tuple."""

    callables: tuple[nn.Module | Callable[..., Any], ...]
    labels: tuple[str, ...]
    signatures: tuple[Signature, ...]
    samples: tuple[list[Tensor], ...]
    is_tuple: bool
    device: torch.device
    num_warmup_iters: int
    allow_unused_input: bool
    pool: Any
    capture_error_mode: str
    max_in_flight: int
    accumulate_grads: bool
    grad_dtype: torch.dtype | None
    show_progress: bool | None

    @classmethod
    def of(
        cls, callables: Any, sample_args: Any, sample_kwargs: Any, *, enable_annotations: bool, **options: Any
    ) -> Request:
        """Check everything and collect it.

        Raises:
            TypeError, ValueError: an argument is wrong; names it, what was expected and what came.
            RuntimeError: a capture is under way, or autocast caches weights.
        """
        _check_options(enable_annotations=enable_annotations, **options)
        is_tuple = isinstance(callables, tuple)
        each = callables if is_tuple else (callables,)
        if not each:
            raise ValueError(f"{_NAME}: expected at least one callable, got an empty tuple")
        for number, target in enumerate(each):
            _check_callable(target, f"callables[{number}]" if is_tuple else "callables", each[:number])
        args = _one_for_each("sample_args", sample_args, is_tuple, len(each), tuple)
        kwargs = _one_for_each("sample_kwargs", sample_kwargs, is_tuple, len(each), dict)
        labels = tuple(_label(target, number if is_tuple else None) for number, target in enumerate(each))
        signatures, samples = [], []
        for label, one_args, one_kwargs in zip(labels, args, kwargs, strict=True):
            signature, tensors = Signature.of(one_args, one_kwargs)
            for name, tensor in zip(signature.distinct_names, tensors, strict=True):
                if tensor.layout != torch.strided:
                    raise ValueError(f"{label}: expected sample {name} to be dense, got layout {tensor.layout}")
            signatures.append(signature)
            samples.append(tensors)
        device = _common_device(labels, each, samples)
        _check_circumstances(device)
        return cls(each, labels, tuple(signatures), tuple(samples), is_tuple, device, **options)


def _check_options(
    *,
    num_warmup_iters: int,
    allow_unused_input: bool,
    pool: Any,
    capture_error_mode: str,
    enable_annotations: bool,
    max_in_flight: int,
    accumulate_grads: bool,
    grad_dtype: torch.dtype | None,
    show_progress: bool | None,
) -> None:
    if capture_error_mode not in ERROR_MODES:
        raise ValueError(f"{_NAME}: expected capture_error_mode in {ERROR_MODES}, got {capture_error_mode!r}")
    for name, value, least in (("num_warmup_iters", num_warmup_iters, 0), ("max_in_flight", max_in_flight, 1)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{_NAME}: expected {name} to be an int, got {type(value).__name__}")
        if value < least:
            raise ValueError(f"{_NAME}: expected {name} >= {least}, got {value}")
    for name, value in (("allow_unused_input", allow_unused_input), ("accumulate_grads", accumulate_grads)):
        if not isinstance(value, bool):
            raise TypeError(f"{_NAME}: expected {name} to be a bool, got {type(value).__name__}")
    if show_progress is not None and not isinstance(show_progress, bool):
        raise TypeError(f"{_NAME}: expected show_progress to be a bool or None, got {type(show_progress).__name__}")
    if pool is not None and not (isinstance(pool, tuple) and [type(part) for part in pool] == [int, int]):
        raise TypeError(
            f"{_NAME}: expected pool to be what torch.cuda.graph_pool_handle() returns (or the id of a "
            f"torch.cuda.MemPool), got {type(pool).__name__}"
        )
    if grad_dtype is not None and not (isinstance(grad_dtype, torch.dtype) and grad_dtype.is_floating_point):
        raise TypeError(f"{_NAME}: expected grad_dtype to be a floating point torch.dtype, got {grad_dtype!r}")
    if enable_annotations and "enable_annotations" not in inspect.signature(torch.cuda.graph.__init__).parameters:
        raise ValueError(f"{_NAME}: enable_annotations=True needs a newer torch, got {torch.__version__}")


def _check_callable(target: Any, name: str, earlier: tuple[Any, ...]) -> None:
    if isinstance(target, torch.jit.ScriptModule) or not callable(target) or isinstance(target, type):
        raise TypeError(
            f"{_NAME}: expected {name} to be an nn.Module, a function, or a tuple of them, got {type(target).__name__}"
        )
    if getattr(target, "te_graph", None) is not None:
        raise ValueError(f"{_NAME}: expected {name} not to be graphed yet, got one: call .te_graph.reset() on it first")
    if any(target is other for other in earlier):
        raise ValueError(f"{_NAME}: expected each callable once, got {name} again")
    if isinstance(target, nn.Module):
        for owner, buffer in target.named_buffers():
            if buffer.requires_grad:
                raise ValueError(f"{_NAME}: expected buffers without gradients, got buffer {owner} of {name} with one")
        for path, module in target.named_modules():
            if getattr(module, "te_graph", None) is not None:
                raise ValueError(
                    f"{_NAME}: expected modules that are not graphed yet, got {path} of {name}: call .te_graph.reset() "
                    "on it first"
                )


def _one_for_each(name: str, given: Any, is_tuple: bool, count: int, kind: type) -> tuple[Any, ...]:
    if given is None and kind is dict:
        return tuple({} for _ in range(count))
    each = given if is_tuple else (given,)
    if not isinstance(each, tuple | list):
        raise TypeError(f"{_NAME}: expected {name} to be a tuple, one entry per callable, got {type(given).__name__}")
    if len(each) != count:
        raise ValueError(f"{_NAME}: expected {name} for {count} callables, got {len(each)}")
    for number, entry in enumerate(each):
        if not isinstance(entry, kind):
            which = f"{name}[{number}]" if is_tuple else name
            raise TypeError(f"{_NAME}: expected {which} to be a {kind.__name__}, got {type(entry).__name__}")
    return tuple(each)


def _label(target: Any, number: int | None) -> str:
    kind = type(target).__name__
    name = kind if isinstance(target, nn.Module) else getattr(target, "__name__", kind)
    return name if number is None else f"callable {number} ({name})"


def _common_device(labels: tuple[str, ...], callables: tuple[Any, ...], samples: list[list[Tensor]]) -> torch.device:
    """The one device of all samples, parameters and buffers; the CPU where there is no tensor."""
    device, owner = None, ""
    for label, target, tensors in zip(labels, callables, samples, strict=True):
        named = [(f"a sample of {label}", tensor) for tensor in tensors]
        if isinstance(target, nn.Module):
            named += [(f"{name} of {label}", p) for name, p in (*target.named_parameters(), *target.named_buffers())]
        for name, tensor in named:
            if device is None:
                device, owner = tensor.device, name
            elif tensor.device != device:
                raise ValueError(
                    f"{_NAME}: expected all tensors on one device, got {owner} on {device} and {name} on "
                    f"{tensor.device}"
                )
    device = device or torch.device("cpu")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{_NAME}: expected tensors on cpu or cuda, got {owner} on {device}")
    return device


def _check_circumstances(device: torch.device) -> None:
    if is_capturing() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        raise RuntimeError(f"{_NAME}: called inside another capture")
    if torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled():
        raise RuntimeError(
            f"{_NAME}: expected autocast without its weight cache, whose tensors would not survive the capture: use "
            "torch.autocast(..., cache_enabled=False)"
        )
    if torch.is_inference_mode_enabled():
        raise RuntimeError(f"{_NAME}: called under torch.inference_mode(); use torch.no_grad()")
