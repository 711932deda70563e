"""What a message says about a call that no graph fits, besides the reason."""

from __future__ import annotations

from typing import Any

from torch import nn

from te_graph.graphs.capture.call_form import CallForm
from te_graph.graphs.capture.fp8_regions import explain_fp8
from te_graph.graphs.capture.wrappers import reason_to_refuse_module

_CHECKPOINT_FLAG = "gradient_checkpointing"  # an attribute of Hugging Face's layers
_CHECKPOINT_ADVICE = ". To checkpoint inside the callable, capture after gradient_checkpointing_enable()"
_EVALUATED = "fp8_evaluated of "  # what a layer evaluates with, by another recipe than it trains by
_EVALUATED_ADVICE = (
    ". Capture evaluations by another recipe than the training's, whose scales they take, after the first call that "
    "trains and after loads of FP8 state, and by one such recipe"
)
_MAX_BEFORE_ADVICE = 200  # characters: what objects show of themselves may be long


def with_advice(label: str, message: str, form: CallForm, args: tuple, kwargs: dict[str, Any]) -> str:
    """``message`` about the arguments, which begins with ``label``, with what lets such calls run, where they can run
    at all."""
    advice = 'on_mismatch="eager" or "capture" lets such calls run'
    if not form.is_possible(args, kwargs):
        return message
    if len(args) != form.count:
        advice = f"give sample_args as the model calls it; {advice}"
    if len(message) <= _MAX_BEFORE_ADVICE:
        return f"{message}; {advice}"
    return f"{label}: {advice}: {message.removeprefix(f'{label}: ')}"


def with_circumstances(label: str, message: str, root: Any) -> str:
    """``message`` about what ``root`` is, or where it is called, which begins with ``label``, explained."""
    known = {_CHECKPOINT_FLAG: _CHECKPOINT_ADVICE, _EVALUATED: _EVALUATED_ADVICE}
    advice = next((advice for words, advice in known.items() if words in message), None)
    return explain_fp8(label, message) + (_wrapped_since(root) if advice is None else advice)


def _wrapped_since(root: Any) -> str:
    """What ``root`` has become that no graph can hold, as a further sentence of a message; or nothing."""
    reasons = map(reason_to_refuse_module, root.modules() if isinstance(root, nn.Module) else ())
    reason = next(filter(None, reasons), None)
    return "" if reason is None else f". Since then it has been wrapped: {reason}"
