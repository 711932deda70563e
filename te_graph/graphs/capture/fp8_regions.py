"""FP8 regions of TransformerEngine, which a graph cannot follow: scales are computed in Python between the calls.

What is TransformerEngine's is known by name: the package need not be installed, and looking for it imports nothing.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_PACKAGE = "transformer_engine."
_STATE = "FP8GlobalStateManager"
_STATE_MODULES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")  # new versions, old
REASON = (
    "TransformerEngine's FP8 autocast is on, whose scales change from call to call in Python, where a replay does not "
    "follow: leave the layer eager in it, or use te_graph.Linear or te_graph.convert_to_fp8 in te_graph.fp8_autocast, "
    "which can be captured (docs/interfaces.md#fp8)"
)


def is_fp8_region() -> bool:
    """Whether TransformerEngine's ``autocast`` for FP8, or the calibration of one, is on."""
    state = next((vars(sys.modules[name]).get(_STATE) for name in _STATE_MODULES if name in sys.modules), None)
    return state is not None and bool(state.is_fp8_enabled() or state.is_fp8_calibration())


def refuse_fp8_before(label: str, module: Any) -> None:
    """Refuse a call of ``module`` that is about to begin, if it is of TransformerEngine and would compute in FP8.

    Raises:
        RuntimeError: an FP8 region is on.
    """
    if _is_of_engine(module) and is_fp8_region():
        raise RuntimeError(f"{label}: {REASON}")


def refuse_fp8_after(label: str, module: Any) -> None:
    """Refuse a call of ``module`` that has just ended, if it has computed in FP8, in a region that it entered itself.

    Raises:
        RuntimeError: it has.
    """
    if _is_of_engine(module) and (vars(module).get("fp8") is True or vars(module).get("fp8_calibration") is True):
        raise RuntimeError(f"{label}: {REASON}")


def explain_fp8(label: str, message: str) -> str:
    """``message``, why a callable is not replayed; where an FP8 region has begun since its capture, ``REASON``."""
    return f"{label}: {REASON}" if _STATE in message and is_fp8_region() else message


def _is_of_engine(module: Any) -> bool:
    return isinstance(module, nn.Module) and any(kind.__module__.startswith(_PACKAGE) for kind in type(module).__mro__)
