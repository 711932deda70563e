"""Captures under autocast, whose cache of cast weights is of the whole process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def own_casts() -> Iterator[None]:
    """Around one run of what is captured: with a cache of its own where autocast caches.

    A weight that is used twice inside is cast once, as in eager execution, where gradients of the two uses are then
    summed in the lower precision. Casts that were there before are lost, which costs their next use a cast: they
    belong to autograd graphs that a capture must not lead to, and those of the capture to memory of its graph.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
