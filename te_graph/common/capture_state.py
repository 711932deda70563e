"""Whether a capture of te_graph is under way: graphed callables then run eagerly, to be captured themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from te_graph import _C
from te_graph.common.as_written import AsWrittenMode
from te_graph.common.dispatch import dispatch_modes
from te_graph.common.replay_checks import is_collecting


class RecordingMode(AsWrittenMode):
    """A dispatch mode that records for a replay."""


def is_recording() -> bool:
    """True while this thread is inside ``Recorder.capture()``."""
    return any(isinstance(mode, RecordingMode) for mode in dispatch_modes())


def is_capturing() -> bool:
    """True, on this thread, inside captures of ``make_graphed_callables`` and ``graphed`` (warm-ups too) and inside
    ``Recorder.capture()``."""
    return _C.in_session() or is_recording()


def is_capturing_callables() -> bool:
    """True, on this thread, inside captures of ``make_graphed_callables``, which see where gradients belong."""
    return _C.in_session() and not is_collecting()


def is_captured(device: torch.device | None = None) -> bool:
    """True where what is called now is captured, by te_graph or, on the current stream of ``device`` (None: of the
    current GPU), by other code."""
    return is_capturing() or _C.is_stream_capturing(device)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Around everything that one ``make_graphed_callables``, or ``graphed()``, runs to capture."""
    _C.enter_session()
    try:
        yield
    finally:
        _C.leave_session()
