"""Whether a weight is as it was at a time before."""

from __future__ import annotations

from torch import Tensor, nn

from te_graph import _C

_PLAIN = (Tensor, nn.Parameter)  # others may have no memory, or one that comes and goes


class WeightMark:
    """A weight [out, in] or [in, out] as it is now, by its memory and how often that was written.

    Args:
        weight: not kept alive.
    """

    def __init__(self, weight: Tensor) -> None:
        self._mark = _C.WeightMark(weight)

    @classmethod
    def of(cls, weight: Tensor | None) -> WeightMark | None:
        """That of ``weight`` [out, in] or [in, out]; None where there is none that can be told from others."""
        return cls(weight) if type(weight) in _PLAIN and not weight.is_meta else None

    def is_of(self, weight: Tensor | None) -> bool:
        """Whether it is ``weight`` [out, in] or [in, out], unchanged."""
        return type(weight) in _PLAIN and not weight.is_meta and self._mark.is_of(weight)


def plain_weight(module: nn.Module) -> Tensor | None:
    """The weight [out, in] or [in, out] that ``module`` holds; None: it has none, or computes it when it is read."""
    weight = module._parameters.get("weight")
    return vars(module).get("weight") if weight is None else weight
