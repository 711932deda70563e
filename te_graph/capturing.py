"""Whether a capture of te_graph is under way: graphed callables then run eagerly, to be captured themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from te_graph.recorder import is_recording

_in_session: ContextVar[bool] = ContextVar("te_graph_in_session", default=False)


def is_capturing() -> bool:
    """True inside ``make_graphed_callables`` (warm-ups too) and inside ``Recorder.capture()``."""
    return _in_session.get() or is_recording()


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Around everything that one ``make_graphed_callables`` runs of its callables."""
    token = _in_session.set(True)
    try:
        yield
    finally:
        _in_session.reset(token)
