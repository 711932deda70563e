"""Results that are views, or have a class or attributes: made anew at each call, with what autograd knows of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import CreationMeta, _get_creation_meta, _set_creation_meta

from te_graph import _C
from te_graph.graphs.guards.values import value_of


@dataclass(frozen=True, eq=False)
class ResultView:
    """How a result is made of a tensor whose memory it shares.

    Attributes:
        size, stride, offset: where it lies in that memory.
        creation: what autograd has noted of how it became a view; None: to autograd it is none, but a tensor apart.
        function: its view operators, where it reads its memory as something else (another dtype, conjugate).
        kind: its class, where it has one of its own or attributes; or what it is made of has a class of its own.
        attributes: of it.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    creation: CreationMeta | None = None
    function: _C.View | None = None
    kind: type[Tensor] | None = None
    attributes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def between(cls, result: Tensor, source: Tensor) -> ResultView | None:
        """Of ``result`` [...], in the memory of ``source`` [...]; None where that cannot be done again."""
        place = tuple(result.shape), result.stride(), result.storage_offset()
        base = source if source._base is None else source._base
        creation = _get_creation_meta(result) if result._is_view() and result._base is base else None
        if result.has_names() or source.has_names():
            return None
        is_plain = type(result) is type(source) is Tensor and not vars(result)
        dress = (None, {}) if is_plain else (type(result), dict(vars(result)))
        if _reads(result) == _reads(source):
            return cls(*place, creation, None, *dress)
        if source is base and _C.View.is_differentiable(result, source):
            return cls(*place, creation, _C.View(result, source), *dress)
        return None

    def make(self, source: Tensor) -> Tensor:
        """The result for a call in which ``source`` [...] has been found."""
        if self.kind is None:
            return self._plain(source)
        with torch._C.DisableTorchFunctionSubclass():  # what a class does to its tensors was done in the capture
            made = self._plain(source)
        vars(made).update({key: _made_anew(value) for key, value in self.attributes.items()})
        return made

    def _plain(self, source: Tensor) -> Tensor:
        if self.creation is None:
            is_whole = (source.shape, source.stride(), source.storage_offset()) == (self.size, self.stride, self.offset)
            # Last, since what is a view of something apart remembers the grad mode.
            made = (source if is_whole else source.as_strided(self.size, self.stride, self.offset)).detach()
            return made if self.kind in (None, Tensor) else Tensor._make_subclass(self.kind, made, False)
        # A view that was made without gradients does not require one, and autograd refuses to change it with one.
        has_grad = self.creation != CreationMeta.NO_GRAD_MODE
        if torch.is_grad_enabled() == has_grad:
            made = self._view(source)
        else:
            with torch.set_grad_enabled(has_grad):
                made = self._view(source)
        if self.creation not in (CreationMeta.DEFAULT, CreationMeta.NO_GRAD_MODE):
            _set_creation_meta(made, self.creation)
        return made

    def _view(self, source: Tensor) -> Tensor:
        made = self.function.of(source) if self.function else source.as_strided(self.size, self.stride, self.offset)
        return made if self.kind in (None, Tensor) else made.as_subclass(self.kind)  # torch's own: again a view


def _reads(tensor: Tensor) -> tuple[torch.dtype, bool, bool]:
    """As what ``tensor`` [...] reads its memory."""
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _made_anew(attribute: Any) -> Any:
    """A container of values is the user's to change; each call makes another one."""
    is_own = isinstance(attribute, list | dict | set) and value_of(attribute) is not None
    return copy.deepcopy(attribute) if is_own else attribute
