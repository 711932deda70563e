"""One capture of a callable: the replay object and the arguments that it is for."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from te_graph import _C
from te_graph.common.before_capture import ReadyForCapture
from te_graph.common.gradient_state import GradientState, flat_of, main_grad_of
from te_graph.graphs.arguments.signature import DiscernibleError, ResultNest, Signature
from te_graph.graphs.capture.call_form import CallForm
from te_graph.graphs.capture.changed_arguments import ChangedArguments
from te_graph.graphs.guards.pure_hooks import ARGUMENT, Computed, current_values
from te_graph.graphs.guards.sources import plain_call_guard

_Kind = _C.ReplayMiss.Kind


@dataclass(eq=False)
class CallableEntry:
    """What a handle keeps of a capture; a handle has one for each signature.

    Attributes:
        graphed: the C++ replay object.
        signature: nest, constants and identities of the arguments; the tensors' facts are in ``graphed``.
        form: brings calls into the form that ``signature`` has.
        result: nest of the results.
        leaves: those outside that get a gradient, in the order of their numbers; not kept alive.
        states: what graphed callables share about each of those.
        has_main_grads: the gradient of one of them goes to a ``main_grad``.
        added_by_ops: of each of those, whether ops of the callable add all of its gradient up by themselves.
        ready: modules that say whether they do so eagerly, too; not kept alive.
        statistics: of the capture: backend, slots, graphs, nodes, fp8_calls, bytes, capture_seconds.
        computed: attributes that hooks of modules below the callable compute inside the graph.
        changed: arguments that the callable changes in place; None where it changes none.
        predecessor: in a chain, the entry whose results it reads in place.
        retired: another capture has taken its place.
    """

    label: str
    graphed: _C.GraphedCallable
    signature: Signature
    form: CallForm
    result: ResultNest
    leaves: list[weakref.ref[Tensor]]
    states: list[GradientState]
    has_main_grads: bool
    added_by_ops: list[bool]
    ready: list[weakref.ref[ReadyForCapture]]
    statistics: dict[str, Any]
    computed: list[Computed]
    changed: ChangedArguments | None
    predecessor: weakref.ref[CallableEntry] | None = None
    retired: bool = False
    _passed_over_at: int = -1
    is_flat: bool = field(init=False)
    has_hooked_values: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_flat = self.signature.is_flat and self.changed is None
        self.has_hooked_values = ARGUMENT in self.signature.shape.children[1].keys

    def replay(self, root: Any, args: tuple, kwargs: dict[str, Any]) -> list | _C.ReplayMiss:
        """The tensors of the results of a replay, or why there was none."""
        if self.is_flat and not kwargs and self.signature.is_plain(args):
            return self.graphed.forward(root, args)
        try:
            args, kwargs = self.form.normalize(args, kwargs)
            if self.has_hooked_values:
                kwargs = {**kwargs, ARGUMENT: current_values(root)}
            tensors = self.signature.flatten(self.label, args, kwargs, self.form.by_position)
        except DiscernibleError as error:
            return _C.ReplayMiss(_Kind.DISCERNIBLE, str(error))
        except ValueError as error:
            return _C.ReplayMiss(_Kind.ARGUMENTS, str(error))
        if self.changed is None:
            return self.graphed.forward(root, tensors)
        if obstacle := self.changed.obstacle(tensors):
            return _C.ReplayMiss(_Kind.ENTANGLED, f"{self.label}: {obstacle}")
        outputs = self.graphed.forward(root, tensors)
        if type(outputs) is list:
            self.changed.write(tensors, outputs)
        return outputs

    def result_of(self, outputs: list[Tensor]) -> Any:
        """The result of a replay that gave ``outputs`` [...]."""
        if self.result.is_tensor:
            return outputs[0]
        result = self.result.unflatten(outputs)
        return result if self.changed is None else result[0]

    def fast_call(self, grad_mode: bool) -> Any:
        """What a call needs that replays this without more ado; None where there is more to do."""
        if not (self.is_flat and self.result.is_tensor) or self.computed:
            return None
        return _C.fast_call(self.graphed, plain_call_guard(), len(self.signature.tensors), grad_mode)

    def adds_to_main_grads(self) -> bool:
        """Whether a gradient goes to a ``main_grad`` that it would not reach in an eager call, as it does in a flat
        buffer, and from layers that add to it themselves."""
        if not self.has_main_grads:
            return False
        ready = [module for reference in self.ready if (module := reference()) is not None]
        for reference, is_added_by_ops in zip(self.leaves, self.added_by_ops, strict=True):
            leaf = reference()
            if leaf is None or not leaf.requires_grad or main_grad_of(leaf) is None or flat_of(leaf) is not None:
                continue
            if not (is_added_by_ops and any(module.adds_to_main_grad(leaf) for module in ready)):
                return True
        return False

    def pass_over(self) -> None:
        """Note that a call replays another capture, or runs eagerly because that could not be made."""
        self._passed_over_at = self.graphed.forward_replays

    def take_up(self) -> None:
        """Note that calls come here again, whether they can be replayed or not."""
        self._passed_over_at = -1

    @property
    def is_passed_over(self) -> bool:
        """True when it has been passed over and not replayed since."""
        return self._passed_over_at == self.graphed.forward_replays

    @property
    def lost_predecessor(self) -> bool:
        """True when the entry whose results it reads in place has been replaced, freed or passed over."""
        if self.predecessor is None:
            return False
        entry = self.predecessor()
        return entry is None or entry.retired or entry.is_passed_over
