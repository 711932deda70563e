"""``torch.nn.utils.parametrize.cached()``: with it on, weights are computed once for all calls inside, graphed or not.

A graph computes its own in each replay, and can neither take one from there nor leave one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from te_graph import _C
from te_graph.graphs.guards.sources import Source

WHERE, NAME = "torch.nn.utils.parametrize", "_cache_enabled"
WHAT = "the cache of parametrizations (torch.nn.utils.parametrize.cached)"


def is_parametrized(obj: Any) -> bool:
    """True for modules of which a parametrization computes a weight."""
    return isinstance(obj, nn.Module) and parametrize.is_parametrized(obj)


def cache_source(root: Source) -> Source:
    """Where it says whether the cache is on; ``root`` is any source."""
    return root.child(vars(parametrize), WHERE, _C.StepKind.KNOWN).item(NAME, WHAT)


def check_cache(label: str, sources: Iterable[Source]) -> None:
    """Raise RuntimeError if the cache is on, and one of the ``sources`` of a callable is a module that would use it."""
    if getattr(parametrize, NAME) and (found := next((p for p in sources if is_parametrized(p.obj)), None)):
        raise RuntimeError(
            f"{label}: {WHAT} is on, and shares with other calls what the parametrizations of "
            f"{found.name or type(found.obj).__name__} compute: capture, and call, outside of it"
        )
