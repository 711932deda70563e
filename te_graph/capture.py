"""Warm-up and capture of one callable: from Python code to graphs with known inputs, outputs and gradients."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from te_graph import _C
from te_graph.dispatch import is_dense, storage_key
from te_graph.externals import TensorWatch, leaves_below
from te_graph.gradients import destination_dtype
from te_graph.group import Group
from te_graph.homes import find_homes, walk
from te_graph.rollback import ContainerState
from te_graph.signature import ResultSpec, Signature


@dataclass
class Slot:
    """A graph pair and the memory that belongs to it. Tensors are [...] of the callable's shapes."""

    inputs: list[Tensor]
    forward: Any = None
    backward: Any = None
    outputs: list[Tensor] = field(default_factory=list)
    live_outputs: list[Tensor] = field(default_factory=list)  # with their autograd graph, until all is captured
    grad_outputs: list[_C.Staging] = field(default_factory=list)
    grad_inputs: list[Tensor | None] = field(default_factory=list)
    parameter_grads: list[Tensor] = field(default_factory=list)
    table: Any = None


@dataclass
class Gradients:
    """What the backward of a callable computes, as the last warm-up saw it.

    Attributes:
        parameters: leaves outside the callable that get a gradient.
        inputs: numbers of the inputs that get a gradient.
        depends_on: for each parameter, then each input: which differentiable outputs its gradient comes from.
    """

    parameters: list[Tensor]
    inputs: list[int]
    depends_on: list[list[bool]]

    @property
    def any(self) -> bool:
        return bool(self.parameters or self.inputs)


class CallableCapture:
    """Takes one callable through warm-up and capture.

    Args:
        label: what messages call it.
        root: the module or function, where the guard starts.
        group: what it shares with the callables that are captured with it.
        signature: of the sample arguments.
        samples: their tensors; copied, not kept.

    Attributes:
        links: which inputs lie where the predecessor's results are: number of the input -> number of the result.
        gradients: what the backward computes, once warmed up.
        homes: the guard and the tensors outside that the capture uses, once warmed up.
        output_numbers: which results require a gradient.
        saved_outputs: for each of those, whether the backward reads it.
        result: the nest of the results.
        sample_results: the results of the warm-up, as leaves, until the successor has been linked.
    """

    def __init__(
        self,
        label: str,
        root: Any,
        group: Group,
        signature: Signature,
        samples: list[Tensor],
    ) -> None:
        self.label = label
        self.root = root
        self.group = group
        self.backend = group.backend
        self.signature = signature
        self.samples = [_static_copy(sample) for sample in samples]
        self.predecessor: CallableCapture | None = None
        self.links: dict[int, int] = {}
        self.slots: list[Slot] = []
        self.watch = TensorWatch(owned=self.samples)
        self._first_watch = TensorWatch(owned=self.samples)
        self._containers = ContainerState(place for place in walk(root) if "global variable" not in place.name)

    def link_to(self, predecessor: CallableCapture, everything: bool) -> None:
        """Read the results of ``predecessor`` in place: all of them, or the first as the first positional tensor."""
        results = predecessor.sample_results
        count = len(results) if everything else 1
        names = self.signature.distinct_names
        for number in range(count):
            if number >= min(len(names), len(results)) or not names[number].startswith("args"):
                raise ValueError(
                    f"{self.label}: expected a tensor as first argument and a tensor as first result of "
                    f"{predecessor.label}, since chain=True feeds the one with the other"
                )
            sample, result = self.samples[number], results[number]
            for fact in ("shape", "dtype", "requires_grad"):
                expected, got = getattr(result, fact), getattr(sample, fact)
                if expected != got:
                    raise ValueError(
                        f"{self.label}: expected sample {names[number]} with {fact} {expected}, as result {number} of "
                        f"{predecessor.label} in the chain, got {got}; later samples may be left out"
                    )
            self.links[number] = number
        self.predecessor = predecessor
        predecessor.sample_results = []

    def warm_up(self) -> None:
        """Run forward and backward as they will be captured, and learn what they use.

        The first of at least two iterations lets the callable make what it keeps for later calls. The last one tells
        what is external. Both are watched: what they write outside is put back by ``undo``.
        """
        isolation = _C.LeafIsolation(
            list(self.root.parameters()) if isinstance(self.root, nn.Module) else [], with_accumulators=True
        )
        try:
            tensors = self._iterate(max(2, self.group.options.num_warmup_iters))
        finally:
            isolation.restore()
        self.sample_results = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        self.output_numbers = [i for i, tensor in enumerate(tensors) if tensor.requires_grad and self.gradients.any]
        self.saved_outputs = [storage_key(tensor) in self.watch.saved_storages for tensor in tensors]
        self._check_use()
        self._check_escapes()
        try:
            self.homes = find_homes(
                self.root, self.watch.externals, self.gradients.parameters, self.group.options.hooks == "captured"
            )
        except (RuntimeError, TypeError) as error:
            raise type(error)(f"{self.label}: {error}") from None

    def _iterate(self, iterations: int) -> list[Tensor]:
        """The iterations of the warm-up; returns the results of the last one, [...] each."""
        inputs = self.samples
        nothing = contextlib.nullcontext()
        watches = [self._first_watch, *[nothing] * (iterations - 2), self.watch]
        for watch in watches:
            with watch, self.watch.saved_tensors() if watch is self.watch else nothing:
                tensors = self._call(inputs)
            differentiable = [tensor for tensor in tensors if tensor.requires_grad]
            with watch:
                self.gradients = self._find_gradients(differentiable, inputs)
        return tensors

    def undo(self) -> None:
        """Put back what warm-up and capture wrote into tensors outside."""
        self.watch.restore()
        self._first_watch.restore()

    def undo_failure(self) -> None:
        """Put back, too, what they left in attributes and containers. After a success that stays: it may be in use."""
        self._containers.restore()
        self.watch.restore_grads()
        self._first_watch.restore_grads()

    def is_saved(self, tensor: Tensor) -> bool:
        """True when autograd saves the external ``tensor`` [...] for the backward."""
        external = self.watch.externals.get(storage_key(tensor))
        return external is not None and external.saved

    def is_saved_input(self, number: int) -> bool:
        """True when autograd saves input ``number`` for the backward."""
        return storage_key(self.samples[number]) in self.watch.saved_storages

    def capture_forward(self, pool: Any) -> None:
        """Capture the forward into a new slot."""
        slot = Slot([self._static_input(number) for number in range(len(self.samples))])
        self.slots.append(slot)
        before = [tensor._version for tensor in self.homes.tensors]
        with self.backend.capture(pool) as slot.forward:
            slot.live_outputs = self._call(slot.inputs)
        self.versions_bumped = [t._version != old for t, old in zip(self.homes.tensors, before, strict=True)]
        slot.outputs = [tensor.detach() for tensor in slot.live_outputs]
        slot.grad_inputs = [None] * len(slot.inputs)

    def _static_input(self, number: int) -> Tensor:
        """What a new slot reads as input ``number``, [...] like the sample."""
        sample = self.samples[number]
        if number in self.links:
            result = self.predecessor.slots[len(self.slots)].outputs[self.links[number]]
            return result.detach().requires_grad_(sample.requires_grad)
        return _static_copy(sample) if self.slots else sample

    def capture_backward(self, number: int, pool: Any, successor: CallableCapture | None) -> None:
        """Capture the gradients of the forward in slot ``number``, ending in one launch that accumulates them.

        Where ``successor`` reads a result in place, its gradient is read where the successor writes it.
        """
        slot, lent, held = self.slots[number], {}, []
        if successor is not None:
            held = successor.slots[number].grad_inputs  # until this capture is done, their memory is not free
            successor.settle(number)
            gradients = successor.slots[number].grad_inputs
            lent = {result: gradients[i] for i, result in successor.links.items() if gradients[i] is not None}
        outputs = [slot.live_outputs[i] for i in self.output_numbers]
        own = self.group.stagings([slot.live_outputs[i] for i in self.output_numbers if i not in lent])
        slot.grad_outputs = [_C.Staging(lent[i], is_lent=True) if i in lent else next(own) for i in self.output_numbers]
        if outputs:
            self._capture_backward(slot, pool, outputs, [staging.tensor for staging in slot.grad_outputs])
        if self.predecessor is None:
            self.settle(number)
        del held

    def settle(self, number: int) -> None:
        """Leave the memory of the input gradients of slot ``number`` to later captures of the pool."""
        slot = self.slots[number]
        if slot.backward is not None:
            slot.grad_inputs = self.backend.results(slot.grad_inputs, slot.backward)

    def _capture_backward(self, slot: Slot, pool: Any, outputs: list[Tensor], grad_outputs: list[Tensor]) -> None:
        parameters, accumulate = self.gradients.parameters, self.group.options.accumulate_grads
        slot.table = _C.GradientTable(
            sizes=[p.numel() for p in parameters] if accumulate else [],
            source_dtypes=[p.dtype for p in parameters] if accumulate else [],
            destination_dtypes=[destination_dtype(p) for p in parameters] if accumulate else [],
            device=self.group.device,
        )
        with self.backend.capture(pool) as slot.backward:
            grads = self._backward(outputs, slot.inputs, grad_outputs)
            grads[: len(parameters)] = [
                _in_layout_of(grad, parameter) for grad, parameter in zip(grads, parameters, strict=False)
            ]
            if accumulate and parameters:
                torch.ops.te_graph.multi_tensor_accumulate_table_(slot.table.entries, slot.table.chunks)
        slot.parameter_grads = self.backend.results(grads[: len(parameters)], slot.backward)
        if accumulate:
            slot.table.bind(slot.parameter_grads)
        for number, grad in zip(self.gradients.inputs, grads[len(parameters) :], strict=True):
            slot.grad_inputs[number] = grad

    def _call(self, inputs: list[Tensor]) -> list[Tensor]:
        """Run the callable on ``inputs`` [...]; return its tensors, as clones where they share memory with others."""
        args, kwargs = self.signature.unflatten(inputs)
        self.result, tensors = ResultSpec.of(self.label, self._run(*args, **kwargs))
        foreign = {storage_key(tensor) for tensor in inputs} | set(self.watch.externals)
        for number, tensor in enumerate(tensors):
            if tensor.layout != torch.strided:
                raise TypeError(f"{self.label}: expected dense results, got result {number} of layout {tensor.layout}")
        return [tensor.clone() if storage_key(tensor) in foreign else tensor for tensor in tensors]

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        """Call it without the hooks of the top module, which run around each replay."""
        return self.root.forward(*args, **kwargs) if isinstance(self.root, nn.Module) else self.root(*args, **kwargs)

    def _find_gradients(self, outputs: list[Tensor], inputs: list[Tensor]) -> Gradients:
        """Run the backward once with zero gradients and note who gets one."""
        if not outputs:
            return Gradients([], [], [])
        reached = [{id(leaf): leaf for leaf in leaves_below(output)} for output in outputs]
        known = {id(tensor) for tensor in inputs}
        parameters: dict[int, Tensor] = {}
        for leaves in reached:
            parameters.update({key: leaf for key, leaf in leaves.items() if key not in known})
        made_inside = self.watch.produced_storages
        parameters = {k: p for k, p in parameters.items() if storage_key(p) not in made_inside}
        self.gradients = Gradients(
            list(parameters.values()), [i for i, tensor in enumerate(inputs) if tensor.requires_grad], []
        )
        grads = self._backward(outputs, inputs, [torch.zeros_like(output) for output in outputs])
        targets = self.gradients.parameters + [inputs[i] for i in self.gradients.inputs]
        used = [
            (target, [id(target) in leaves for leaves in reached])
            for target, grad in zip(targets, grads, strict=True)
            if grad is not None
        ]
        found = {id(target) for target, _ in used}
        return Gradients(
            [p for p in self.gradients.parameters if id(p) in found],
            [i for i in self.gradients.inputs if id(inputs[i]) in found],
            [depends_on for _, depends_on in used],
        )

    def _backward(self, outputs: list[Tensor], inputs: list[Tensor], grad_outputs: list[Tensor]) -> list[Tensor]:
        """Gradients of parameters, then of inputs, [...] each like its tensor, without running their hooks.

        Autocast is off, as where backward() is usually called; the ops that forward ran keep their dtypes.
        """
        targets = self.gradients.parameters + [inputs[i] for i in self.gradients.inputs]
        if not targets:
            return []
        isolation = _C.LeafIsolation(targets, with_accumulators=False)
        try:
            with torch.autocast(outputs[0].device.type, enabled=False):
                grads = list(torch.autograd.grad(outputs, targets, grad_outputs, retain_graph=True, allow_unused=True))
        finally:
            isolation.restore()
        for target, grad in zip(targets, grads, strict=True):
            if grad is not None and grad.layout != torch.strided:
                raise TypeError(
                    f"{self.label}: the gradient of a parameter of shape {list(target.shape)} is {grad.layout}, and a "
                    "graph needs dense gradients (torch.nn.Embedding: sparse=False)"
                )
        return grads

    def _check_use(self) -> None:
        inputs = self.samples
        names = self.signature.distinct_names
        for tensor, name in zip(inputs, names, strict=True):
            if storage_key(tensor) in self.watch.mutated_owned:
                op, site = self.watch.mutated_owned[storage_key(tensor)]
                raise RuntimeError(
                    f"{self.label}: {op} modifies {name} in place, which a replay could only do to its own copy: "
                    f"modify a clone; at {site}"
                )
        if not torch.is_grad_enabled() or self.group.options.allow_unused_input:
            return
        for number, (tensor, name) in enumerate(zip(inputs, names, strict=True)):
            if tensor.requires_grad and number not in self.gradients.inputs:
                raise RuntimeError(
                    f"{self.label}: {name} requires a gradient but does not contribute to the results; pass "
                    "allow_unused_input=True if that is meant"
                )

    def _check_escapes(self) -> None:
        """Refuse a tensor that is computed and left behind: a replay would not leave it there."""
        for place in walk(self.root):
            is_tensor = isinstance(place.obj, Tensor) and is_dense(place.obj)
            if is_tensor and storage_key(place.obj) in self.watch.produced_storages:
                raise RuntimeError(
                    f"{self.label}: the callable leaves a tensor that it computed in {place.name}; a replay would not "
                    "run that assignment: return the tensor, or write a buffer in place"
                )


def _static_copy(sample: Tensor) -> Tensor:
    """A copy of ``sample`` [...] in memory of its own, with its layout if that is dense."""
    copy = torch.empty_like(sample, requires_grad=False).copy_(sample.detach())
    return copy.requires_grad_(sample.requires_grad)


def _in_layout_of(grad: Tensor, parameter: Tensor) -> Tensor:
    """``grad`` [...] in the layout that autograd gives to ``.grad``: the parameter's if dense, else contiguous."""
    wanted = torch.empty_like(parameter, requires_grad=False) if grad.stride() != parameter.stride() else None
    if wanted is None or wanted.stride() == grad.stride():
        return grad
    return wanted.copy_(grad)
