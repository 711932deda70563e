"""What is known of the scales of a module, with the weight that it goes with."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from te_graph import _C
from te_graph.common.own_objects import OwnObject


@dataclass(frozen=True, eq=False)
class MarkedState(OwnObject):
    """A state and its weight.

    Attributes:
        state: [3, n] fp32, as ``Member.state`` returns it.
        mark: of the weight; None: that is not known.
    """

    state: Tensor
    mark: _C.WeightMark | None
