"""The arguments of make_graphed_callables, checked before anything is run."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from te_graph import _C
from te_graph.common.capture_state import is_captured
from te_graph.common.dispatch import is_strided, layout_name
from te_graph.graphs.arguments.signature import Signature, subclass_of
from te_graph.graphs.capture.call_form import parameters_of
from te_graph.graphs.capture.options import Options
from te_graph.graphs.capture.wrappers import reason_to_refuse_module
from te_graph.graphs.graphed_class import plain_class

_NAME = "make_graphed_callables"


@dataclass(frozen=True)
class SeenGradients:
    """What a step has shown of the gradients that the results of a callable get.

    Attributes:
        orders: number of a result -> the order in which the dimensions of its gradient lie, where that is another one
            than its own.
        missing: numbers of the results that got none, where others got one.
    """

    orders: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    missing: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Job:
    """One callable to be captured.

    Attributes:
        sample: signature and tensors of its arguments; None: the results of the one before, and ``kwargs``, or, without
            samples, not known yet.
        parameters: of the callable, from ``parameters_of``.
        gradients: what is known of those that its results get.
    """

    label: str
    target: nn.Module | Callable[..., Any]
    sample: tuple[Signature, list[Tensor]] | None
    kwargs: dict[str, Any]
    parameters: inspect.Signature | None
    gradients: SeenGradients = SeenGradients()


@dataclass(frozen=True)
class Request:
    """What is to be captured.

    Attributes:
        jobs: one for each callable.
        is_tuple: a tuple of callables was given.
        device: of all tensors; None where there are no samples.
    """

    jobs: tuple[Job, ...]
    is_tuple: bool
    device: torch.device | None
    options: Options

    @classmethod
    def of(
        cls, callables: Any, sample_args: Any, sample_kwargs: Any, *, enable_annotations: bool, options: Options
    ) -> Request:
        """Check everything and collect it.

        Raises:
            TypeError, ValueError: an argument is wrong; names it, what was expected and what came.
            RuntimeError: a capture is under way, or inference mode is on.
        """
        if enable_annotations and "enable_annotations" not in inspect.signature(torch.cuda.graph.__init__).parameters:
            raise ValueError(f"{_NAME}: enable_annotations=True needs a newer torch, got {torch.__version__}")
        is_tuple = isinstance(callables, tuple)
        each = callables if is_tuple else (callables,)
        if not each:
            raise ValueError(f"{_NAME}: expected at least one callable, got an empty tuple")
        for number, target in enumerate(each):
            check_callable(target, f"callables[{number}]" if is_tuple else "callables", each[:number])
        labels = tuple(_label(target, number if is_tuple else None) for number, target in enumerate(each))
        if sample_args is None:
            _check_without_samples(sample_kwargs, options)
            late = zip(labels, each, map(parameters_of, each), strict=True)
            return cls(tuple(Job(label, one, None, {}, known) for label, one, known in late), is_tuple, None, options)
        chained = options.chain and is_tuple
        if chained and isinstance(sample_args, tuple) and not all(isinstance(one, tuple) for one in sample_args):
            sample_args = (sample_args,)  # the arguments of the first callable, as they are
        args = _one_for_each("sample_args", sample_args, is_tuple, len(each), tuple, may_be_fewer=chained)
        kwargs = _one_for_each("sample_kwargs", sample_kwargs, is_tuple, len(each), dict)
        given = [sample_of(*one) for one in zip(labels, args, kwargs, strict=False)]
        samples = tuple(given + [None] * (len(each) - len(given)))
        device = common_device(labels, each, [tensors for _, tensors in given])
        check_circumstances(device)
        jobs = zip(labels, each, samples, kwargs, map(parameters_of, each), strict=True)
        return cls(tuple(Job(*job) for job in jobs), is_tuple, device, options)


def sample_of(
    label: str, args: tuple, kwargs: dict[str, Any], device: torch.device | None = None
) -> tuple[Signature, list[Tensor]]:
    """Signature and tensors of sample arguments, which must be dense; of a call on ``device``, where one is given, also
    there and such that a replay can take them."""
    signature, tensors = Signature.of(label, args, kwargs)
    for name, tensor in zip(signature.distinct_names, tensors, strict=True):
        if not is_strided(tensor):
            raise ValueError(f"{label}: expected sample {name} to be dense, got layout {layout_name(tensor)}")
        if tensor.has_names():
            raise ValueError(f"{label}: expected sample {name} without names of dimensions, got {tensor.names}")
        if not tensor.is_meta and not _C.has_memory(tensor):
            raise ValueError(
                f"{label}: expected sample {name} to have memory of its own, got a {type(tensor).__name__}"
            )
        if kind := subclass_of(tensor):
            raise TypeError(f"{label}: expected sample {name} to be a torch.Tensor, got a {kind}")
        if device is not None and tensor.device != device:
            raise ValueError(f"{label}: expected sample {name} on {device}, got {tensor.device}")
        if device is not None and tensor.is_inference() and torch.is_grad_enabled():
            raise ValueError(f"{label}: expected sample {name} to be no inference tensor, since gradients are recorded")
    return signature, tensors


def check_callable(target: Any, name: str, earlier: tuple[Any, ...] = ()) -> None:
    """Refuse a ``target``, which messages call ``name``, that cannot be a callable, or is one of the ``earlier`` ones.

    Raises:
        TypeError, ValueError: says why.
    """
    if isinstance(target, torch.jit.ScriptModule):
        raise TypeError(
            f"{_NAME}: expected {name} to be written in Python, got a ScriptModule, which keeps its parameters where a "
            "guard cannot follow them: give the module that it was made of"
        )
    if not callable(target) or isinstance(target, type):
        hint = ": give a tuple(...) of it" if isinstance(target, Iterable) and not callable(target) else ""
        raise TypeError(
            f"{_NAME}: expected {name} to be an nn.Module, a function, or a tuple of them, got "
            f"{type(target).__name__}{hint}"
        )
    if isinstance(target, nn.Module) and getattr(target.forward, "__func__", None) is nn.Module.forward:
        hint = ": give a tuple of its modules" if isinstance(target, Iterable) else ""
        raise TypeError(f"{_NAME}: expected {name} to have a forward, got {type(target).__name__}{hint}")
    if getattr(target, "te_graph", None) is not None:
        kind = _kind_of(target)
        raise ValueError(f"{_NAME}: {name} ({kind}) is graphed already: call .te_graph.reset() on it first")
    if any(target is other for other in earlier):
        raise ValueError(f"{_NAME}: expected each callable once, got {name} again")
    if isinstance(target, nn.Module):
        for owner, tensor in (*target.named_parameters(), *target.named_buffers()):
            if is_lazy(tensor):
                raise ValueError(
                    f"{_NAME}: expected tensors with shapes, got {owner} of {name} ({_kind_of(target)}), which is not "
                    "initialised: call it once before the capture"
                )
        for owner, buffer in target.named_buffers():
            if buffer.requires_grad:
                raise ValueError(f"{_NAME}: expected buffers without gradients, got buffer {owner} of {name} with one")
        for path, module in target.named_modules():
            if (reason := reason_to_refuse_module(module)) is not None:
                whose = f"{path} of {name}" if path else f"{name} ({type(module).__name__})"
                raise TypeError(f"{_NAME}: {whose} cannot be captured: {reason}")
            if getattr(module, "te_graph", None) is not None:
                raise ValueError(
                    f"{_NAME}: {path} of {name} ({_kind_of(module)}) is graphed already: call .te_graph.reset() on it "
                    "first"
                )


def _check_without_samples(sample_kwargs: Any, options: Options) -> None:
    if sample_kwargs is not None:
        raise ValueError(f"{_NAME}: got sample_kwargs without sample_args: give sample_args=() where all are named")
    if options.chain:
        raise ValueError(
            f"{_NAME}: got chain=True without sample_args: the callables of a chain are captured together, before any "
            "of them is called; give sample_args of the first one, or use graph_layers, which finds chains"
        )


def _one_for_each(
    name: str, given: Any, is_tuple: bool, count: int, kind: type, may_be_fewer: bool = False
) -> tuple[Any, ...]:
    if given is None and kind is dict:
        return tuple({} for _ in range(count))
    each = given if is_tuple else (given,)
    if not isinstance(each, tuple | list):
        raise TypeError(f"{_NAME}: expected {name} to be a tuple, one entry per callable, got {type(given).__name__}")
    if len(each) != count and not (may_be_fewer and 0 < len(each) < count):
        raise ValueError(f"{_NAME}: expected {name} for {count} callables, got {len(each)}")
    for number, entry in enumerate(each):
        if not isinstance(entry, kind):
            which = f"{name}[{number}]" if is_tuple else name
            hint = ": write (x,) for one argument x" if kind is tuple else ""
            raise TypeError(f"{_NAME}: expected {which} to be a {kind.__name__}, got {type(entry).__name__}{hint}")
    return tuple(each)


def _kind_of(target: Any) -> str:
    """The class that a module has when it is not graphed, or the name of a function."""
    if isinstance(target, nn.Module):
        return plain_class(type(target)).__name__
    return getattr(target, "__name__", type(target).__name__)


def _label(target: Any, number: int | None) -> str:
    name = _kind_of(target)
    return name if number is None else f"callable {number} ({name})"


def common_device(labels: tuple[str, ...], callables: tuple[Any, ...], samples: list[list[Tensor]]) -> torch.device:
    """The one device of all samples, parameters and buffers; the CPU where there is no tensor."""
    device, owner = None, ""
    for number, (label, target) in enumerate(zip(labels, callables, strict=True)):
        tensors = samples[number] if number < len(samples) else []
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


def check_circumstances(device: torch.device, name: str = _NAME) -> None:
    """Refuse to capture where that cannot be right. ``name`` is what was called."""
    if is_captured(device):
        raise RuntimeError(f"{name}: called inside another capture")
    if torch.is_inference_mode_enabled():
        raise RuntimeError(f"{name}: called under torch.inference_mode(); use torch.no_grad()")
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled_autograd is not None and compiled_autograd.compiled_autograd_enabled:
        raise RuntimeError(f"{name}: called where compiled autograd is on, which traces each backward: turn it off")
