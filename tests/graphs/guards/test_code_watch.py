"""A watch of code notes each piece of it once, and leaves nothing switched off for later watches and other tools."""

from __future__ import annotations

import sys
import types

import pytest

from te_graph.graphs.capture.ignored_arguments import _ProbeWatch
from te_graph.graphs.graphed_class import plain_class
from te_graph.graphs.tracing.code_watch import CodeWatch
from te_graph.graphs.tracing.source_lines import run_region


def asked() -> type:
    return plain_class(int)


def watched(times: int) -> CodeWatch:
    with CodeWatch() as watch:
        for _ in range(times):
            run_region(asked, (), {})
    return watch


@pytest.mark.parametrize("times", [1, 3])
def test_each_watch_notes_what_runs_in_it(times: int) -> None:
    for _ in range(3):
        watch = watched(times)
        assert {id(asked.__code__), id(plain_class.__code__)} <= watch.codes.keys()


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="Python has no events for tools before 3.12")
def test_other_tools_get_all_events_afterwards() -> None:
    monitoring, started, called = sys.monitoring, set[types.CodeType](), set[types.CodeType]()
    tool = next(number for number in range(6) if monitoring.get_tool(number) is None)  # which the watch takes, too
    watched(2)
    monitoring.use_tool_id(tool, "a tool of this test")
    try:
        monitoring.register_callback(tool, monitoring.events.PY_START, lambda code, _: started.add(code))
        monitoring.register_callback(tool, monitoring.events.CALL, lambda code, *_: called.add(code))
        monitoring.set_events(tool, monitoring.events.PY_START | monitoring.events.CALL)
        asked()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    assert {asked.__code__, plain_class.__code__} <= started
    assert {asked.__code__, plain_class.__code__} <= called


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="Python has no events for tools before 3.12")
def test_a_place_that_another_thread_takes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is free when one asks for it, and taken by then."""
    monitoring = sys.monitoring
    free = [tool for tool in range(6) if monitoring.get_tool(tool) is None]
    monitoring.use_tool_id(free[0], "a tool of another thread")
    monkeypatch.setattr(monitoring, "get_tool", lambda tool: None)
    try:
        assert id(asked.__code__) in watched(1).codes
        with _ProbeWatch():
            asked()
    finally:
        monitoring.free_tool_id(free[0])
    for tool in free:  # all are free again
        monitoring.use_tool_id(tool, "a tool of this test")
        monitoring.free_tool_id(tool)
