"""te_graph.info(): one line for each graphed callable and each function of graphed()."""

from __future__ import annotations

from te_graph.common.reporters import CaptureFacts, reporters


def info() -> str:
    """What was captured and how much of the training runs from graphs, as text.

    Returns:
        One line for each callable or function that is graphed now, functions since their first call: the share of its
        calls that were replayed, signatures, graphs, nodes, memory, seconds of capture, and the reason of each eager
        call.
        The same numbers as a dictionary are in ``.te_graph.info()`` of a callable, ``.info()`` of a function.
    """
    return "\n".join(CaptureFacts(**reporter.info()).line() for reporter in reporters())
