"""One object in two places, of which a call replaces one: what another call puts together again before each.

No guard of a capture sees that two containers became one, and none could: a replay may leave them apart. So no capture
is made of such a call: it runs as it is until they are found apart.
"""

from __future__ import annotations

from te_graph import _C
from te_graph.graphs.tracing.refusals import CaptureError


class PartedError(CaptureError):
    """A call that was to be captured has parted what was one object.

    Args:
        change: what it has changed, in words.
        before: passes where all is as before that call.
    """

    def __init__(self, change: str, before: _C.FunctionGuard) -> None:
        super().__init__(change)
        self.change = change
        self.before = before
