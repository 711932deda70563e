"""A graphed callable as its user holds it: the module or function that replays, and its handle ``.te_graph``."""

from __future__ import annotations

import copyreg
import functools
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from te_graph import _C
from te_graph.capture import CallableCapture
from te_graph.capturing import is_capturing
from te_graph.gradients import GradientState, gradient_state, main_grad_of


class Handle:
    """What ``.te_graph`` of a graphed callable is.

    Attributes:
        label: what messages call the callable.
    """

    def __init__(self, label: str, target: nn.Module | Callable[..., Any]) -> None:
        self.label = label
        self._is_module = isinstance(target, nn.Module)
        self._target = weakref.ref(target) if self._is_module else (lambda: target)
        self._own_forward: Callable[..., Any] | None = None
        self._callable: _C.GraphedCallable | None = None
        self._statistics: dict[str, Any] = {}
        self._eager_calls: Counter[str] = Counter()
        self._parameter_numbers: dict[int, int] = {}
        self._states: list[GradientState] = []

    def arm(self, graphed: _C.GraphedCallable, capture: CallableCapture, statistics: dict[str, Any]) -> None:
        """From now on calls replay ``graphed``."""
        self._callable = graphed
        self._signature = capture.signature
        self._is_flat = capture.signature.is_flat
        self._result = capture.result
        self._grad_mode = capture.grad_mode
        self._training = self._target().training if self._is_module else None
        self._statistics = statistics
        self._share_parameters(capture.gradients.parameters)

    def call(self, root: Any, args: tuple, kwargs: dict[str, Any], base: type[nn.Module] | None = None) -> Any:
        """Replay, or run eagerly where the graph does not apply. ``base`` is the class that a module had before."""
        reason = self._reason_for_eager(root)
        if reason is None:
            is_plain = self._is_flat and not kwargs and self._signature.is_plain(args)
            tensors = args if is_plain else self._signature.flatten(self.label, args, kwargs)
            outputs = self._callable.forward(root, tensors)
            if outputs is not None:
                return outputs[0] if self._result.is_tensor else self._result.unflatten(outputs)
            reason = "inside another capture"
        self._eager_calls[reason] += 1
        return self.run_eagerly(root, base)(*args, **kwargs)

    @torch.compiler.disable
    def call_uncompiled(self, *args: Any) -> Any:
        """``call``, where torch.compile traces the caller: it breaks its graph here. The wrapper costs microseconds, so
        only traced code goes through it."""
        return self.call(*args)

    def _reason_for_eager(self, root: Any) -> str | None:
        if self._callable is None:
            return "not graphed"
        if self._is_module and root.training is not self._training:
            return "captured in training mode" if self._training else "captured in eval mode"
        if torch.is_grad_enabled() is not self._grad_mode:
            return "captured with gradients" if self._grad_mode else "captured without gradients"
        if is_capturing():
            return "inside another capture"
        return None

    def run_eagerly(self, root: Any, base: type[nn.Module] | None) -> Callable[..., Any]:
        """What ``root`` ran before it was graphed."""
        if self._own_forward is not None:
            return self._own_forward
        return root if base is None else functools.partial(base.forward, root)

    def route_through_autograd(self, parameter: Tensor) -> None:
        """Let autograd accumulate the gradient of ``parameter`` [...], which another callable uses as well."""
        if self._callable is not None and id(parameter) in self._parameter_numbers:
            self._callable.route_through_autograd(self._parameter_numbers[id(parameter)])

    def reset(self) -> None:
        """Free the graphs: the callable runs eagerly again, and can be given to ``make_graphed_callables`` anew.

        A backward that is still due runs; its memory goes with it. May be called again.
        """
        target = self._target()
        self._callable = None
        self._statistics = {}
        if self._is_module and target is not None and vars(target).get("te_graph") is self:
            del target.te_graph
            target.__class__ = type(target).__bases__[0]
            if self._own_forward is not None:
                vars(target)["forward"] = self._own_forward
        for state in self._states:
            state.users.discard(self)
        self._states = []

    def info(self) -> dict[str, Any]:
        """What was captured and how often it has run.

        Returns:
            ``name``; ``backend`` ("cuda", "recorder", or None when not graphed); ``slots``; ``graphs``; ``nodes``;
            ``bytes`` of graph memory; ``capture_seconds``; ``in_flight`` forwards that wait for their backward;
            ``forward_replays``; ``backward_replays``; ``eager_calls``, by reason.
        """
        graphed = self._callable
        empty = {"backend": None, "slots": 0, "graphs": 0, "nodes": 0, "bytes": 0, "capture_seconds": 0.0}
        return {
            "name": self.label,
            **(self._statistics or empty),
            "in_flight": graphed.in_flight if graphed else 0,
            "forward_replays": graphed.forward_replays if graphed else 0,
            "backward_replays": graphed.backward_replays if graphed else 0,
            "eager_calls": dict(self._eager_calls),
        }

    def _share_parameters(self, parameters: list[Tensor]) -> None:
        """Note that this callable computes gradients for ``parameters``. One that another callable uses as well goes
        to autograd in both, which sums before it accumulates; only a ``main_grad`` is added to by each."""
        self._parameter_numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._states = [gradient_state(parameter) for parameter in parameters]
        for parameter, state in zip(parameters, self._states, strict=True):
            if main_grad_of(parameter) is None and any(user is not self for user in state.users):
                for user in [*state.users, self]:
                    user.route_through_autograd(parameter)
            state.users.add(self)


class GraphedFunction:
    """A function that replays its graph; ``te_graph`` is its handle."""

    def __init__(self, function: Callable[..., Any], handle: Handle) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self.te_graph = handle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.te_graph.call_uncompiled if torch.compiler.is_compiling() else self.te_graph.call
        return call(self._function, args, kwargs)


@functools.cache
def _graphed_class(base: type[nn.Module]) -> type[nn.Module]:
    """The subclass that a graphed module of class ``base`` is an instance of.

    A subclass rather than an attribute ``forward``: an attribute would refer to its module, so that only the garbage
    collector could free both, and it would be copied and saved with it. What is copied or saved is of class ``base``.
    """

    class Graphed(base):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            handle = self.__dict__.get("te_graph")
            if handle is None:
                return base.forward(self, *args, **kwargs)
            call = handle.call_uncompiled if torch.compiler.is_compiling() else handle.call
            return call(self, args, kwargs, base)

        def __reduce_ex__(self, protocol: int) -> Any:
            handle = vars(self).get("te_graph")
            reduced = super().__reduce_ex__(protocol)
            if handle is None or not isinstance(reduced, tuple):
                return reduced
            constructor, arguments, state, *rest = reduced
            if constructor is copyreg.__newobj__ and arguments == (type(self),):
                # pickle insists that __newobj__ makes the class of the object; this makes the same and does not.
                constructor, arguments = copyreg._reconstructor, (base, object, None)
            if isinstance(state, dict):
                state = {key: value for key, value in state.items() if key != "te_graph"}
                if handle._own_forward is not None:
                    state["forward"] = handle._own_forward
            return constructor, arguments, state, *rest

    Graphed.__name__, Graphed.__qualname__, Graphed.__module__ = base.__name__, base.__qualname__, base.__module__
    return Graphed


def install(target: nn.Module | Callable[..., Any], handle: Handle) -> nn.Module | GraphedFunction:
    """Make ``target`` replay through ``handle``: a module in place, a function by wrapping it."""
    if not isinstance(target, nn.Module):
        return GraphedFunction(target, handle)
    handle._own_forward = vars(target).pop("forward", None)
    target.__class__ = _graphed_class(type(target))
    target.te_graph = handle
    return target
