"""Warm-up and capture of callables in one session, which puts back what it changed."""

from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from te_graph import _C
from te_graph.common.before_capture import make_ready
from te_graph.common.capture_lock import capture_lock, garbage_collection_off
from te_graph.common.capture_state import capturing
from te_graph.common.dispatch import storage_key
from te_graph.common.gradient_state import gradient_state, main_grad_of
from te_graph.common.kept_state import state_kept
from te_graph.graphs.capture.call_form import CallForm
from te_graph.graphs.capture.callable_capture import CallableCapture
from te_graph.graphs.capture.changed_arguments import ChangedArguments
from te_graph.graphs.capture.entry import CallableEntry
from te_graph.graphs.capture.exports import move_exported_results
from te_graph.graphs.capture.group import CaptureGroup
from te_graph.graphs.capture.ignored_arguments import IgnoredKeywords, ignored_at_once, orderless_parameters
from te_graph.graphs.capture.main_grads import check_main_grad, create_main_grad
from te_graph.graphs.capture.nonlinear_parts import NonlinearPart
from te_graph.graphs.capture.request import Job, sample_of
from te_graph.graphs.capture.sample_advice import check_sample, left_out
from te_graph.graphs.capture.wrappers import watching_wrappers
from te_graph.graphs.guards.pure_hooks import ARGUMENT, sample_values
from te_graph.graphs.guards.sources import TensorReader, walk
from te_graph.graphs.tracing.explanations import explained
from te_graph.graphs.tracing.externals import TensorWatch

_log = logging.getLogger("te_graph")

# Names in code that looks at the dtype of autocast, or enters a region, which may be of that one.
_ASKS_FOR_AUTOCAST_DTYPE = ("autocast", "get_autocast_dtype", "get_autocast_gpu_dtype")


def capture_all(group: CaptureGroup, jobs: Sequence[Job], is_chain: bool) -> list[CallableEntry]:
    """Capture the callables of ``jobs``; with ``is_chain`` each reads the results of the one before in place.

    Buffers, generators, garbage collection and gradients are afterwards as before, also when it raises.
    """
    options, backend = group.options, group.backend
    steps = len(jobs) * (1 + 2 * options.max_in_flight)
    move_exported_results()  # changes torch.Tensor, which guards may compare
    is_quiet = not (len(jobs) > 1 and sys.stderr.isatty()) if options.show_progress is None else False
    with contextlib.ExitStack() as session:
        progress = session.enter_context(
            tqdm(total=steps, desc="capturing graphs", disable=is_quiet or options.show_progress is False)
        )
        session.enter_context(capture_lock())
        session.enter_context(garbage_collection_off())
        session.enter_context(backend.session())
        session.enter_context(capturing())
        session.enter_context(watching_wrappers())
        session.enter_context(_saved_tensor_hooks_off())
        session.enter_context(torch.autograd.set_detect_anomaly(False))  # which reads values on the host
        on_failure = session.enter_context(contextlib.ExitStack())
        started = time.perf_counter()
        captures: list[CallableCapture] = []
        session.enter_context(state_kept())
        # Before the first warm-up, which puts back what it has written: that may lie beside what these would make.
        for job in jobs:
            found = [source.obj for source in walk(TensorReader(job.target))]
            make_ready(found)
            _keep_grads(found, on_failure)
        for job in jobs:
            group.at_work = job.label
            captures.append(
                _warmed_up(job, group, captures[-1] if captures and is_chain else None, session, on_failure)
            )
            progress.update()
        for capture in captures:
            capture.forget_samples()
        with _main_grads(captures, group):
            _capture_graphs(captures, group, progress)
            entries = _assemble_all(jobs, captures, group, is_chain, (time.perf_counter() - started) / len(captures))
            for capture in captures:
                _check_guard(capture)
        on_failure.pop_all()
    for entry in entries:
        facts = entry.statistics
        _log.info(
            "%s: captured %d graphs, %d nodes, %.1f MiB in %.2f s",
            *(entry.label, facts["graphs"], facts["nodes"], facts["bytes"] / 2**20, facts["capture_seconds"]),
        )
    return entries


def _keep_grads(found: Iterable[Any], on_failure: contextlib.ExitStack) -> None:
    """Let tensors among ``found`` have the ``.grad`` again that they have now: no operator may be seen to use them."""
    watch = TensorWatch()
    for tensor in found:
        if isinstance(tensor, Tensor):
            watch.keep_grads(tensor)
    on_failure.callback(watch.restore_grads)


def _warmed_up(
    job: Job,
    group: CaptureGroup,
    predecessor: CallableCapture | None,
    session: contextlib.ExitStack,
    on_failure: contextlib.ExitStack,
) -> CallableCapture:
    """What is to be captured of ``job``: without the keyword arguments that it has been seen to ignore."""
    results = [] if predecessor is None else predecessor.sample_results
    capture = _begin(job, group, predecessor)
    _warm_up(job, capture, session, on_failure)
    if capture.ignored is not None and capture.ignored.has_any({*capture.signature.keywords} - {ARGUMENT}):
        if predecessor is not None:
            predecessor.sample_results = results
        capture = _begin(job, group, predecessor, capture.ignored)
        _warm_up(job, capture, session, on_failure)
    return capture


def _warm_up(
    job: Job, capture: CallableCapture, session: contextlib.ExitStack, on_failure: contextlib.ExitStack
) -> None:
    session.callback(capture.undo)
    on_failure.callback(capture.undo_failure)
    advice = left_out(job.parameters, capture.signature)
    with explained(capture.label, "the warm-up", advice=advice), capture.backend.watch_generator(capture.label):
        capture.warm_up()
    for part in capture.nonlinear_parts:
        if _results_of(capture, part) <= job.gradients.missing:
            raise RuntimeError(f"{capture.label}: {_message_of(capture, part)}")


def _begin(
    job: Job, group: CaptureGroup, predecessor: CallableCapture | None, ignored: IgnoredKeywords | None = None
) -> CallableCapture:
    if job.sample is not None:
        signature, tensors = job.sample
    else:
        result = predecessor.result.unflatten(predecessor.sample_results)
        result = result[0] if predecessor.changed.numbers else result
        signature, tensors = sample_of(job.label, (result,), job.kwargs)
    args, kwargs = signature.unflatten(tensors)
    check_sample(job.label, job.parameters, args, kwargs)
    if (ignored := ignored or ignored_at_once(job.target)) is not None:
        signature, tensors = sample_of(job.label, args, ignored.without(kwargs))
    if values := sample_values(job.target):
        args, kwargs = signature.unflatten(tensors)
        signature, tensors = sample_of(job.label, args, {**kwargs, ARGUMENT: values})
    capture = CallableCapture(job, group, signature, tensors)
    if predecessor is not None:
        capture.link_to(predecessor, everything=job.sample is None)
    return capture


@contextlib.contextmanager
def _saved_tensor_hooks_off() -> Iterator[None]:
    """Hide what a warm-up saves from the code around it: a checkpoint would take it for its own."""
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def _main_grads(captures: list[CallableCapture], group: CaptureGroup) -> Iterator[None]:
    """Create the ``main_grad`` tensors that ``grad_dtype`` asks for; remove them again if the capture fails."""
    dtype = group.options.grad_dtype if group.options.accumulate_grads else None
    created: list[Tensor] = []
    for capture in captures:
        group.at_work = capture.label
        for parameter in capture.gradients.parameters:
            if not group.options.is_for_autograd(parameter):
                _check_main_grad(capture, parameter)
    try:
        for parameter in {id(p): p for c in captures for p in c.gradients.parameters}.values():
            if dtype in (None, parameter.dtype) or main_grad_of(parameter) is not None:
                continue
            if group.options.is_for_autograd(parameter):
                continue
            if dtype != torch.float32 or parameter.dtype not in (torch.float16, torch.bfloat16):
                raise ValueError(
                    f"make_graphed_callables: expected grad_dtype to be torch.float32 or the parameter's own "
                    f"dtype, {parameter.dtype}, got {dtype}"
                )
            create_main_grad(parameter, dtype)
            created.append(parameter)
        yield
    except BaseException:
        for parameter in created:
            del parameter.main_grad
        raise


def _check_main_grad(capture: CallableCapture, parameter: Tensor) -> None:
    number = capture.callable_guard.index_of(parameter)
    name = capture.callable_guard.names[number] if number >= 0 else f"a parameter of shape {list(parameter.shape)}"
    try:
        check_main_grad(name, parameter)
    except ValueError as error:
        raise ValueError(f"{capture.label}: {error}") from None


def _capture_graphs(captures: list[CallableCapture], group: CaptureGroup, progress: tqdm) -> None:
    """Capture all forwards in order, then all backwards in reverse order.

    What a forward makes lives until its backward has run, and may share memory with nothing that another graph writes
    in between. So each forward has a memory pool of its own; only in a chain, where a layer's slot is not used again
    before those of later layers are free, forwards share one for each slot, and what one lets go of is there for the
    next. What backwards make is dead when the next one starts, so they share one pool. The autograd graphs of the
    capture, and with them the activations, are held until all is captured.
    """
    leaves = {id(p): p for capture in captures for p in capture.gradients.parameters}
    isolation = _C.LeafIsolation(list(leaves.values()), with_accumulators=True)
    slots = range(group.options.max_in_flight)
    pools = {capture: [group.backend.new_pool() for _ in slots] for capture in {c.first_of_chain for c in captures}}
    successors = {capture.predecessor: capture for capture in captures}
    try:
        for capture in captures:
            group.at_work = capture.label
            for number in slots:
                with explained(capture.label, "the capture", capture.watch.notes):
                    make_ready(capture.ready)  # after what the last iteration, or capture, has written
                    capture.capture_forward(pools[capture.first_of_chain][number])
                progress.update()
        for capture in reversed(captures):
            group.at_work = capture.label
            for number in slots:
                with explained(capture.label, "the capture", capture.watch.notes):
                    capture.capture_backward(number, group.backward_pool, successors.get(capture))
                progress.update()
    finally:
        for capture in captures:
            for slot in capture.slots:
                slot.live_outputs = []
        isolation.restore()


def _assemble_all(
    jobs: list[Job], captures: list[CallableCapture], group: CaptureGroup, is_chain: bool, seconds: float
) -> list[CallableEntry]:
    backend = group.backend
    forwards = [[slot.forward for slot in capture.slots] for capture in captures]
    sharing = [slot.backward for capture in captures for slot in capture.slots if slot.backward is not None]
    if is_chain:
        sharing += [graph for graphs in forwards for graph in graphs]
        forwards = [[] for _ in captures]
    *forward_bytes, shared_bytes = backend.nbytes([*forwards, sharing])
    entries: dict[CallableCapture, CallableEntry] = {}
    for job, capture, own_bytes in zip(jobs, captures, forward_bytes, strict=True):
        group.at_work = capture.label
        predecessor = entries.get(capture.predecessor)
        graphs = [g for slot in capture.slots for g in (slot.forward, slot.backward) if g is not None]
        inputs = sum(t.nbytes for s in capture.slots for i, t in enumerate(s.inputs) if i not in capture.links)
        parameters = capture.gradients.parameters
        entries[capture] = CallableEntry(
            label=capture.label,
            graphed=_assemble(capture, group, predecessor),
            signature=capture.signature,
            form=CallForm(job.parameters, capture.signature, capture.ignored, orderless_parameters(job.target)),
            computed=capture.computed,
            changed=ChangedArguments.of(
                capture.label,
                capture.changed,
                capture.result.numbers_of_last(len(capture.changed.numbers)),
                capture.signature.distinct_names,
                capture.callable_guard.tensors,
                capture.layout.results_that_are(
                    list(itertools.compress(capture.output_numbers, capture.inner_outputs))
                ),
            ),
            result=capture.result,
            leaves=[weakref.ref(parameter) for parameter in parameters],
            states=[gradient_state(parameter) for parameter in parameters],
            has_main_grads=any(main_grad_of(parameter) is not None for parameter in parameters),
            added_by_ops=[capture.grad_buffers.has_whole(parameter) for parameter in parameters],
            ready=[weakref.ref(module) for module in capture.ready],
            statistics={
                "backend": backend.name,
                "slots": len(capture.slots),
                "graphs": len(graphs),
                "clones": capture.layout.clones * len(capture.slots) + sum(slot.clones for slot in capture.slots),
                "nodes": sum(backend.nodes(graph) for graph in graphs),
                "fp8_calls": capture.fp8_calls.count,
                "bytes": own_bytes + inputs + shared_bytes // len(captures),
                "capture_seconds": seconds,
            },
            predecessor=weakref.ref(predecessor) if predecessor is not None else None,
        )
    return list(entries.values())


def _check_guard(capture: CallableCapture) -> None:
    """Refuse what looks different each time: no call would replay.

    Raises:
        RuntimeError: the guard does not hold right after the capture.
    """
    if change := capture.callable_guard.guard.check(capture.root):
        raise RuntimeError(
            f"{capture.label}: {change} since the warm-up, and would at each call: what is there is made anew by each "
            "look at it, or looks different to code of its class; pass it as an argument, or list the attribute in "
            "ignore_attributes= to freeze it"
        )


def _assemble(capture: CallableCapture, group: CaptureGroup, predecessor: CallableEntry | None) -> _C.GraphedCallable:
    """The C++ replay object of one callable."""
    callable_guard, layout = capture.callable_guard, capture.layout
    callable_guard.guard.keep([*capture.walker.functions, *(source.obj for source in capture.unnamed.kept)])
    parameters = _parameter_specs(capture)  # first: it adds main_grads to the guard
    graphed = _C.GraphedCallable(
        name=capture.label,
        device=group.device,
        replay_order=group.replay_order,
        guard=callable_guard.guard,
        inputs=_input_specs(capture),
        parameters=parameters,
        externals=_external_specs(capture),
        differentiable=capture.output_numbers,
        saved_outputs=capture.saved_outputs,
        inner_outputs=capture.inner_outputs,
        results=[] if layout.is_plain else [result.spec(capture.label, callable_guard) for result in layout.results],
        predecessor=None if predecessor is None else predecessor.graphed,
        backward_guard=capture.backward_guard,
        nonlinear_parts=[
            _C.NonlinearPart(list(part.outputs), _message_of(capture, part)) for part in capture.nonlinear_parts
        ],
        compares_autocast_cache=capture.walker.names.asks_for_autocast_cache,
        compares_autocast_dtype=not capture.walker.names.said.isdisjoint(_ASKS_FOR_AUTOCAST_DTYPE),
    )
    for slot, host_steps in zip(capture.slots, capture.host_steps, strict=True):
        graphed.add_slot(
            forward=slot.forward,
            backward=slot.backward,
            inputs=slot.inputs,
            outputs=slot.outputs,
            grad_outputs=slot.grad_outputs,
            grad_inputs=slot.grad_inputs,
            use_grads=slot.use_grads,
            parameter_grads=slot.parameter_grads,
            summed_inputs=slot.summed_inputs,
            table=slot.table,
            rewinds=slot.states.rewinds,
            host_steps=host_steps,
        )
    return graphed


def _parameter_specs(capture: CallableCapture) -> list[_C.ParameterSpec]:
    """Of each parameter that gets a gradient; its ``main_grad`` is added to the guard.

    Raises:
        RuntimeError: one is not found among the external tensors.
    """
    callable_guard, gradients = capture.callable_guard, capture.gradients
    specs = []
    each = zip(gradients.parameters, capture.destinations(), gradients.depends_on, strict=False)
    for parameter, destination, depends_on in each:
        number = callable_guard.index_of(parameter)
        if number < 0:
            raise RuntimeError(
                f"{capture.label}: a leaf of shape {list(parameter.shape)} gets a gradient but is not found among the "
                "parameters, attributes and variables of the callable: pass it as an argument"
            )
        has_main_grad = not destination.is_for_autograd and main_grad_of(parameter) is not None
        specs.append(
            _C.ParameterSpec(
                tensor=number,
                main_grad=callable_guard.add_main_grad(number) if has_main_grad else -1,
                depends_on=depends_on,
                through_autograd=destination.is_for_autograd,
                main_grad_fits=destination.is_in_table,
                has_grad_buffer=parameter in capture.grad_buffers,
                main_grad_reset=gradient_state(parameter).main_grad_reset,
            )
        )
    return specs


def _results_of(capture: CallableCapture, part: NonlinearPart) -> set[int]:
    """The numbers of the results that alone lead to ``part`` of the backward."""
    return capture.layout.results_in(set(itertools.compress(capture.output_numbers, part.outputs)))


def _message_of(capture: CallableCapture, part: NonlinearPart) -> str:
    """Of the error where these get no gradient."""
    numbers = sorted(_results_of(capture, part))
    results, them = (f"result {numbers[0]}", "that") if len(numbers) == 1 else (f"results {numbers}", "these")
    return (
        f"no gradient comes for {results}, and the backward of {them} alone {part.does}: eager execution leaves that "
        f"out, and a replay would run it with zeros. Use {them} in what backward is called on, or compute {them} by a "
        "callable apart"
    )


def _input_specs(capture: CallableCapture) -> list[_C.InputSpec]:
    gradients = capture.gradients
    dependence = dict(zip(gradients.inputs, gradients.depends_on[len(gradients.parameters) :], strict=True))
    each = zip(capture.signature.distinct_names, capture.saved_inputs, capture.is_cast_anew, strict=True)
    return [
        _C.InputSpec(name, dependence.get(i, []), i in capture.links, is_saved, is_cast_anew)
        for i, (name, is_saved, is_cast_anew) in enumerate(each)
    ]


def _external_specs(capture: CallableCapture) -> list[_C.ExternalSpec]:
    """Of each tensor of the guard; ``main_grad`` come after those that the capture itself uses."""
    tensors = capture.callable_guard.tensors
    versions_bumped = [*capture.versions_bumped, *[False] * (len(tensors) - len(capture.versions_bumped))]
    externals = capture.watch.externals
    found = [externals.get(storage_key(tensor)) for tensor in tensors]
    return [
        _C.ExternalSpec(saved=external is not None and external.saved, written=bumped)
        for external, bumped in zip(found, versions_bumped, strict=True)
    ]
