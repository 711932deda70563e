"""Warm-up and capture of one callable: from Python code to graphs with known inputs, outputs and gradients."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from te_graph import _C
from te_graph.dispatch import is_dense, storage_key
from te_graph.externals import TensorWatch
from te_graph.gradients import destination_dtype
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
    grad_outputs: list[Tensor] = field(default_factory=list)
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
        backend: see ``te_graph.backends``.
        device: where all its tensors are.
        signature: of the sample arguments.
        samples: their tensors; copied, not kept.
        max_in_flight: number of slots.

    Attributes:
        gradients: what the backward computes, once warmed up.
        homes: the guard and the tensors outside that the capture uses, once warmed up.
        output_numbers: which results require a gradient.
        saved_outputs: for each of those, whether the backward reads it.
        result: the nest of the results.
    """

    def __init__(
        self,
        label: str,
        root: Any,
        backend: Any,
        device: torch.device,
        signature: Signature,
        samples: list[Tensor],
        max_in_flight: int,
    ) -> None:
        self.label = label
        self.root = root
        self.backend = backend
        self.device = device
        self.signature = signature
        self.grad_mode = torch.is_grad_enabled()
        self.slots = [Slot([_static_copy(sample) for sample in samples]) for _ in range(max_in_flight)]
        self.watch = TensorWatch(owned=self.slots[0].inputs)
        self._first_watch = TensorWatch(owned=self.slots[0].inputs)
        self._containers = ContainerState(root)

    def warm_up(self, iterations: int, allow_unused_input: bool) -> None:
        """Run forward and backward as they will be captured, and learn what they use.

        The first of at least two iterations lets the callable make what it keeps for later calls. The last one tells
        what is external. Both are watched: what they write outside is put back by ``undo``.
        """
        isolation = _C.LeafIsolation(
            list(self.root.parameters()) if isinstance(self.root, nn.Module) else [], with_accumulators=True
        )
        try:
            tensors = self._iterate(iterations)
        finally:
            isolation.restore()
        self.output_numbers = [i for i, tensor in enumerate(tensors) if tensor.requires_grad and self.gradients.any]
        self.saved_outputs = [storage_key(tensor) in self.watch.saved_storages for tensor in tensors]
        self._check_use(allow_unused_input)
        self._check_escapes()
        try:
            self.homes = find_homes(self.root, self.watch.externals)
        except (RuntimeError, TypeError) as error:
            raise type(error)(f"{self.label}: {error}") from None

    def _iterate(self, iterations: int) -> list[Tensor]:
        """The iterations of the warm-up; returns the results of the last one, [...] each."""
        inputs = self.slots[0].inputs
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

    def is_saved(self, tensor: Tensor) -> bool:
        """True when autograd saves the external ``tensor`` [...] for the backward."""
        external = self.watch.externals.get(storage_key(tensor))
        return external is not None and external.saved

    def capture_forward(self, slot: Slot, pool: Any) -> None:
        before = [tensor._version for tensor in self.homes.tensors]
        with self.backend.capture(pool) as slot.forward:
            slot.live_outputs = self._call(slot.inputs)
        self.versions_bumped = [t._version != old for t, old in zip(self.homes.tensors, before, strict=True)]
        slot.outputs = [tensor.detach() for tensor in slot.live_outputs]
        slot.grad_inputs = [None] * len(slot.inputs)

    def capture_backward(self, slot: Slot, pool: Any, accumulate: bool) -> None:
        """Capture the gradients of a captured forward, ending in one launch that accumulates them."""
        outputs = [slot.live_outputs[i] for i in self.output_numbers]
        if not outputs:
            return
        parameters = self.gradients.parameters
        slot.grad_outputs = [torch.zeros_like(output, requires_grad=False) for output in outputs]
        slot.table = _C.GradientTable(
            sizes=[p.numel() for p in parameters] if accumulate else [],
            source_dtypes=[p.dtype for p in parameters] if accumulate else [],
            destination_dtypes=[destination_dtype(p) for p in parameters] if accumulate else [],
            device=self.device,
        )
        with self.backend.capture(pool) as slot.backward:
            grads = self._backward(outputs, slot.inputs, slot.grad_outputs)
            grads[: len(parameters)] = [
                _in_layout_of(grad, parameter) for grad, parameter in zip(grads, parameters, strict=False)
            ]
            if accumulate and parameters:
                torch.ops.te_graph.multi_tensor_accumulate_table_(slot.table.entries, slot.table.chunks)
        slot.parameter_grads = self.backend.results(grads[: len(parameters)])
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
        reached = [_leaves_below(output) for output in outputs]
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
                grads = list(
                    torch.autograd.grad(outputs, targets, grad_outputs, retain_graph=True, allow_unused=True)
                )
        finally:
            isolation.restore()
        for target, grad in zip(targets, grads, strict=True):
            if grad is not None and grad.layout != torch.strided:
                raise TypeError(
                    f"{self.label}: the gradient of a parameter of shape {list(target.shape)} is {grad.layout}, and a "
                    "graph needs dense gradients (torch.nn.Embedding: sparse=False)"
                )
        return grads

    def _check_use(self, allow_unused_input: bool) -> None:
        inputs = self.slots[0].inputs
        names = self.signature.distinct_names
        for tensor, name in zip(inputs, names, strict=True):
            if storage_key(tensor) in self.watch.mutated_owned:
                op, site = self.watch.mutated_owned[storage_key(tensor)]
                raise RuntimeError(
                    f"{self.label}: {op} modifies {name} in place, which a replay could only do to its own copy: "
                    f"modify a clone; at {site}"
                )
        if not self.grad_mode or allow_unused_input:
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


def _leaves_below(output: Tensor) -> dict[int, Tensor]:
    """The leaves that autograd would accumulate into if ``output`` [...] got a gradient, by identity."""
    if output.grad_fn is None:
        return {id(output): output}
    leaves, seen, stack = {}, {output.grad_fn}, [output.grad_fn]
    while stack:
        node = stack.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves[id(node.variable)] = node.variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return leaves
