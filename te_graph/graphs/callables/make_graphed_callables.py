"""make_graphed_callables: capture modules and functions, and let their calls replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from te_graph.graphs.callables.install import capture_and_install, install_late
from te_graph.graphs.capture.group import CaptureGroup
from te_graph.graphs.capture.options import Options, chosen_parameters
from te_graph.graphs.capture.request import Request
from te_graph.graphs.capture.wrappers import bypass_compiler, without_compiler
from te_graph.graphs.step_state import StepState, check_step_state

GraphCallable = nn.Module | Callable[..., Any]


def make_graphed_callables(
    callables: GraphCallable | tuple[GraphCallable, ...],
    sample_args: tuple[Any, ...] | None = None,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
    capture_error_mode: str = "thread_local",
    enable_annotations: bool = False,
    *,
    sample_kwargs: dict[str, Any] | tuple[dict[str, Any], ...] | None = None,
    max_in_flight: int = 1,
    chain: bool = False,
    accumulate_grads: bool = True,
    autograd_params: Iterable[Tensor | str] = (),
    grad_dtype: torch.dtype | None = None,
    hooks: str = "refuse",
    on_mismatch: str = "raise",
    on_exhausted: str = "raise",
    max_captures: int = 8,
    show_progress: bool | None = None,
    step_state: StepState | None = None,
    ignore_attributes: tuple[str, ...] = (),
    externals: str = "refuse",
) -> Any:
    """Capture the forward and backward of callables, and return callables that replay them.

    Takes what ``torch.cuda.make_graphed_callables`` takes; switching over is changing the import. Replays equal eager
    execution bit for bit, and weight gradients are accumulated inside the backward graph into the ``.grad`` that the
    user sees: ``p.grad += g``, or ``p.grad = g`` where it was None, whatever was done to it before.

    On a GPU the graphs are CUDA graphs. Where all tensors are on the CPU, ``te_graph.Recorder`` takes their place: it
    freezes and refuses what a CUDA graph would, so a program can be tried without a GPU.

    Args:
        callables: a module or function, or a tuple of them. Modules are graphed in place and stay modules: parameters,
            ``state_dict``, ``train``, ``eval``, hooks and saving work; a copied or loaded module is eager. Of what
            ``torch.compile`` made of a module, the original is captured.
        sample_args: the positional arguments of the callable, or a tuple of them for each: nests of tensors and
            constants, with shapes, dtypes, devices and requires_grad of the later calls. Their values do not matter
            and they are not written to. With ``chain`` later ones may be left out. Nests are lists, tuples,
            dictionaries, subclasses of these, dataclasses, and types registered with ``torch.utils._pytree``;
            constants are compared by value, functions by their code and what it refers to. None: each callable is
            captured at its first call with gradients enabled, of a module in training mode, whose arguments are then
            the samples; that call replays. Calls before it run eagerly, as do calls under ``no_grad``, with tensors
            without memory (``FakeTensorMode``, meta), where torch.compile or other code watches operations, and
            inside another capture. A capture that fails raises at that call, and later calls run eagerly; with
            ``on_mismatch="eager"`` that call does so as well, with a warning. Collectives of a ``PeerGroup`` inside
            run in the warm-up: all ranks make that call, or the group's time-out ends it. Not with ``chain``.
        num_warmup_iters: eager iterations before the capture; at least two are run, three where the first changes
            Python state.
        allow_unused_input: let a sample that requires a gradient contribute to no result.
        pool: memory pool (``torch.cuda.graph_pool_handle()``) for tensors that live inside backward graphs only;
            a new one if None. Sharing one with graphs of your own follows torch's rule: same order, no overlap.
        capture_error_mode: "thread_local", "global" or "relaxed", as for ``torch.cuda.graph``.
        enable_annotations: as in torch; needs a torch whose ``torch.cuda.graph`` has it.
        sample_kwargs: the keyword arguments, or a tuple of them for each callable.
        max_in_flight: how many forwards of one callable may wait for their backward at a time. Each costs a graph pair
            and the memory of its activations.
        chain: the callables of the tuple feed each other: the first argument of each is the first result of the one
            before (where its sample is left out, its only argument is that one's result). Nothing is copied between
            neighbours, forward or backward, as long as each passes on unchanged tensors. Where the input is another
            tensor the call runs eagerly; another gradient is copied.
        accumulate_grads: False hands parameter gradients to autograd, as tensors of their own, instead of accumulating
            them in the graph. Parameters with hooks and parameters that several callables use are always handled so.
        autograd_params: parameters, or their names in ``named_parameters()``, to be handled so, such as those that
            eager code uses as well.
        grad_dtype: accumulate into ``p.main_grad`` of this dtype, created where it is missing and the parameter has
            another dtype; ``.grad`` stays None. A parameter that has a ``main_grad`` is accumulated there in any case,
            but where autograd gets its gradient (hooks, ``autograd_params``): that is left in ``.grad``, as in eager
            execution, with a warning. A hook may add it to ``main_grad``, as Megatron-LM's does.
        hooks: what becomes of forward, pre- and backward hooks of submodules: "refuse" the capture, or "captured": what
            they compute is frozen into the graph, with every attribute and variable that they alone read; their Python
            effects happen in each capture, and in no replay.
        on_mismatch: what a call does whose arguments are not as at capture, or for which something that the graph
            takes for granted has changed: "raise", run in "eager" mode, or "capture" again. Captures for other
            arguments stand beside each other; one that is stale is replaced. Inside activation checkpointing, where a
            replay would save no memory, the latter two run eagerly.
        on_exhausted: what a forward does when ``max_in_flight`` earlier ones wait for their backward: "raise", or run
            in "eager" mode.
        max_captures: how many captures ``on_mismatch="capture"`` may add to each callable; further calls run eagerly.
            Captures that are refused do not count: calls like a refused one run eagerly until another capture
            succeeds, and after eight refused ones in a row, with a warning, all calls that would need a capture.
        show_progress: show a progress bar; None: when several callables are captured on a terminal.
        step_state: flags that the callables' kernels read, and FP8 weights to be cast at a first micro-batch. Calls
            then take ``is_first_microbatch=`` True, False, or None to go by the weights' version counters, which is
            not passed on to the callable; each begins with ``step_state.begin_``.
        ignore_attributes: names of attributes (or variables), as ``calls`` or as ``module.path.calls``, that replays
            need not follow: a counter that the forward advances, a setting that nothing depends on. What they were at
            capture is frozen.
        externals: what becomes of a tensor that the callable uses and that no name in its code leads to, such as one
            that a library keeps in an extension module: "refuse" the capture, or "keep" the tensor alive and go on with
            it, which is wrong where the library takes another one for it later. A warning names each once. It is
            refused where two warm-ups use different ones; once it was changed in place, no call is replayed.

    Returns:
        What replays: the module itself, or a function; a tuple of them if a tuple was given. Each has ``.te_graph``
        with ``info()`` and ``reset()``. Results are fresh tensors over memory of the graph. They keep their values for
        as long as they are held: before a replay overwrites the memory of one, it is moved to memory of its own.

        What the callable changes in place among its arguments is changed, with its history, in those of the call.
        Arguments may be given by position or by name, and defaults left out, whatever the samples did.

        A call runs eagerly in the other training mode or grad mode than at capture, inside another capture, and with
        ``TE_GRAPH_DISABLE=1``. The logger "te_graph" logs captures (INFO) and, once each, what ran eagerly because a
        graph did not fit (WARNING); ``te_graph.info()`` counts them.

    Raises:
        TypeError, ValueError: an argument is wrong; names it, what was expected and what came. TypeError, too, where a
            callable is, holds or calls a module that does more than its forward: DistributedDataParallel (graph
            ``ddp.module`` or its layers and keep the wrapper), FSDP, DataParallel, modules with DTensors.
        RuntimeError: a callable cannot be captured. Everything is then as it was before.
        CaptureError: a RuntimeError: a callable does what a graph cannot hold, such as reading a tensor on the host;
            names the callable, the operation and the user's line, or torch's where none of the user's is inside.

        What a callable raises itself, in a warm-up or capture, passes with a note that names the callable.

        Unless the options say otherwise, calls raise ValueError when their arguments are not as at capture, and
        RuntimeError when something that the graph takes for granted has changed (an address, a flag, a setting),
        naming it, or when more than ``max_in_flight`` forwards wait for their backward. RuntimeError, too, where an
        eager call would leave gradients in ``.grad`` that belong into ``main_grad``.

    Stream and capture: synchronizes the device. Replays go to the current stream and wait for the last replay of the
        same call of this function if that was on another. With ``step_state``, the cast of the weights and the change
        of flags come before them where due. They do not allocate, except for a result that the user
        still holds and for new ``.grad`` tensors, and do not synchronize. A call that captures again does what this
        function does.
    """
    check_step_state(step_state, "make_graphed_callables")
    options = Options(
        num_warmup_iters=num_warmup_iters,
        allow_unused_input=allow_unused_input,
        pool=pool,
        capture_error_mode=capture_error_mode,
        max_in_flight=max_in_flight,
        chain=chain,
        accumulate_grads=accumulate_grads,
        autograd_params=chosen_parameters(callables, autograd_params),
        grad_dtype=grad_dtype,
        hooks=hooks,
        on_mismatch=on_mismatch,
        on_exhausted=on_exhausted,
        max_captures=max_captures,
        show_progress=show_progress,
        ignore_attributes=ignore_attributes,
        externals=externals,
    )
    originals = tuple(map(without_compiler, callables)) if isinstance(callables, tuple) else without_compiler(callables)
    request = Request.of(originals, sample_args, sample_kwargs, enable_annotations=enable_annotations, options=options)
    jobs = request.jobs
    if request.device is None:
        graphed = install_late(jobs, options, step_state)
    else:
        group = CaptureGroup(request.device, options)
        graphed = capture_and_install(jobs, group, is_chain=options.chain, step_state=step_state)
    given = callables if request.is_tuple else (callables,)
    results = tuple(_what_replays(one, job.target, g) for one, job, g in zip(given, jobs, graphed, strict=True))
    return results if request.is_tuple else results[0]


def _what_replays(given: GraphCallable, original: GraphCallable, graphed: GraphCallable) -> GraphCallable:
    """``graphed``, or what ``torch.compile`` made of ``original``, where that was given: it then calls the original."""
    if given is original:
        return graphed
    bypass_compiler(given)
    return given
