"""What functions of this area expect of a module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import nn

from te_graph.fp8.marked_state import MarkedState

if TYPE_CHECKING:
    from te_graph.fp8.member import Member


class FP8Module(Protocol):
    """What computes in FP8.

    Attributes:
        weight: [out, in], or [in, out].
        inputs_first: it is [in, out].
        fuse_wgrad_accumulation: the product that is the weight's gradient adds to ``weight.main_grad``.
        fp8: what it has in a scope, with what is known of its scales.
        fp8_evaluated: the same in the scope of evaluations by another recipe, or before it trains with what is loaded,
            which change nothing of that; it may become ``fp8``, too.
        loaded_state: what was loaded before it had one.
        has_told_misfit: it has said that it computes in high precision.
    """

    weight: nn.Parameter
    inputs_first: bool
    fuse_wgrad_accumulation: bool
    fp8: Member | None
    fp8_evaluated: Member | None
    loaded_state: MarkedState | None
    has_told_misfit: bool
