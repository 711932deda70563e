"""What a callable does in its warm-up that a replay could not do, refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor

from te_graph.common.dispatch import is_strided, layout_name, storage_key
from te_graph.graphs.arguments.signature import ResultNest, subclass_of
from te_graph.graphs.capture.results import ResultLayout
from te_graph.graphs.guards.sources import Source, TensorReader, walk
from te_graph.graphs.tracing.explanations import WarmUpWatch
from te_graph.graphs.tracing.externals import External, TensorWatch
from te_graph.graphs.tracing.refusals import COPIES, READS_HOST_TENSOR, CaptureError, Refusal


def check_attributes(label: str, names: list[str], samples: list[Tensor], said: Set[str]) -> None:
    """Raise RuntimeError if one of ``samples`` [...] has an attribute put on it that the code has ``said``: the graph
    reads another tensor."""
    for name, sample in zip(names, samples, strict=True):
        if read := sorted(said & vars(sample).keys()):
            raise RuntimeError(
                f"{label}: sample {name} has an attribute {read[0]!r}, which the callable may read, and a replay would "
                "not see: pass its value as an argument"
            )


def forms_of(tensors: list[Tensor]) -> list[dict[str, Any]]:
    """What methods such as ``unsqueeze_`` and ``requires_grad_``, and assignments to attributes, change of ``tensors``
    [...] themselves."""
    return [
        {
            "shape": tensor.shape,
            "strides": tensor.stride(),
            "requires_grad": tensor.requires_grad and tensor.grad_fn is None,  # what is written in place may get it
            "attributes": {name: id(value) for name, value in vars(tensor).items()},
        }
        for tensor in tensors
    ]


def check_forms(label: str, names: list[str], before: list[dict[str, Any]], tensors: list[Tensor]) -> None:
    """Raise RuntimeError if one of the arguments ``tensors`` [...] has another form than ``before``."""
    for name, old, new in zip(names, before, forms_of(tensors), strict=True):
        if change := next((fact for fact, value in new.items() if value != old[fact]), None):
            raise RuntimeError(
                f"{label}: changes the {change} of {name} in place, which a replay would not do to the caller's: "
                "change a view or a detached copy (x = x.unsqueeze(0), x = x.detach())"
            )


def checked_results(label: str, result: Any, sources: Iterable[Source]) -> tuple[ResultNest, list[Tensor]]:
    """The nest of a ``result``, and its tensors [...]; containers that stand at ``sources`` are what they are.

    Raises:
        TypeError, RuntimeError: a part of it cannot be handed out as it is.
    """
    nest, tensors = ResultNest.of(label, result, reached={id(source.obj) for source in sources})
    _check_results(label, tensors)
    return nest, tensors


def _check_results(label: str, results: list[Tensor]) -> None:
    for number, tensor in enumerate(results):
        if not is_strided(tensor):
            raise TypeError(f"{label}: expected dense results, got result {number} of layout {layout_name(tensor)}")
        if kind := subclass_of(tensor):
            raise TypeError(f"{label}: expected result {number} to be a torch.Tensor, got a {kind}")
        if tensor.retains_grad and not tensor.is_leaf:
            raise RuntimeError(
                f"{label}: retain_grad() was called on result {number} inside the callable, and a replay leaves no "
                ".grad there: call it on the result that the callable returns"
            )
        is_cut_off = tensor.requires_grad and tensor.grad_fn is None and tensor._is_view()
        if is_cut_off and torch.is_grad_enabled():
            raise RuntimeError(
                f"{label}: result {number} is a view, made under torch.no_grad(), of a tensor that requires a "
                "gradient, and can have no gradient itself: return it detached"
            )


def check_made(
    label: str, results: list[Tensor], layout: ResultLayout, changed: list[Tensor], ignored: tuple[str, ...]
) -> None:
    """Raise RuntimeError if one of ``results`` [...] that are made at each call, as ``layout`` says, has what those of
    a replay would not have. Attributes called ``ignored`` need not be there. ``changed``: the arguments [...] among
    them.
    """
    for number, tensor in enumerate(results):
        if not layout.is_made(number) or any(tensor is argument for argument in changed):
            continue
        if name := next((name for name in vars(tensor) if name not in ignored), None):
            raise RuntimeError(
                f"{label}: result {number} has an attribute {name!r}, which the result of a replay would not have: "
                "return its value beside the tensor, or list it in ignore_attributes= to leave it out"
            )
        if tensor.is_leaf and tensor.requires_grad:
            raise RuntimeError(
                f"{label}: result {number} is a leaf that the callable makes (requires_grad_(), nn.Parameter), which "
                "the result of a replay would not be: return it detached, and let the caller make it one"
            )


def check_use(label: str, names: list[str], samples: list[Tensor], watch: TensorWatch, used: list[bool] | None) -> None:
    """Raise RuntimeError if one of ``samples`` [...], called ``names``, is modified, or requires a gradient and is not
    ``used``; None: that is allowed."""
    for sample, name in zip(samples, names, strict=True):
        if storage_key(sample) in watch.mutated_owned:
            op, site = watch.mutated_owned[storage_key(sample)]
            raise RuntimeError(
                f"{label}: {op} modifies {name} in place, which a replay could only do to its own copy: modify a "
                f"clone; at {site}"
            )
    if not torch.is_grad_enabled() or used is None:
        return
    for sample, name, is_used in zip(samples, names, used, strict=True):
        if sample.requires_grad and not is_used:
            raise RuntimeError(
                f"{label}: {name} requires a gradient but does not contribute to the results; pass "
                "allow_unused_input=True if that is meant"
            )


def check_nested(label: str, watch: WarmUpWatch) -> None:
    """Raise CaptureError if a callable uses nested tensors. CUDA need not tell: their sizes lie on the host."""
    if watch.nested is not None:
        raise CaptureError(f"{label}: {watch.nested}")


def check_devices(label: str, device: torch.device, sources: Iterable[Source], watch: WarmUpWatch) -> None:
    """Raise CaptureError if a callable on a GPU, ``device``, uses a CPU tensor from outside: a number that an operator
    takes from there is an argument of a kernel, and what works on it on the host is in no graph. But a copy of pinned
    memory is: it reads that memory anew."""
    if device.type == "cpu":
        return
    used = {key: (one.tensor, one.op, one.site) for key, one in watch.externals.items() if not _is_copied(one)}
    used |= {key: read for key, read in watch.host_reads.items() if key not in watch.produced_storages}
    for key, (tensor, op, site) in used.items():
        if tensor.device.type == "cpu":
            stands = (one for one in sources if isinstance(one.obj, Tensor) and is_strided(one.obj))
            name = next((f" of {one.name}" for one in stands if storage_key(one.obj) == key), "")
            raise CaptureError(f"{label}: {Refusal(op + name, READS_HOST_TENSOR, site)}")


def _is_copied(external: External) -> bool:
    return external.tensor.is_pinned() and any(f".{name}." in external.op for name in COPIES)


def check_escapes(label: str, root: Any, sources: Iterable[Source], watch: TensorWatch) -> None:
    """Refuse a tensor that is computed and left behind: a replay would not leave it there. It may be anywhere in what
    ``root`` holds, or at one of ``sources``, which its code names: a global variable, an attribute of a class."""
    for source in itertools.chain(walk(TensorReader(root)), sources):
        is_tensor = isinstance(source.obj, Tensor) and is_strided(source.obj)
        if is_tensor and storage_key(source.obj) in watch.produced_storages:
            raise RuntimeError(
                f"{label}: the callable leaves a tensor that it computed in {source.name}; a replay would not run that "
                "assignment: return the tensor, or write a buffer in place"
            )


def check_host_work(label: str, obstacle: str | None, effect: str | None, generator: str | None) -> None:
    """Refuse what Python did in the last warm-up and a replay would not do again: the ``effect`` that it had, the
    ``generator`` that it drew from. ``obstacle``: why its code cannot be compared at calls."""
    if obstacle:
        raise RuntimeError(f"{label}: {obstacle}")
    if generator is not None:
        raise RuntimeError(
            f"{label}: it draws from {generator}, and a replay would go on with the numbers of the capture: draw with "
            "torch, on the device (torch.rand)"
        )
    if effect is not None:
        raise RuntimeError(
            f"{label}: the forward changes {effect}, and a replay would not: count in a buffer that is written in "
            "place, change it outside, or list the attribute in ignore_attributes= to freeze it"
        )


def refuse_use_of_grad(
    label: str, sources: Iterable[Source], watch: TensorWatch, tensor: Tensor, hooking: str | None
) -> None:
    """Refuse that a callable uses ``.grad`` of ``tensor`` [...], or has autograd do something with its gradient by its
    method ``hooking``, unless it made that in the iteration of ``watch``.

    Raises:
        RuntimeError: names the tensor, if it is at one of ``sources``.
    """
    if is_strided(tensor) and storage_key(tensor) in watch.produced_storages:
        return
    name = next((source.name for source in sources if source.obj is tensor), "an argument or tensor outside")
    if hooking:
        raise RuntimeError(
            f"{label}: the forward calls {hooking}() of {name}, and a replay would neither do that nor run a hook that "
            "it puts there: do it outside of the callable"
        )
    raise RuntimeError(
        f"{label}: the forward uses .grad of {name}, and a replay would go on with what it was at capture, or "
        "leave the change out: call zero_grad(), or read gradients, outside of the callable"
    )
