"""Which modules a step calls, one inside the other, and with what."""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from te_graph.common.dispatch import is_in_backward, is_strided, version_of
from te_graph.common.fp8_calls import Fp8RegionState
from te_graph.graphs.arguments.nest import flatten
from te_graph.graphs.capture.layout import order_of_dims
from te_graph.graphs.capture.request import SeenGradients
from te_graph.graphs.layers.autocast_state import AutocastState
from te_graph.graphs.layers.call_arguments import CallArguments, SampleValues, UnfitArgumentError

_CHECKPOINTED = (
    "an activation checkpoint around it saves its activations, which a replay keeps: checkpoint inside of it"
)


@dataclass(eq=False)
class LayerCall:
    """One call of a module.

    Attributes:
        module: what is called; None for the step itself.
        number: in the order of the calls.
        arguments: None where ``obstacle`` says why, or where they are not wanted.
        obstacle: why the call cannot be captured.
        fed_by: the calls whose first result is, unchanged, the first positional argument of this one.
        inner: the calls that its forward makes.
        grad_orders: number of a result -> the order of the dimensions of its gradient, where the backward gave one in
            another order than the result's own.
        gradients_came: number of a differentiable result -> whether the backward gave it a gradient.
    """

    module: nn.Module | None = None
    number: int = -1
    arguments: CallArguments | None = None
    obstacle: str | None = None
    autocast: AutocastState = field(default_factory=AutocastState.now)
    fp8_region: Fp8RegionState = field(default_factory=Fp8RegionState.now)
    grad_enabled: bool = True
    fed_by: list[LayerCall] = field(default_factory=list)
    inner: list[LayerCall] = field(default_factory=list)
    grad_orders: dict[int, tuple[int, ...]] = field(default_factory=dict)
    gradients_came: dict[int, bool] = field(default_factory=dict)

    def note_gradients(self, results: Sequence[Tensor]) -> None:
        """Let the backward note which of ``results`` [...] get a gradient, and how it lies. A graph of autograd that
        the step leaves holds no more of the call than ``grad_orders`` and ``gradients_came``."""
        for number, result in enumerate(results):
            if result.grad_fn is not None and is_strided(result):
                own = order_of_dims(result)
                self.gradients_came[number] = False
                note = functools.partial(_note_gradient, self.grad_orders, self.gradients_came, number, own)
                result.register_hook(note)

    def seen_gradients(self) -> SeenGradients:
        """What was noted of them; nothing where the step had no backward, or passed the call by."""
        missing = [number for number, came in self.gradients_came.items() if not came]
        is_known = len(missing) < len(self.gradients_came)
        return SeenGradients(dict(self.grad_orders), frozenset(missing if is_known else ()))

    def below(self) -> Iterator[LayerCall]:
        """The calls inside, in order."""
        for call in self.inner:
            yield call
            yield from call.below()


class LayerCalls:
    """While entered, follows the calls of modules on the thread that made this object.

    Args:
        modules: those whose calls are followed.
        is_wanted: whether the arguments of a module's calls are kept.

    Attributes:
        top: the step, and all calls inside it.
        computed_again: modules that a backward has called.
    """

    def __init__(self, modules: list[nn.Module], is_wanted: Callable[[nn.Module], bool]) -> None:
        self.top = LayerCall()
        self.computed_again: set[nn.Module] = set()
        self._modules = modules
        self._is_wanted = is_wanted
        self._values = SampleValues()
        self._stack = [self.top]
        self._count = 0
        self._results: dict[int, list[tuple[weakref.ref[Tensor], int | None, LayerCall]]] = {}
        self._thread = threading.get_ident()
        self._hooks: list[Any] = []

    def __enter__(self) -> LayerCalls:
        for module in self._modules:
            self._hooks.append(module.register_forward_pre_hook(self._begin, with_kwargs=True))
            # First of all: what other hooks make of a result is not what a graph gives.
            self._hooks.append(module.register_forward_hook(self._end, prepend=True, always_call=True))
        return self

    def __exit__(self, *failure: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._results.clear()
        self._values = SampleValues()

    @property
    def under_way(self) -> list[nn.Module]:
        """The modules that run now, outermost first."""
        return [call.module for call in self._stack[1:]]

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        torch.clear_autocast_cache()  # else only the first module that uses a weight would be seen to cast it
        if is_in_backward():
            self.computed_again.add(module)
            return
        if threading.get_ident() != self._thread:
            return
        call = LayerCall(module, self._count, grad_enabled=torch.is_grad_enabled())
        self._count += 1
        self._stack[-1].inner.append(call)
        self._stack.append(call)
        if args and isinstance(args[0], Tensor):
            known = self._results.get(id(args[0]), ())
            call.fed_by = [one for ref, version, one in known if ref() is args[0] and version == version_of(args[0])]
        if not self._is_wanted(module):
            return
        call.obstacle = _obstacle()
        if call.obstacle is None:
            try:
                call.arguments = self._values.arguments(type(module), args, kwargs)
            except UnfitArgumentError as error:
                call.obstacle = str(error)

    def _end(self, module: nn.Module, args: tuple, result: Any) -> None:
        torch.clear_autocast_cache()
        if is_in_backward() or threading.get_ident() != self._thread:
            return
        while len(self._stack) > 1:
            call = self._stack.pop()
            if call.module is module:
                break
        tensors = list({id(leaf): leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)}.values())
        if self._is_wanted(module):
            call.note_gradients(tensors)
        if tensors:
            tensor = tensors[0]
            known = self._results.setdefault(id(tensor), [])
            known[:] = [one for one in known if one[0]() is tensor]
            known.append((weakref.ref(tensor), version_of(tensor), call))


def _note_gradient(
    orders: dict[int, tuple[int, ...]],
    came: dict[int, bool],
    number: int,
    own: tuple[int, ...] | None,
    grad: Tensor | None,
) -> None:
    """Enter into ``orders`` how ``grad`` [...] of result ``number`` lies, unless in the result's ``own`` order, or
    autograd has none for it (an autograd Function gave None), and into ``came`` that it came."""
    came[number] = came[number] or grad is not None
    orders.pop(number, None)
    order = order_of_dims(grad) if grad is not None and is_strided(grad) else None
    if order is None or own is None:
        return
    is_long = [size > 1 for size in grad.shape]  # where one of size 1 lies makes no difference
    if [dim for dim in order if is_long[dim]] != [dim for dim in own if is_long[dim]]:
        orders[number] = order


def _obstacle() -> str | None:
    """Why what is around the call that begins now does not go with a replay, if so."""
    if torch.is_inference_mode_enabled():
        return "it is called in inference mode"
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and getattr(hooks[0], "__module__", "") != checkpoint.__name__:
        return "it is called under torch.autograd.graph.saved_tensors_hooks, which see no replay"
    if hooks is not None or _is_in_reentrant_checkpoint():
        return _CHECKPOINTED
    return None


def _is_in_reentrant_checkpoint() -> bool:
    if torch.is_grad_enabled():
        return False
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is checkpoint.CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False
