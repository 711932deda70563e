"""States of the default random generator that a captured forward notes, and from which its backward draws again.

A checkpoint notes the state in which its forward begins, computes that forward again from there in the backward, and
then puts the generator back. A replay has to do so with the state in which its own forward began. So torch's functions
that read and set states are patched while forward and backward of a callable are captured: what they return there bears
a note of where in the graph it was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from te_graph import _C
from te_graph.common.dispatch import bypass_modes
from te_graph.graphs.tracing.patches import Patch
from te_graph.graphs.tracing.refusals import SETS_GENERATOR, CaptureError
from te_graph.graphs.tracing.source_lines import user_site

_NOTE = "_te_graph_note"
_SPARES = 4  # streams of numbers for each state that the forward noted: a checkpoint inside another one takes several


@dataclass(frozen=True, eq=False)
class Note:
    """Where a state was read.

    Attributes:
        states: of which callable's slot.
        capture: 1 in the forward, 2 in the backward.
        stream: the numbers drawn there; None: the generator's own.
        position: how far they were.
        place: what ``RandomStates`` needs to come back.
    """

    states: RandomStates
    capture: int
    stream: Any
    position: Any
    place: Any


class RandomStates:
    """The states that the forward in one slot notes, for its backward: context of the captures of both."""

    def __init__(self) -> None:
        self._capture = 0
        self._stream: Any = None
        self._left: dict[Any, Any] = {}  # how far streams were that are not drawn from at present

    def __enter__(self) -> RandomStates:
        self._capture += 1
        self._stream, self._left = None, {}
        _functions.begin(self)
        return self

    def __exit__(self, *failure: object) -> None:
        _functions.end(self)

    def read(self, own: Callable[[], Tensor]) -> Tensor:
        """The present state, uint8 [size], with its note; ``own`` is torch's function."""
        state = self._state(own)
        setattr(state, _NOTE, Note(self, self._capture, self._stream, self._position(), self._place()))
        return state

    def set_(self, own: Callable[[Tensor], None], state: Tensor) -> None:
        """Draw on from ``state``, uint8 [size]: from where this capture was, or once more what the forward drew."""
        note = getattr(state, _NOTE, None)
        if note is None or note.states is not self:
            self._refuse(own, state)
            return
        is_present = note.stream is self._stream
        where = self._position() if is_present else self._left.get(note.stream)
        if note.capture == self._capture and self._is_same(where, note.position):
            stream = note.stream
        elif note.capture < self._capture or note.stream is not None:
            stream = self._new_stream(note)
        else:
            self._refuse(own, state)
            return
        self._left[self._stream] = self._position()
        self._switch(own, state, stream, note)
        self._stream = stream

    def concerns(self, device_type: str) -> bool:
        """Whether what this thread does with the generators of ``device_type`` is captured."""
        raise NotImplementedError

    def _state(self, own: Callable[[], Tensor]) -> Tensor:
        raise NotImplementedError

    def _position(self) -> Any:
        raise NotImplementedError

    def _place(self) -> Any:
        raise NotImplementedError

    def _is_same(self, position: Any, other: Any) -> bool:
        return position == other

    def _new_stream(self, note: Note) -> Any:
        raise NotImplementedError

    def _switch(self, own: Callable[[Tensor], None], state: Tensor, stream: Any, note: Note) -> None:
        raise NotImplementedError

    def _refuse(self, own: Callable[[Tensor], None], state: Tensor) -> None:
        raise NotImplementedError


class CudaStates(RandomStates):
    """Those of a GPU. A backward graph draws again by generators of its own, which each replay sets.

    Attributes:
        rewinds: these generators, with how many numbers after the beginning of the forward each begins.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._generator = torch.cuda.default_generators[device.index]
        self._own = self._generator.graphsafe_get_state()
        self._notes = 0
        self._spares: list[torch.Generator] = []
        self.rewinds: list[tuple[torch.Generator, int]] = []

    def prepare(self, graph: torch.cuda.CUDAGraph) -> None:
        """Called before each capture begins."""
        self._spares = [torch.Generator(self._device) for _ in range(_SPARES * self._notes)]
        for generator in self._spares:
            graph.register_generator_state(generator)

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        self._generator.graphsafe_set_state(self._own)

    def concerns(self, device_type: str) -> bool:
        return device_type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _state(self, own: Callable[[], Tensor]) -> Tensor:
        self._notes += self._capture == 1
        with bypass_modes():
            return torch.zeros(16, dtype=torch.uint8, device="cpu")  # who looks at it sees that it is no state

    def _position(self) -> int:
        return _C.offset_in_capture(self._device.index)

    def _place(self) -> int | None:
        if self._stream is None:
            return self._position() if self._capture == 1 else None
        return dict(self.rewinds)[self._stream] + self._position()

    def _new_stream(self, note: Note) -> torch.Generator:
        if not self._spares:
            raise _refusal()
        generator = self._spares.pop()
        self.rewinds.append((generator, note.place))
        return generator

    def _switch(self, own: Callable[[Tensor], None], state: Tensor, stream: torch.Generator | None, note: Note) -> None:
        self._generator.graphsafe_set_state(self._own if stream is None else stream)

    def _refuse(self, own: Callable[[Tensor], None], state: Tensor) -> None:
        raise _refusal()


def _refusal() -> CaptureError:
    return CaptureError(f"a random generator's state cannot be set in a capture: {SETS_GENERATOR}; at {user_site()}")


class _Functions(Patch):
    """torch's functions that read and set the states of default generators."""

    def __init__(self) -> None:
        super().__init__()
        owners = {"cpu": (torch, torch.random), "cuda": (torch.cuda, torch.cuda.random)}
        self._members = [
            (owner, name, kind)
            for kind in owners
            for owner in owners[kind]
            for name in ("get_rng_state", "set_rng_state")
        ]
        self._own: list[Callable] = []

    def _patch(self) -> None:
        self._own = [vars(owner)[name] for owner, name, _ in self._members]
        for (owner, name, kind), own in zip(self._members, self._own, strict=True):
            setattr(owner, name, (self._reading if name == "get_rng_state" else self._setting)(own, kind))

    def _restore(self) -> None:
        for (owner, name, _), own in zip(self._members, self._own, strict=True):
            setattr(owner, name, own)

    def _states(self, device_type: str) -> RandomStates | None:
        return next((states for states in self.users if states.concerns(device_type)), None)

    def _reading(self, own: Callable[..., Tensor], kind: str) -> Callable[..., Tensor]:
        def get_rng_state(*device: Any, **devices: Any) -> Tensor:
            states = self._states(kind)
            if states is None:
                return own(*device, **devices)
            return states.read(lambda: own(*device, **devices))

        return get_rng_state

    def _setting(self, own: Callable[..., None], kind: str) -> Callable[..., None]:
        def set_rng_state(new_state: Tensor, *device: Any, **devices: Any) -> None:
            states = self._states(kind)
            if states is None:
                own(new_state, *device, **devices)
            else:
                states.set_(lambda state: own(state, *device, **devices), new_state)

        return set_rng_state


_functions = _Functions()
