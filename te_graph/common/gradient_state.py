"""What accumulates the gradient of a parameter, across all that compute one."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from te_graph import _C


class GradientState:
    """What all that compute a gradient of one parameter share.

    Attributes:
        users: the handles of the callables that compute a gradient for it.
        main_grad_reset: tells the next backward to overwrite ``main_grad``.
    """

    def __init__(self) -> None:
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        self.main_grad_reset = _C.MainGradReset()


# Belongs to the parameters, and would be an attribute of theirs if attributes were not saved with them by torch.save.
_states = WeakTensorKeyDictionary()


def gradient_state(parameter: Tensor) -> GradientState:
    """The state of ``parameter`` [...], made at first use."""
    if parameter not in _states:
        _states[parameter] = GradientState()
    return _states[parameter]


def main_grad_of(parameter: Tensor) -> Tensor | None:
    """The ``main_grad`` of ``parameter`` [...], or None."""
    return getattr(parameter, "main_grad", None)
