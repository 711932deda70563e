"""Containers among the arguments of a capture: code that changes them is refused, and they are as before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from te_graph.graphs.arguments.identities import Containers
from te_graph.graphs.arguments.nest import flatten
from te_graph.graphs.guards.effects.rollback import ContainerState
from te_graph.graphs.guards.sources import Source


@contextlib.contextmanager
def containers_kept(label: str, args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
    """Refuse, at the end, a callable that has put something else into a container among its arguments: some are the
    caller's own. Put back what an error leaves in them, this one or another.

    Raises:
        RuntimeError: a replay would not do that to the caller's.
    """
    containers: Containers = []
    before, shape = flatten((args, kwargs), containers=containers)
    state = ContainerState(Source(container, "") for container, _ in containers)
    try:
        yield
        after, shape_after = flatten((args, kwargs))
        if not shape.matches(shape_after) or any(old is not new for old, new in zip(before, after, strict=True)):
            raise RuntimeError(
                f"{label}: changes a container among its arguments, which a replay would not: change a copy, and "
                "return what is new"
            )
    except BaseException:
        state.restore()
        raise
