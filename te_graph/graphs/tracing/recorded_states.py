"""States of the random generator that recordings note and restore."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from te_graph.common.dispatch import bypass_modes
from te_graph.graphs.tracing.random_states import Note, RandomStates
from te_graph.graphs.tracing.refusals import GeneratorWatch


class _State:
    """The state of the default generator where a replay noted it last."""

    def note(self) -> None:
        self._state = torch.default_generator.get_state()

    def restore(self) -> None:
        torch.default_generator.set_state(self._state)


class RecordedStates(RandomStates):
    """States that recordings of a forward and its backward note and restore: calls of their programs."""

    rewinds = ()  # it is the program that restores

    def in_recording(self, program: list[tuple[Any, Any]], generator: GeneratorWatch) -> RecordedStates:
        """The context, for a recording with ``program``, which draws from ``generator``."""
        self._program, self._generator, self._thread = program, generator, threading.get_ident()
        return self

    def concerns(self, device_type: str) -> bool:
        return device_type == "cpu" and threading.get_ident() == self._thread

    def _state(self, own: Callable[[], Tensor]) -> Tensor:
        return own()

    def _position(self) -> Tensor:
        return self._generator.state()

    def _is_same(self, position: Tensor | None, other: Tensor) -> bool:
        with bypass_modes():
            return position is not None and torch.equal(position, other)

    def _place(self) -> _State:
        place = _State()
        self._program.append((partial(place.note), None))
        return place

    def _new_stream(self, note: Note) -> object:
        return object()

    def _switch(self, own: Callable[[Tensor], None], state: Tensor, stream: object, note: Note) -> None:
        self._program.append((partial(note.place.restore), None))
        self._generator.expect(state)
        own(state)

    def _refuse(self, own: Callable[[Tensor], None], state: Tensor) -> None:
        own(state)  # the watch of the generator refuses it, where anything is drawn then
