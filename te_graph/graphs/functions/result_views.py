"""Results that are views: made anew at each call, so that autograd knows what they are views of, as in eager code."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._autograd import CreationMeta, _get_creation_meta, _set_creation_meta

from te_graph import _C


@dataclass(frozen=True, eq=False)
class ResultView:
    """How a result is made of a tensor whose memory it shares.

    Attributes:
        size, stride, offset: where it lies in that memory.
        creation: what autograd has noted of how it became a view; None: to autograd it is none, but a tensor apart.
        function: its view operators, where it reads its memory as something else (another dtype, conjugate).
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    creation: CreationMeta | None = None
    function: _C.View | None = None

    @classmethod
    def between(cls, result: Tensor, source: Tensor) -> ResultView | None:
        """Of ``result`` [...], in the memory of ``source`` [...]; None where that cannot be done again."""
        place = tuple(result.shape), result.stride(), result.storage_offset()
        base = source if source._base is None else source._base
        creation = _get_creation_meta(result) if result._is_view() and result._base is base else None
        if _reads(result) == _reads(source):
            return cls(*place, creation)
        if source is base and _C.View.is_differentiable(result, source):
            return cls(*place, creation, _C.View(result, source))
        return None

    def of(self, source: Tensor) -> Tensor:
        """The result for a call in which ``source`` [...] has been found."""
        if self.creation is None:
            is_whole = (source.shape, source.stride(), source.storage_offset()) == (self.size, self.stride, self.offset)
            apart = source.detach()
            return apart if is_whole else apart.as_strided(self.size, self.stride, self.offset)
        # A view that was made without gradients does not require one, and autograd refuses to change it with one.
        with torch.set_grad_enabled(self.creation != CreationMeta.NO_GRAD_MODE):
            made = self.function.of(source) if self.function else source.as_strided(self.size, self.stride, self.offset)
        if self.creation not in (CreationMeta.DEFAULT, CreationMeta.NO_GRAD_MODE):
            _set_creation_meta(made, self.creation)
        return made


def _reads(tensor: Tensor) -> tuple[torch.dtype, bool, bool]:
    """As what ``tensor`` [...] reads its memory."""
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()
