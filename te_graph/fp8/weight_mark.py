"""Whether the weight of a module is as it was at a time before."""

from __future__ import annotations

from torch import Tensor, nn

from te_graph import _C

_PLAIN = (Tensor, nn.Parameter)  # others may have no memory, or one that comes and goes


def mark_of_plain(weight: Tensor | None) -> _C.WeightMark | None:
    """That of ``weight`` [out, in] or [in, out], which it does not keep alive; None where there is none that can be
    told from others."""
    return _C.WeightMark(weight) if type(weight) in _PLAIN and not weight.is_meta else None


def is_marked(mark: _C.WeightMark | None, weight: Tensor | None) -> bool:
    """Whether ``mark`` is of ``weight`` [out, in] or [in, out], unchanged."""
    return mark is not None and type(weight) in _PLAIN and not weight.is_meta and mark.is_of(weight)


def plain_weight(module: nn.Module) -> Tensor | None:
    """The weight [out, in] or [in, out] that ``module`` holds; None: it has none, or computes it when it is read, or
    inside a graph, behind which something else stands in its place."""
    weight = module._parameters.get("weight")
    weight = vars(module).get("weight") if weight is None else weight
    return weight if isinstance(weight, Tensor) else None
