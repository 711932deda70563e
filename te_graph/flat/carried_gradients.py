"""Gradients that have been reduced, kept from being reduced once more with what is added to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from te_graph.common.gradient_state import gradient_state
from te_graph.common.own_objects import OwnObject
from te_graph.flat.flat_buffer import FlatBuffer
from te_graph.flat.layout import Bucket


class _Aside(NamedTuple):
    """What is aside of one buffer.

    Attributes:
        values: [n] like the buffer, -0.0 where nothing is.
        parts: [...] each, views of these, by the numbers of their parameters.
    """

    values: Tensor
    parts: dict[int, Tensor]


class _Left(NamedTuple):
    """How a backward has left a gradient.

    Attributes:
        address: where it lies; None: in the buffer.
        version: how often it had been written.
    """

    address: int | None
    version: int


class CarriedGradients(OwnObject):
    """Reduced gradients, kept out of the buffer while later backwards add to it. Meanwhile their places in the buffer
    hold -0.0, which changes no sum; the next reduction adds them to its results."""

    def __init__(self, buffers: Sequence[FlatBuffer]) -> None:
        self._buffers = buffers
        self._aside: dict[FlatBuffer, _Aside] = {}
        self._left: dict[FlatBuffer, dict[int, _Left]] = {}  # by their numbers; of what is aside, between backwards
        self._reduced_elsewhere = WeakTensorKeyDictionary()  # gradients [...] of the user's own

    def note_reduced(self) -> None:
        """All gradients have been; those aside are among them."""
        self._aside.clear()
        self._left.clear()
        self._reduced_elsewhere = WeakTensorKeyDictionary(
            {grad: None for buffer in self._buffers for _, grad in buffer.all_gradients.elsewhere()}
        )

    @torch.no_grad()
    def put_aside(self, numbers: Mapping[FlatBuffer, Sequence[int]]) -> None:
        """Called before more is added to what has been reduced.

        Args:
            numbers: of gradients that have been.
        """
        for buffer in self._buffers:
            reduced = self._reduced(buffer, numbers[buffer])
            if not reduced:
                continue
            values = torch.full_like(buffer.grads, -0.0)
            parts = {
                number: values.as_strided(grad.shape, buffer.memories[number].stride(), buffer.layout.offsets[number])
                for number, grad in reduced.items()
            }
            torch._foreach_copy_(list(parts.values()), list(reduced.values()))
            _fill_with_negative_zeros_(list(reduced.values()))
            self._aside[buffer] = _Aside(values, parts)

    def _reduced(self, buffer: FlatBuffer, numbers: Iterable[int]) -> dict[int, Tensor]:
        """By number, of the gradients [...] ``numbers`` those that are what was reduced."""
        if buffer.has_main_grads:  # what lies in .grad beside it has come since
            return {
                number: buffer.memories[number]
                for number in numbers
                if not gradient_state(buffer.parameters[number]).main_grad_reset.is_pending
            }
        elsewhere = dict(buffer.all_gradients.elsewhere())
        return {
            number: elsewhere.get(number, buffer.memories[number])
            for number in numbers
            if number not in elsewhere or elsewhere[number] in self._reduced_elsewhere
        }

    def note_begin(self) -> None:
        """Called when a backward begins: it writes from now on."""
        self._left.clear()

    def note_end(self) -> None:
        """Called when a backward has come through: from now on it is the user who writes gradients."""
        self._left = {
            buffer: {number: left for number in aside.parts if (left := _left(buffer, number)) is not None}
            for buffer, aside in self._aside.items()
        }

    @torch.no_grad()
    def forget_overwritten(self) -> list[Tensor]:
        """Called outside of backwards, before ``forget_dropped``: what the user has set to zero by himself since the
        last one came through, or replaced, is not added to either. What has been written is known by its version, and
        is set to zero if all of it is zero; that is waited for.

        Returns:
            The parameters [...] of what was set to zero.
        """
        written: list[tuple[FlatBuffer, int]] = []
        for buffer, by_number in self._left.items():
            for number, before in by_number.items():
                now = _left(buffer, number)
                if now is None or buffer not in self._aside:
                    continue
                if now.address != before.address:
                    self._forget(buffer, [number])
                elif now.version != before.version and number in self._aside[buffer].parts:
                    written.append((buffer, number))
        if any(_gradient(buffer, number).any() for buffer, number in written):
            return []
        zeros = [buffer.parameters[number] for buffer, number in written]
        self.forget(zeros)
        return zeros

    def forget_dropped(self) -> None:
        """Called before anything is written where a gradient was dropped, and before a reduction."""
        for buffer, aside in list(self._aside.items()):
            there = set(buffer.all_gradients.taken())
            self._forget(buffer, [number for number in aside.parts if number not in there])

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Called when gradients of ``parameters`` [...] are overwritten."""
        forgotten = {id(parameter) for parameter in parameters}
        for buffer in list(self._aside):
            self._forget(buffer, [n for n, parameter in enumerate(buffer.parameters) if id(parameter) in forgotten])

    @torch.no_grad()
    def _forget(self, buffer: FlatBuffer, numbers: Iterable[int]) -> None:
        parts = self._aside[buffer].parts
        forgotten = [parts.pop(number) for number in numbers if number in parts]
        if not parts:
            del self._aside[buffer]
        elif forgotten:
            _fill_with_negative_zeros_(forgotten)

    @torch.no_grad()
    def add_back_(self) -> None:
        """Add them to what has come since, which nobody reduces."""
        self.forget_dropped()
        for buffer, aside in self._aside.items():
            buffer.settle_()
            elsewhere = {} if buffer.has_main_grads else dict(buffer.all_gradients.elsewhere())
            grads = [elsewhere.get(number, buffer.memories[number]) for number in aside.parts]
            torch._foreach_add_(grads, list(aside.parts.values()))
            buffer.all_gradients.note_written()
        self._aside.clear()
        self._left.clear()

    def expect_none(self, message: str) -> None:
        """Raise RuntimeError with ``message`` if there are some."""
        self.forget_dropped()
        if self._aside:
            raise RuntimeError(message)

    def of(self, buffer: FlatBuffer, bucket: Bucket) -> Tensor | None:
        """Those of ``bucket`` of ``buffer``, [end - begin], -0.0 between; None: there are none."""
        return self._aside[buffer].values[bucket.begin : bucket.end] if buffer in self._aside else None


def _gradient(buffer: FlatBuffer, number: int) -> Tensor | None:  # [...]
    """What the user has of it."""
    return buffer.memories[number] if buffer.has_main_grads else buffer.parameters[number].grad


def _left(buffer: FlatBuffer, number: int) -> _Left | None:
    grad = _gradient(buffer, number)
    if grad is None:
        return None
    elsewhere = None if buffer.has_main_grads else buffer.gradients[number].elsewhere()
    return _Left(None if elsewhere is None else elsewhere.data_ptr(), grad._version)


def _fill_with_negative_zeros_(tensors: list[Tensor]) -> None:  # [...] each
    torch._foreach_zero_(tensors)
    torch._foreach_neg_(tensors)
