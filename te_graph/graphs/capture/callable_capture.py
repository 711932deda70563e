"""Warm-up and capture of one callable: from Python code to graphs with known inputs, outputs and gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_graph import _C
from te_graph.common.as_written import as_written
from te_graph.common.before_capture import make_ready
from te_graph.common.captured_backward import capturing_backward
from te_graph.common.dispatch import storage_key, version_of
from te_graph.common.fp8_calls import CapturedFp8Calls
from te_graph.common.gradient_state import main_grad_of
from te_graph.graphs.arguments.signature import Signature
from te_graph.graphs.capture.autocast import cast_at_each_use, casts_of, own_casts
from te_graph.graphs.capture.capture_checks import (
    check_attributes,
    check_devices,
    check_escapes,
    check_forms,
    check_made,
    check_nested,
    check_use,
    checked_results,
    forms_of,
    refuse_use_of_grad,
)
from te_graph.graphs.capture.changed_arguments import ChangedInputs
from te_graph.graphs.capture.engine_attention import refuse_wrong_attention
from te_graph.graphs.capture.first_call import FirstCallWatch
from te_graph.graphs.capture.fp8_regions import refuse_fp8_after, refuse_fp8_before
from te_graph.graphs.capture.grad_buffers import GradBuffers, new_table
from te_graph.graphs.capture.gradients import Destination, Gradients, gradients_of, gradients_that_come, leaves_outside
from te_graph.graphs.capture.group import CaptureGroup
from te_graph.graphs.capture.host_work import HostWork
from te_graph.graphs.capture.ignored_arguments import IgnoredKeywords, ignored_keywords
from te_graph.graphs.capture.input_uses import Uses
from te_graph.graphs.capture.kept_containers import containers_kept
from te_graph.graphs.capture.layout import static_copy
from te_graph.graphs.capture.links import check_links, in_place_of, stand_in
from te_graph.graphs.capture.main_grads import refuse_fused_main_grads
from te_graph.graphs.capture.nonlinear_parts import NonlinearParts
from te_graph.graphs.capture.request import Job
from te_graph.graphs.capture.results import ResultLayout, inner_outputs, views_kept
from te_graph.graphs.capture.slot import Slot
from te_graph.graphs.capture.unnamed_externals import UnnamedExternals
from te_graph.graphs.capture.warm_up_round import WarmUpRound
from te_graph.graphs.guards.backward_guard import backward_guard
from te_graph.graphs.guards.backward_watch import BackwardWatch
from te_graph.graphs.guards.build_guard import build_callable_guard
from te_graph.graphs.guards.effects.module_calls import ModuleCalls
from te_graph.graphs.guards.effects.random_generators import HostRandom
from te_graph.graphs.guards.effects.rollback import Bindings, ContainerState, with_contents
from te_graph.graphs.guards.guarded_modules import check_hooks
from te_graph.graphs.guards.parametrizations import check_cache
from te_graph.graphs.guards.pure_hooks import ARGUMENT, computed_by_hooks, taken_away, values_of
from te_graph.graphs.guards.readers.callable_reader import names_around
from te_graph.graphs.guards.readers.source_walker import SourceWalker
from te_graph.graphs.guards.sources import HOOK_DICTS, Source, TensorReader, copies_of, walk
from te_graph.graphs.tracing.code_watch import CodeWatch
from te_graph.graphs.tracing.explanations import WarmUpWatch
from te_graph.graphs.tracing.externals import TensorWatch, leaves_below
from te_graph.graphs.tracing.host_access import GradWatch
from te_graph.graphs.tracing.source_lines import call_region


class CallableCapture:
    """Takes one callable through warm-up and capture.

    Args:
        job: what is captured.
        group: what it shares with the callables that are captured with it.
        signature: of the sample arguments.
        samples: their tensors; copied, not kept.

    Attributes:
        label: what messages call it.
        root: the module or function, where the guard starts.
        links: which inputs lie where the predecessor's results are: number of the input -> number of the result.
        walker: over what its code can get to.
        gradients: what the backward computes, once warmed up.
        nonlinear_parts: of the backward, once warmed up.
        callable_guard: the guard and the tensors outside that the capture uses, once warmed up.
        backward_guard: over what Python code in its backward reads, once warmed up; None where there is nothing.
        layout: where the results lie, once warmed up.
        output_numbers: which outputs require a gradient.
        saved_inputs, saved_outputs: for each input and output, whether the backward reads it.
        inner_outputs: for each of ``output_numbers``, whether another one is computed from it.
        result: the nest of the results; with that of the arguments that are changed in place, where some are.
        changed: those arguments.
        sample_results: the results of the warm-up, as leaves, until the successor has been linked.
        rounds: of the warm-up; several where a tensor had to be looked for.
        unnamed: tensors that no name in its code leads to.
        ignored: keyword arguments that it does not look at; None where that is unknown.
        computed: attributes that hooks of modules below compute inside the graph.
        host_steps: what its ops do on the host before they launch, of each slot.
        fp8_calls: of FP8 layers, in the forward.
        grad_buffers: where ops add up gradients of parameters by themselves.
        ready: modules that prepare for a capture, and for the next iteration.
    """

    def __init__(self, job: Job, group: CaptureGroup, signature: Signature, samples: list[Tensor]) -> None:
        self.label, self.root, self._grad_orders = job.label, job.target, job.gradients.orders
        self.group = group
        self.backend = group.backend
        self.signature = signature
        self._take([static_copy(sample) for sample in samples])
        self.predecessor: CallableCapture | None = None
        self.links: dict[int, int] = {}
        self.slots: list[Slot] = []
        self.changed = ChangedInputs()
        self.ignored: IgnoredKeywords | None = None
        self._leaves: dict[int, Tensor] = {}  # of the last iteration
        self.unnamed = UnnamedExternals(self.label, self.root, group.options, signature.holders, group.reported)
        self._reader_of = self.unnamed.reader_of
        self.host_steps: list[_C.HostSteps] = []
        self.grad_buffers = GradBuffers()
        self.walker = SourceWalker(names_around(self.root))
        sources, self._sources = list(walk(TensorReader(self.root))), self._explore()
        self.ready = make_ready(source.obj for source in [*sources, *self._sources])
        if self.ready:
            sources, self._sources = list(walk(TensorReader(self.root))), self._explore()
        check_attributes(self.label, signature.distinct_names, samples, self.walker.names.said)
        check_cache(self.label, sources)
        refuse_fused_main_grads(self.label, sources)
        refuse_wrong_attention(self.label, (source.obj for source in sources))
        self._containers = ContainerState([*sources, *with_contents(self._sources)])
        self._bindings = Bindings(self._sources)
        below = [source.obj for source in sources if isinstance(source.obj, nn.Module) and source.obj is not self.root]
        self._computable = [attribute for module in below for attribute in computed_by_hooks(module)]
        # Hooks are there to look, or freeze what they compute: what else they do is not repeated.
        self._hooks = [hook for module in below for key in HOOK_DICTS for hook in vars(module).get(key, {}).values()]

    def _explore(self) -> list[Source]:
        """Where its code can get to."""
        return self.walker.explore(self._reader_of)

    def _take(self, samples: list[Tensor]) -> None:
        """Warm up with ``samples`` [...]."""
        self.samples = samples
        self._watch_beside = TensorWatch(owned=samples)  # of what is run to learn more
        self.rounds = [WarmUpRound(WarmUpWatch(self.group.device, samples))]

    @property
    def watch(self) -> WarmUpWatch:
        """Of the last iteration."""
        return self.rounds[-1].last

    def link_to(self, predecessor: CallableCapture, everything: bool) -> None:
        """Read the results of ``predecessor`` in place: all of them, or the first as the first positional tensor."""
        results, names = predecessor.sample_results, self.signature.distinct_names
        count = sum(name.startswith("args") for name in names) if everything else 1
        check_links(self.label, predecessor.label, names, self.samples, results, count)
        self.links = {n: n for n in range(count) if predecessor.layout.lies_in_chain(n, predecessor.links)}
        if self.links:
            self.predecessor = predecessor
            # What is read in place lies as it does there: code asks for that, and views of it depend on it.
            places = [results[self.links[n]] if n in self.links else None for n in range(len(self.samples))]
            self._take(list(map(in_place_of, places, self.samples)))
        predecessor.sample_results = []

    @property
    def first_of_chain(self) -> CallableCapture:
        """Of the callables that are linked with this one."""
        return self if self.predecessor is None else self.predecessor.first_of_chain

    def warm_up(self) -> None:
        """Run forward and backward as they will be captured, and learn what they use.

        The first of at least two iterations lets the callable make what it keeps for later calls. The last one tells
        what is external. Both are watched, and so are others after one that changed something in Python: what they
        write outside is put back by ``undo``.
        """
        parameters = self.root.parameters() if isinstance(self.root, nn.Module) else ()
        isolation = _C.LeafIsolation(list(parameters), with_accumulators=True)
        generators = HostRandom(self._sources, with_torch=True)
        try:
            with ModuleCalls(self._refuse_hooks) as calls:
                tensors, *works = self._iterate(self.group.options.num_warmup_iters)
                if self.unnamed.look_for(self._sources, self.walker, self.watch):
                    self._sources = self._explore()
                    self.rounds.append(WarmUpRound(WarmUpWatch(self.group.device, self.samples)))
                    tensors, work = self._iterate(self.group.options.num_warmup_iters)
                    works.append(work)
                self.ignored = ignored_keywords(self.root, self.walker.names, self._run_with, self.group.options.hooks)
        finally:
            isolation.restore()
            generators.restore()
        self._sources = self.unnamed.keep(self._sources, self.watch, self.rounds[-1].firsts)
        self.sample_results = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        outputs = self.layout.outputs_of(tensors)
        self.output_numbers = [i for i, tensor in enumerate(outputs) if tensor.requires_grad and self.gradients.any]
        saved = self.watch.saved_storages
        self.saved_inputs = [storage_key(tensor) in saved for tensor in self.samples]
        self.saved_outputs = [storage_key(tensor) in saved for tensor in outputs]
        self.inner_outputs = inner_outputs([outputs[i] for i in self.output_numbers])
        check_made(self.label, tensors, self.layout, self._copies, self.group.options.ignore_attributes)
        used = [i in self.gradients.inputs or self.layout.returns_input(i) for i in range(len(self.samples))]
        used = None if self.group.options.allow_unused_input else used
        check_use(self.label, self.signature.distinct_names, self.samples, self.watch, used)
        check_escapes(self.label, self.root, self._sources, self.watch)
        for each, work in zip(self.rounds, works, strict=True):
            each.check(self.label, self.walker.obstacle, self._sources, work)
        check_nested(self.label, self.watch)
        check_devices(self.label, self.group.device, self._sources, self.watch)
        try:
            self.callable_guard = build_callable_guard(
                self._reader_of(self.walker.names),
                self._sources,
                self.watch.externals,
                self.gradients.parameters,
                calls.called,
                self.group.options.hooks == "captured",
            )
        except (RuntimeError, TypeError) as error:
            raise type(error)(f"{self.label}: {error}") from None

    def forget_samples(self) -> None:
        """Let go of what only warm-ups need: results, and samples in whose place a predecessor's results are read."""
        self.sample_results = []
        self.samples = [stand_in(one) if number in self.links else one for number, one in enumerate(self.samples)]

    def _refuse_hooks(self, module: nn.Module) -> None:
        """Of a ``module`` that is about to be called, and before they are: they are not for samples."""
        if module is not self.root and any(vars(module)[key] for key in HOOK_DICTS):
            source = next((source for source in self._sources if source.obj is module), None)
            name = f"{self.label}: {(source and source.name) or type(module).__name__}"
            check_hooks(module, name, self.group.options.hooks == "captured")

    def _iterate(self, iterations: int) -> tuple[list[Tensor], HostWork]:
        """The iterations of one round; returns the results of the last one, [...] each, and what all did in Python."""
        current = self.rounds[-1]
        work = HostWork(self.group.device, self.walker, self._explore, self._sources)
        self._iterate_once(current.watch_first(self.samples), work)
        for _ in range(max(iterations - 2, 0 if work.is_settled else 1)):
            is_watched = not work.is_settled or len(self.rounds) > 1
            self._iterate_once(current.watch_first(self.samples) if is_watched else as_written, work)
        if self._runs_compiled and self.backend.name == "cuda":
            self._let_compile()
        tensors, in_backward = self._iterate_once(self.watch, work)
        self._sources = work.sources
        explored, reader = copies_of(work.sources), self._reader_of(self.walker.names)
        self.backward_guard = backward_guard(reader, reader.compared(explored), in_backward, self.watch.externals)
        return tensors, work

    def _let_compile(self) -> None:
        """Let the compiler be done before the capture, which runs compiled functions; a watch has them as written."""
        with _C.HostSteps():
            outputs = self._call(self.samples, self.changed.given(self.samples))
        self._find_gradients([one for one in outputs if one.requires_grad], self.samples)

    def _iterate_once(self, watch: Any, work: HostWork) -> tuple[list[Tensor], BackwardWatch]:
        """One of the iterations, seen by ``watch``; returns its results, [...] each, and what ran in its backward."""
        inputs, nothing = self.samples, contextlib.nullcontext()
        is_last = watch is self.watch
        make_ready(self.ready)
        steps = _C.HostSteps()  # replays take them, not a warm-up, which is undone
        code = CodeWatch(aside=self._hooks)
        with watch, self.watch.saved_tensors() if is_last else nothing, views_kept() if is_last else nothing:
            refusing = functools.partial(refuse_use_of_grad, self.label, work.sources, watch)
            with GradWatch(refusing) if isinstance(watch, TensorWatch) else nothing, code, steps:
                given = self.changed.given(inputs)
                if isinstance(watch, FirstCallWatch):
                    watch.note_arguments(given)
                tensors = self._call(inputs, given)
                if isinstance(watch, FirstCallWatch):
                    watch.note_results(tensors)
                    if watch is self.rounds[-1].firsts[0]:
                        self._find_casts(inputs, casts_of(given, tensors))
                del given
            self.layout = ResultLayout.of(tensors, inputs, watch) if is_last else ResultLayout()
            self.layout.warn_about_rounding(self.label)
            if is_last and self._copies:
                hidden = self.result.numbers_of_last(len(self._copies))
                self.changed.find_views(self.label, self.signature.distinct_names, tensors, self._copies, hidden)
            outputs = [t for t in (self.layout.outputs_of(tensors) if is_last else tensors) if t.requires_grad]
        in_backward = BackwardWatch(work.sources, aside=self._hooks)
        parts = NonlinearParts(outputs if is_last else [], work.sources, self.group.device, watch)
        with watch, in_backward, parts:
            self.gradients = self._find_gradients(outputs, inputs)
        self.nonlinear_parts = parts.found
        self.grad_buffers.note(steps)
        self._runs_compiled = code.runs_compiled or in_backward.runs_compiled
        work.note(code, in_backward, is_last=is_last)
        return tensors, in_backward

    def _find_casts(self, inputs: list[Tensor], casts: list[int]) -> None:
        """Find which of ``inputs`` [...], which are cast so often, autocast would cast less often as leaves."""
        self.is_cast_anew = [False] * len(inputs)
        if max(casts, default=0) > 1:
            given = self.changed.given(inputs)
            fewer = casts_of(given, self._call(inputs, given, as_leaves=True))
            self.is_cast_anew = [count > other for count, other in zip(casts, fewer, strict=True)]

    def _run_with(self, more: dict[str, Any]) -> None:
        """Run the forward again, with ``more`` keyword arguments."""
        with self._watch_beside, _C.HostSteps():
            args, kwargs = self.signature.unflatten(self.changed.given(self.samples))
            self._run(*args, **kwargs, **more)

    def undo(self) -> None:
        """Put back what warm-up and capture wrote into tensors outside."""
        self._restore(TensorWatch.restore)

    def undo_failure(self) -> None:
        """Put back, too, what they left in attributes and containers. After a success that stays: it may be in use."""
        self._containers.restore()
        self._bindings.restore()
        self._restore(TensorWatch.restore_grads)

    def _restore(self, what: Callable[[TensorWatch], None]) -> None:
        with contextlib.ExitStack() as last_first:  # all of them, also if one fails
            for watch in [*(watch for each in self.rounds for watch in each.watches), self._watch_beside]:
                last_first.callback(what, watch)

    def capture_forward(self, pool: Any) -> None:
        """Capture the forward into a new slot."""
        slot = Slot([self._static_input(number) for number in range(len(self.samples))], self.backend.new_states())
        self.slots.append(slot)
        self.host_steps.append(_C.HostSteps())
        tensors, self.fp8_calls = self.callable_guard.tensors, CapturedFp8Calls()
        before = [version_of(tensor) for tensor in tensors]
        with self.backend.capture(pool, slot.states) as slot.forward, self.host_steps[-1], self.fp8_calls:
            slot.live_outputs = self.layout.outputs_of(self._call(slot.inputs, self.changed.given(slot.inputs)))
        self.versions_bumped = [version_of(t) != old for t, old in zip(tensors, before, strict=True)]
        slot.outputs = [tensor.detach() for tensor in slot.live_outputs]
        slot.grad_inputs = [None] * len(slot.inputs)
        slot.use_grads = [[] for _ in slot.inputs]

    def _static_input(self, number: int) -> Tensor:
        """What a new slot reads as input ``number``, [...] like the sample."""
        sample = self.samples[number]
        if number in self.links:
            slot = self.predecessor.slots[len(self.slots)]
            result = self.predecessor.layout.results[self.links[number]].tensor_in(slot.outputs, slot.inputs)
            return result.detach().requires_grad_(sample.requires_grad)
        return static_copy(sample) if self.slots else sample

    def capture_backward(self, number: int, pool: Any, successor: CallableCapture | None) -> None:
        """Capture the gradients of the forward in slot ``number``, ending in one launch that accumulates them. Where
        ``successor`` reads a result in place, its gradient is read where the successor writes it."""
        slot, lent, held = self.slots[number], {}, []
        if successor is not None:
            following = successor.slots[number]
            # Until this capture is done, their memory is not free.
            held, following.passed_on = [*following.grad_inputs, *following.passed_on], []
            successor.settle(number)
            gradients = following.grad_inputs
            outputs = {i: self.layout.output_that_is(result) for i, result in successor.links.items()}
            lent = {output: gradients[i] for i, output in outputs.items() if gradients[i] is not None}
        outputs = [slot.live_outputs[i] for i in self.output_numbers]
        orders = {i: self.layout.order_of_gradient(i, self._grad_orders) for i in self.output_numbers}
        own = self.group.stagings((slot.live_outputs[i], order) for i, order in orders.items() if i not in lent)
        slot.grad_outputs = [_C.Staging(lent[i], is_lent=True) if i in lent else next(own) for i in self.output_numbers]
        if outputs:
            self._capture_backward(number, pool, outputs, [staging.tensor for staging in slot.grad_outputs])
        if self.predecessor is None:
            self.settle(number)
        elif slot.lent_storages & {storage_key(grad) for grad in slot.grad_inputs if grad is not None}:
            slot.passed_on = held

    def settle(self, number: int) -> None:
        """Leave the memory of the input gradients of slot ``number`` to later captures of the pool."""
        slot = self.slots[number]
        if slot.backward is not None:
            slot.grad_inputs = self.backend.results(slot.grad_inputs, slot.backward)

    def _capture_backward(self, number: int, pool: Any, outputs: list[Tensor], grad_outputs: list[Tensor]) -> None:
        slot = self.slots[number]
        parameters, destinations = self.gradients.parameters, self.destinations()
        uses = Uses(outputs, slot.inputs, self.gradients.inputs)
        added = [slot.inputs[i] for i in uses.in_table]
        self.grad_buffers.provide(parameters, destinations, self.host_steps[number])
        slot.table = new_table(parameters, destinations, self.grad_buffers, added, self.group.device)
        births = TensorWatch(restorable=False, runs_compiled=True)
        with self.grad_buffers.unchanged(parameters), self.backend.capture(pool, slot.states) as slot.backward:
            with births, capturing_backward(self.host_steps[number]):
                grads = gradients_of(self.label, outputs, [*parameters, *uses.leaves], grad_outputs, len(self.slots))
                grads = self.grad_buffers.gather_(parameters, grads, self.host_steps[number])
                input_grads = uses.sums(grads[: len(parameters)], grads[len(parameters) :], births)
            are_linked = [number in self.links for number in self.gradients.inputs]
            input_grads = slot.owned(input_grads, are_linked, births.produced_storages)
            parameter_grads = [
                _C.lay_out(grad, parameter, main_grad_of(parameter) if one.is_in_table else None)
                for grad, parameter, one in zip(grads, parameters, destinations, strict=False)
            ]
            if (self.group.options.accumulate_grads and parameters) or added:
                torch.ops.te_graph.multi_tensor_accumulate_table_(slot.table.entries, slot.table.chunks)
        others = self.backend.results(self.grad_buffers.without_buffers(parameters, parameter_grads), slot.backward)
        slot.parameter_grads = self.grad_buffers.with_buffers(parameters, others)
        slot.table.bind([*slot.parameter_grads, *uses.sources])
        slot.summed_inputs = uses.summed
        for i, grad in zip(self.gradients.inputs, input_grads, strict=True):
            slot.grad_inputs[i] = grad
        for i, each in uses.grads_per_use.items():
            slot.use_grads[i] = self.backend.results(each, slot.backward)
        slot.note_writes(births.externals)

    def destinations(self) -> list[Destination]:
        """Where the gradients of the parameters go, one each."""
        each = zip(self.gradients.parameters, self.gradients.dtypes, strict=True)
        return [Destination.of(p, dtype, self._is_for_autograd(p)) for p, dtype in each]

    def _is_for_autograd(self, parameter: Tensor) -> bool:
        """True where autograd sums the gradient of ``parameter`` [...], as that of one that is a result as well."""
        is_result = self.layout.returns_parameter(parameter) and main_grad_of(parameter) is None
        return is_result or self.group.options.is_for_autograd(parameter)

    def _call(self, inputs: list[Tensor], given: list[Tensor], as_leaves: bool = False) -> list[Tensor]:
        """Run the callable on ``given`` [...], which stand for ``inputs`` [...]; return the tensors of its result.
        Autocast treats them as what other operations computed, unless ``as_leaves``."""
        before = forms_of(given)
        args, kwargs = self.signature.unflatten(given)
        with cast_at_each_use([] if as_leaves else given):
            result = self._run(*args, **kwargs)
        check_forms(self.label, self.signature.distinct_names, before, given)
        changed = self.changed.results(inputs, given)
        self._copies = [given[number] for number in self.changed.numbers]
        self.result, tensors = checked_results(self.label, (result, changed) if changed else result, self._sources)
        return tensors

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Call it without the hooks of the top module, which run around each replay."""
        function = self.root.forward if isinstance(self.root, nn.Module) else self.root
        values = values_of(self.root, kwargs.pop(ARGUMENT, ()))
        hooked = taken_away(self._computable)
        refuse_fp8_before(self.label, self.root)
        with containers_kept(self.label, args, kwargs), own_casts(), values, hooked as self.computed:
            result = call_region(function, args, kwargs)
        refuse_fp8_after(self.label, self.root)
        return result

    def _find_gradients(self, outputs: list[Tensor], inputs: list[Tensor]) -> Gradients:
        """Run the backward once with zero gradients and note which tensors get one."""
        if not outputs:
            return Gradients([], [], [], [])
        reached = [{id(leaf): leaf for leaf in leaves_below(output)} for output in outputs]
        made_inside = self.watch.produced_storages | set(map(storage_key, inputs))  # the latter: x.detach()
        leaves = {id(leaf): leaf for each in reached for leaf in each.values() if storage_key(leaf) not in made_inside}
        parameters = leaves_outside(leaves, self._leaves, lambda: [*walk(TensorReader(self.root)), *self._explore()])
        self._leaves = leaves
        self.gradients = Gradients(parameters, [], [i for i, tensor in enumerate(inputs) if tensor.requires_grad], [])
        return gradients_that_come(self.label, outputs, inputs, self.gradients, reached)
