"""Whether a weight is as it was at a time before."""

from __future__ import annotations

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from te_graph import _C
from te_graph.common.dispatch import storage_key

_PLAIN = (Tensor, nn.Parameter)  # others may have no memory, or one that comes and goes


class WeightMark:
    """A weight [out, in] as it is now, by its memory and how often that was written.

    Args:
        weight: not kept alive.
    """

    def __init__(self, weight: Tensor) -> None:
        self._storage = StorageWeakRef(weight.untyped_storage())  # so that no other one takes its place in memory
        self._address, self._writes = weight.data_ptr(), _C.write_count(weight)

    @classmethod
    def of(cls, weight: Tensor | None) -> WeightMark | None:
        """That of ``weight`` [out, in]; None where there is none that can be told from others."""
        return cls(weight) if type(weight) in _PLAIN and not weight.is_meta else None

    def is_of(self, weight: Tensor | None) -> bool:
        """Whether it is ``weight`` [out, in], unchanged."""
        if type(weight) not in _PLAIN or weight.is_meta or storage_key(weight) != self._storage.cdata:
            return False
        return weight.data_ptr() == self._address and not _C.is_written_since(weight, self._writes)


def plain_weight(module: nn.Module) -> Tensor | None:
    """The weight [out, in] that ``module`` holds; None where it has none, or computes it when it is read."""
    weight = module._parameters.get("weight")
    return vars(module).get("weight") if weight is None else weight
