"""Whether a capture of te_graph is under way: graphed callables then run eagerly, to be captured themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from te_graph import _C
from te_graph.recorder import is_recording


def is_capturing() -> bool:
    """True, on this thread, inside ``make_graphed_callables`` (warm-ups too) and inside ``Recorder.capture()``."""
    return _C.in_session() or is_recording()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Around everything that one ``make_graphed_callables`` runs of its callables."""
    _C.enter_session()
    try:
        yield
    finally:
        _C.leave_session()
