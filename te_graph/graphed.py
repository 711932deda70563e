"""make_graphed_callables: capture modules and functions, and let their calls replay."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from te_graph.checks import Request
from te_graph.handle import Handle, install
from te_graph.session import capture_all

GraphCallable = nn.Module | Callable[..., Any]


def make_graphed_callables(
    callables: GraphCallable | tuple[GraphCallable, ...],
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
    capture_error_mode: str = "thread_local",
    enable_annotations: bool = False,
    *,
    sample_kwargs: dict[str, Any] | tuple[dict[str, Any], ...] | None = None,
    max_in_flight: int = 1,
    accumulate_grads: bool = True,
    grad_dtype: torch.dtype | None = None,
    show_progress: bool | None = None,
) -> Any:
    """Capture the forward and backward of callables, and return callables that replay them.

    Takes what ``torch.cuda.make_graphed_callables`` takes; switching over is changing the import. Replays equal eager
    execution bit for bit, and weight gradients are accumulated inside the backward graph into the ``.grad`` that the
    user sees: ``p.grad += g``, or ``p.grad = g`` where it was None, whatever was done to it before.

    On a GPU the graphs are CUDA graphs. Where all tensors are on the CPU, ``te_graph.Recorder`` takes their place: it
    freezes and refuses what a CUDA graph would, so a program can be tried without a GPU.

    Args:
        callables: a module or function, or a tuple of them. Modules are graphed in place and stay modules: parameters,
            ``state_dict``, ``train``, ``eval``, hooks and saving work; a copied or loaded module is eager.
        sample_args: the positional arguments of the callable, or a tuple of them for each: nests of tensors and
            constants, with shapes, dtypes, devices and requires_grad of the later calls. Their values do not matter
            and they are not written to.
        num_warmup_iters: eager iterations before the capture; at least one is run.
        allow_unused_input: let a sample that requires a gradient contribute to no result.
        pool: memory pool (``torch.cuda.graph_pool_handle()``) for what is born and freed inside backward graphs;
            a new one if None. Sharing one with graphs of your own follows torch's rule: same order, no overlap.
        capture_error_mode: "thread_local", "global" or "relaxed", as for ``torch.cuda.graph``.
        enable_annotations: as in torch; needs a torch whose ``torch.cuda.graph`` has it.
        sample_kwargs: the keyword arguments, or a tuple of them for each callable.
        max_in_flight: how many forwards of one callable may wait for their backward at a time. Each costs a graph pair
            and the memory of its activations.
        accumulate_grads: False hands parameter gradients to autograd, as tensors of their own, instead of accumulating
            them in the graph. Parameters with hooks and parameters that several callables use are always handled so.
        grad_dtype: accumulate into ``p.main_grad`` of this dtype, created where it is missing and the parameter has
            another dtype; ``.grad`` stays None. A parameter that has a ``main_grad`` is accumulated there in any case.
        show_progress: show a progress bar; None: when several callables are captured on a terminal.

    Returns:
        What replays: the module itself, or a function; a tuple of them if a tuple was given. Each has ``.te_graph``
        with ``info()`` and ``reset()``. Results are fresh tensors over memory of the graph. They keep their values for
        as long as they are held: before a replay overwrites the memory of one, it is moved to memory of its own.

        A call runs eagerly in the other training mode or grad mode than at capture, inside another capture, and with
        ``TE_GRAPH_DISABLE=1``.

    Raises:
        TypeError, ValueError: an argument is wrong; names it, what was expected and what came.
        RuntimeError: a callable cannot be captured. Everything is then as it was before.
        CaptureError: the recorder met an operation that a CUDA graph cannot hold; names the user's line.

        Calls raise ValueError when their arguments are not as at capture, and RuntimeError when something that the
        graph takes for granted has changed (an address, a flag, a setting), naming it, or when more than
        ``max_in_flight`` forwards wait for their backward.

    Stream and capture: synchronizes the device. Replays go to the current stream and wait for the last replay of the
        same call of this function if that was on another. They do not allocate, except for a result that the user
        still holds and for new ``.grad`` tensors, and do not synchronize.
    """
    request = Request.of(
        callables,
        sample_args,
        sample_kwargs,
        enable_annotations=enable_annotations,
        num_warmup_iters=num_warmup_iters,
        allow_unused_input=allow_unused_input,
        pool=pool,
        capture_error_mode=capture_error_mode,
        max_in_flight=max_in_flight,
        accumulate_grads=accumulate_grads,
        grad_dtype=grad_dtype,
        show_progress=show_progress,
    )
    handles = [Handle(label, target) for label, target in zip(request.labels, request.callables, strict=True)]
    if os.environ.get("TE_GRAPH_DISABLE", "0") != "1":
        capture_all(request, handles)
    graphed = tuple(install(target, handle) for target, handle in zip(request.callables, handles, strict=True))
    return graphed if request.is_tuple else graphed[0]
