"""Captures that were refused: one costs as much as any, so for calls that are alike it is tried once."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from te_graph.graphs.arguments.signature import Signature

_MAX_REFUSED = 8  # captures in a row; as many compilations torch.compile tries by default


class RefusedCaptures:
    """The captures of one callable that were refused since the last one that succeeded."""

    def __init__(self) -> None:
        self._refused: list[_Refused] = []

    def reason_for(self, message: str, tensors: list[Tensor], args: tuple, kwargs: dict[str, Any]) -> str | None:
        """Why a call with ``tensors`` [...], not replayed for the reason in ``message``, is not captured, if so."""
        return next((one.reason for one in self._refused if one.is_of(message, tensors, args, kwargs)), None)

    def reason_against_all(self) -> str | None:
        """Why no call is captured any more, if so."""
        if len(self._refused) < _MAX_REFUSED:
            return None
        return f"{_MAX_REFUSED} captures in a row were refused, so that no call is captured any more"

    def add(self, message: str, signature: Signature, tensors: list[Tensor], reason: str) -> str:
        """Note that calls like one with ``tensors`` [...], not replayed for the reason in ``message``, are not captured
        for this ``reason``; returns it."""
        self._refused.append(_Refused(message, signature, _facts_of(tensors), reason))
        return reason

    def clear(self) -> None:
        """A capture has succeeded."""
        self._refused.clear()


@dataclass(frozen=True)
class _Refused:
    """A call whose capture was refused.

    Attributes:
        message: why it was not replayed.
        signature: of its arguments.
        facts: of the tensors among them.
        reason: why it runs eagerly.
    """

    message: str
    signature: Signature
    facts: list[tuple]
    reason: str

    def is_of(self, message: str, tensors: list[Tensor], args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a call with ``tensors`` [...], not replayed for the reason in ``message``, is alike."""
        if (message, _facts_of(tensors)) != (self.message, self.facts):
            return False
        with contextlib.suppress(ValueError):
            self.signature.flatten("", args, kwargs)
            return True
        return False


def _facts_of(tensors: list[Tensor]) -> list[tuple]:
    return [(tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad) for tensor in tensors]
