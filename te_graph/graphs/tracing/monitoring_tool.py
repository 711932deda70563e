"""A place among the tools that hear of Python's events, of which there are six in a process."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any


def listen(callbacks: Mapping[int, Callable[..., Any]]) -> Callable[[], None] | None:
    """Call ``callbacks`` at their events, on all threads; return what ends that. None: other tools have all places."""
    monitoring = sys.monitoring
    tool = _taken_place()
    if tool is None:
        return None

    def stop() -> None:
        monitoring.set_events(tool, 0)
        monitoring.restart_events()
        for event in callbacks:
            monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)

    for event, callback in callbacks.items():
        monitoring.register_callback(tool, event, callback)
    monitoring.set_events(tool, functools.reduce(operator.or_, callbacks))
    monitoring.restart_events()  # what others had enough of under this number
    return stop


def _taken_place() -> int | None:
    for tool in range(6):
        try:
            sys.monitoring.use_tool_id(tool, "te_graph")
        except ValueError:  # one that is asked for and found free may be another thread's by now
            continue
        return tool
    return None
