"""The host steps of a backward that is captured: autograd may run it on a thread of its own, which knows of none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from te_graph import _C
from te_graph.common.capture_state import is_captured
from te_graph.common.dispatch import is_in_backward

_under_way: list[_C.HostSteps] = []


@contextlib.contextmanager
def capturing_backward(steps: _C.HostSteps) -> Iterator[None]:
    """Around the capture of a backward, whose calls are noted in ``steps``."""
    _under_way.append(steps)
    try:
        yield
    finally:
        _under_way.remove(steps)


def noting_in_backward(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Around a call on ``device`` that is noted where a captured backward makes it."""
    is_unknown = _under_way and is_in_backward() and not _C.HostSteps.is_noting() and is_captured(device)
    return _under_way[-1] if is_unknown else contextlib.nullcontext()
