"""What a refusal says besides, where an option of the library that is running makes it work."""

from __future__ import annotations

import os
import sys
import traceback

from te_graph.common.dispatch import TORCH
from te_graph.graphs.tracing import optimizer_advice

_DISTRIBUTIONS = TORCH + "distributions" + os.sep


def advice() -> str:
    """What to say about what is running on this thread; else empty."""
    return optimizer_advice.advice() or _about_distributions()


def _about_distributions() -> str:
    """torch.distributions checks parameters and values that it is given, unless validate_args is off."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    if not any(frame.f_code.co_filename.startswith(_DISTRIBUTIONS) for frame in frames):
        return ""
    return "; torch.distributions checks what it is given on the host: pass validate_args=False to each distribution"
