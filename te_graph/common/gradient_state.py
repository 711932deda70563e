"""What accumulates the gradient of a parameter, across all that compute one."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from te_graph import _C
from te_graph.common.kept_state import keep_by


class GradientState:
    """What all that compute a gradient of one parameter share.

    Attributes:
        users: the handles of the callables that compute a gradient for it.
        main_grad_reset: tells the next backward to overwrite ``main_grad``.
        flat: the FlatParameters that it is in.
        flat_gradient, grad_memory: its gradient there, and where that lies, [...].
        is_flattened: it is the flat parameter of a FlattenParamsWrapper.
        is_handed_over: its gradient is, by that, when the backward has ended.
    """

    def __init__(self) -> None:
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.main_grad_reset = _C.MainGradReset()
        self.flat_gradient: _C.FlatGradient | None = None
        self.grad_memory: Tensor | None = None
        self.flat: weakref.ref[Any] | None = None
        self.is_flattened = self.is_handed_over = False


# Belongs to the parameters, and would be an attribute of theirs if attributes were not saved with them by torch.save.
_states = WeakTensorKeyDictionary()


def gradient_state(parameter: Tensor) -> GradientState:
    """The state of ``parameter`` [...], made at first use."""
    if parameter not in _states:
        _states[parameter] = GradientState()
    return _states[parameter]


# An attribute of a main_grad in a flat buffer, with which it is saved.
IS_FLAT = "te_graph_flat"


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """The ``main_grad`` of ``parameter`` [...], or None: what a file has of a flat one is memory of nothing, and its
    values may have been dropped."""
    main_grad = getattr(parameter, "main_grad", None)
    is_from_file = hasattr(main_grad, IS_FLAT) and main_grad is not gradient_state(parameter).grad_memory
    return None if is_from_file else main_grad


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether hooks of Python's on ``parameter`` [...] get its gradient, or what has accumulated it."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


@contextlib.contextmanager
def _gradients_kept() -> Iterator[None]:
    """Put back for which parameters the next gradient overwrites ``main_grad``, and which flat ones ranks have alike:
    those that are dropped meanwhile are there again."""
    before = [(state.main_grad_reset, state.main_grad_reset.is_pending) for state in _states.values()]
    flat = [(one, one.alike()) for state in _states.values() if (one := state.flat_gradient) is not None]
    try:
        yield
    finally:
        for reset, is_pending in before:
            reset.is_pending = is_pending
        for gradient, alike in flat:
            gradient.put_back(alike)


keep_by(_gradients_kept)


def flat_of(parameter: Tensor) -> Any:
    """The FlatParameters that ``parameter`` [...] is in, or None."""
    state = _states.get(parameter)
    return None if state is None or state.flat is None else state.flat()


def wait_for_parameters(parameters: Iterable[Tensor]) -> None:
    """Let what comes on the current stream wait for those of ``parameters`` [...] that are being gathered."""
    for flat in {flat_of(parameter) for parameter in parameters} - {None}:
        flat.wait_for_parameters()


def expect_whole_gradients(op: str, parameters: Iterable[Tensor], advice: str) -> None:
    """Raise RuntimeError in ``op``, which reads ``.grad`` of ``parameters`` [...], if one of them is flat and has its
    gradient elsewhere or in part, with ``advice``."""
    flats = set()
    for parameter in parameters:
        flat = flat_of(parameter)
        if flat is None:
            continue
        flats.add(flat)
        if gradient_state(parameter).flat_gradient.is_missing():
            continue
        is_passed_over = parameter.grad is None
        if is_passed_over or flat.sharding_group is not None:
            where = "lie in main_grad" if is_passed_over else "are reduced on this rank in part only"
            raise RuntimeError(f"{op}: gradients of flat parameters {where}, which it does not know: {advice}")
    for flat in flats:
        flat.reducer.expect_reduced(op)
