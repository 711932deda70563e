"""One call of make_graphed_callables: warm-up and capture of all callables as a transaction."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from te_graph import _C
from te_graph.backends import CudaBackend, RecorderBackend
from te_graph.capture import CallableCapture
from te_graph.capturing import capturing
from te_graph.checks import Request
from te_graph.gradients import create_main_grad, gradient_state, main_grad_of
from te_graph.handle import Handle


def capture_all(request: Request, handles: list[Handle]) -> None:
    """Capture every callable of ``request`` and arm its handle.

    Buffers, generators, garbage collection and gradients are afterwards as before, also when it raises; then no handle
    is armed.
    """
    device = request.device
    cuda = device.type == "cuda"
    backend = CudaBackend(device, request.capture_error_mode) if cuda else RecorderBackend()
    captures = [
        CallableCapture(label, target, backend, device, signature, samples, request.max_in_flight)
        for label, target, signature, samples in zip(
            request.labels, request.callables, request.signatures, request.samples, strict=True
        )
    ]
    steps = len(captures) * (1 + 2 * request.max_in_flight)
    is_quiet = not (len(captures) > 1 and sys.stderr.isatty()) if request.show_progress is None else False
    with contextlib.ExitStack() as transaction:
        progress = transaction.enter_context(
            tqdm(total=steps, desc="capturing graphs", disable=is_quiet or request.show_progress is False)
        )
        transaction.enter_context(_garbage_collection_off())
        transaction.enter_context(backend.session())
        transaction.enter_context(capturing())
        on_failure = transaction.enter_context(contextlib.ExitStack())
        for capture in captures:
            transaction.callback(capture.undo)
            on_failure.callback(capture.undo_failure)
        started = time.perf_counter()
        for capture in captures:
            with backend.watch_generator(capture.label):
                capture.warm_up(max(2, request.num_warmup_iters), request.allow_unused_input)
            progress.update()
        with _main_grads(captures, request):
            _capture_graphs(captures, backend, request, progress)
            _arm(captures, handles, request, (time.perf_counter() - started) / len(captures))
        on_failure.pop_all()


@contextlib.contextmanager
def _garbage_collection_off() -> Iterator[None]:
    """A collection in the middle of a capture could free what must not be freed there."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def _main_grads(captures: list[CallableCapture], request: Request) -> Iterator[None]:
    """Create the ``main_grad`` tensors that ``grad_dtype`` asks for; remove them again if the capture fails."""
    created: list[Tensor] = []
    try:
        if request.grad_dtype is not None and request.accumulate_grads:
            for parameter in {id(p): p for c in captures for p in c.gradients.parameters}.values():
                if parameter.dtype != request.grad_dtype and main_grad_of(parameter) is None:
                    if request.grad_dtype != torch.float32 or parameter.dtype not in (torch.float16, torch.bfloat16):
                        raise ValueError(
                            f"make_graphed_callables: expected grad_dtype to be torch.float32 or the parameter's own "
                            f"dtype, {parameter.dtype}, got {request.grad_dtype}"
                        )
                    create_main_grad(parameter, request.grad_dtype)
                    created.append(parameter)
        yield
    except BaseException:
        for parameter in created:
            del parameter.main_grad
        raise


def _capture_graphs(captures: list[CallableCapture], backend: Any, request: Request, progress: tqdm) -> None:
    """Capture all forwards in order, then all backwards in reverse order.

    Each forward has a memory pool of its own: what it makes lives until its backward has run, and may share memory
    with nothing that another graph writes in between. What backwards make is dead when the next one starts, so they
    share one pool. The autograd graphs of the capture, and with them the activations, are held until all is captured.
    """
    backward_pool = request.pool or backend.new_pool()
    leaves = {id(p): p for capture in captures for p in capture.gradients.parameters}
    isolation = _C.LeafIsolation(list(leaves.values()), with_accumulators=True)
    try:
        _capture_passes(captures, backend, backward_pool, request.accumulate_grads, progress)
    finally:
        for capture in captures:
            for slot in capture.slots:
                slot.live_outputs = []
        isolation.restore()


def _capture_passes(
    captures: list[CallableCapture], backend: Any, backward_pool: Any, accumulate_grads: bool, progress: tqdm
) -> None:
    for capture in captures:
        for slot in capture.slots:
            capture.capture_forward(slot, backend.new_pool())
            progress.update()
    for capture in reversed(captures):
        for slot in capture.slots:
            capture.capture_backward(slot, backward_pool, accumulate_grads)
            progress.update()


def _arm(captures: list[CallableCapture], handles: list[Handle], request: Request, seconds: float) -> None:
    scope = _C.Scope(request.device)
    armed = [_assemble(capture, scope, request) for capture in captures]
    for handle, capture, (graphed, statistics) in zip(handles, captures, armed, strict=True):
        handle.arm(graphed, capture, {**statistics, "capture_seconds": seconds})


def _assemble(
    capture: CallableCapture, scope: _C.Scope, request: Request
) -> tuple[_C.GraphedCallable, dict[str, Any]]:
    """The C++ replay object of one callable, and what ``info()`` tells about it."""
    homes, gradients = capture.homes, capture.gradients
    parameters = []
    for parameter, depends_on in zip(gradients.parameters, gradients.depends_on, strict=False):
        number = homes.index_of(parameter)
        if number < 0:
            raise RuntimeError(
                f"{capture.label}: a leaf of shape {list(parameter.shape)} gets a gradient but is not found among the "
                "parameters, attributes and variables of the callable: pass it as an argument"
            )
        has_main_grad = request.accumulate_grads and main_grad_of(parameter) is not None
        parameters.append(
            _C.ParameterSpec(
                tensor=number,
                main_grad=homes.add_main_grad(number) if has_main_grad else -1,
                depends_on=depends_on,
                through_autograd=not request.accumulate_grads,
                flag=gradient_state(parameter).flag,
            )
        )
    input_dependence = dict(zip(gradients.inputs, gradients.depends_on[len(parameters) :], strict=True))
    inputs = [
        _C.InputSpec(name, input_dependence.get(number, []))
        for number, name in enumerate(capture.signature.distinct_names)
    ]
    # main_grads come after the tensors that the capture itself uses.
    main_grads = len(homes.tensors) - len(capture.versions_bumped)
    externals = [
        _C.ExternalSpec(saved=capture.is_saved(tensor), written=bumped)
        for tensor, bumped in zip(homes.tensors, [*capture.versions_bumped, *[False] * main_grads], strict=True)
    ]
    graphed = _C.GraphedCallable(
        name=capture.label,
        device=request.device,
        scope=scope,
        guard=homes.guard,
        inputs=inputs,
        parameters=parameters,
        externals=externals,
        differentiable=capture.output_numbers,
        saved_outputs=capture.saved_outputs,
    )
    graphs = []
    for slot in capture.slots:
        graphed.add_slot(
            forward=slot.forward,
            backward=slot.backward,
            inputs=slot.inputs,
            outputs=slot.outputs,
            grad_outputs=slot.grad_outputs,
            grad_inputs=slot.grad_inputs,
            parameter_grads=slot.parameter_grads,
            table=slot.table,
        )
        graphs += [graph for graph in (slot.forward, slot.backward) if graph is not None]
    return graphed, {
        "backend": capture.backend.name,
        "slots": len(capture.slots),
        "graphs": len(graphs),
        "nodes": sum(capture.backend.nodes(graph) for graph in graphs),
        "bytes": capture.backend.nbytes(graphs),
    }
