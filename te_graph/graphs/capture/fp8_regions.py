"""FP8 regions of TransformerEngine, which a graph cannot follow: scales are computed in Python between the calls.

By name, because TransformerEngine need not be there, nor be imported to find out.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_PACKAGE = "transformer_engine."
_STATE = "FP8GlobalStateManager"
_HOMES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")  # newer versions, older ones
REASON = (
    "TransformerEngine's FP8 autocast is on, whose scales change from call to call in Python, where a replay does not "
    "follow: leave the layer eager in it, or build FP8 layers of te_graph.fp8_cast_transpose and te_graph.Fp8Weights, "
    "which can be captured (docs/interfaces.md#fp8)"
)


def is_fp8_region() -> bool:
    """Whether TransformerEngine's ``autocast`` for FP8, or the calibration of one, is on."""
    state = next((vars(sys.modules[home]).get(_STATE) for home in _HOMES if home in sys.modules), None)
    return state is not None and bool(state.is_fp8_enabled() or state.is_fp8_calibration())


def refuse_fp8(label: str, module: Any) -> None:
    """Refuse a call of ``module`` that is about to begin, if it is of TransformerEngine and would compute in FP8.

    Raises:
        RuntimeError: an FP8 region is on.
    """
    if _is_of_engine(module) and is_fp8_region():
        raise RuntimeError(f"{label}: {REASON}")


def refuse_fp8_done(label: str, module: Any) -> None:
    """Likewise where the call has just ended and computed in FP8, in a region that it entered itself."""
    if _is_of_engine(module) and (vars(module).get("fp8") is True or vars(module).get("fp8_calibration") is True):
        raise RuntimeError(f"{label}: {REASON}")


def _is_of_engine(module: Any) -> bool:
    return isinstance(module, nn.Module) and any(kind.__module__.startswith(_PACKAGE) for kind in type(module).__mro__)


def explain_fp8(label: str, message: str) -> str:
    """``message``, why a callable is not replayed; in FP8 regions that began since its capture what they do instead."""
    return f"{label}: {REASON}" if _STATE in message and is_fp8_region() else message
