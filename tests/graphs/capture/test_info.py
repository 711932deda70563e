"""What te_graph tells of its work: info(), in text and as a dictionary, and the logger "te_graph"."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import run

import te_graph
from te_graph import make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")

LINE = re.compile(
    r"(?P<name>.+?): (?:(?P<share>\d+)% of (?P<calls>\d+) calls? replayed|(?P<idle>not called yet)), "
    r"(?P<signatures>\d+) signatures?, (?P<graphs>\d+) graphs?, (?P<nodes>\d+) nodes?, (?P<mib>\d+\.\d) MiB, "
    r"captured in (?P<seconds>\d+\.\d\d) s(?:, captured again (?P<again>\d+) times?)?(?:; eager: (?P<reasons>.+))?"
)


@pytest.fixture
def lines() -> Callable[[], list[str]]:
    """What info() tells of the callables of the test; others may be held by exceptions of earlier tests."""
    gc.collect()
    others = te_graph.info().splitlines()

    def lines() -> list[str]:
        told = te_graph.info().splitlines()
        assert told[: len(others)] == others
        return told[len(others) :]

    return lines


def assert_line_tells(line: str, info: dict[str, Any]) -> None:
    """``line`` of te_graph.info() holds what ``info`` of the handle does."""
    facts = LINE.fullmatch(line)
    assert facts, line
    eager = sum(info["eager_calls"].values())
    calls = info["forward_replays"] + eager
    if calls:
        assert int(facts["calls"]) == calls
        assert abs(int(facts["share"]) - 100 * info["forward_replays"] / calls) <= 0.5
    assert (facts["idle"] is None) is (calls > 0)
    assert [facts["name"], *(int(facts[key]) for key in ("signatures", "graphs", "nodes"))] == [
        info[key] for key in ("name", "signatures", "graphs", "nodes")
    ]
    assert float(facts["mib"]) == pytest.approx(info["bytes"] / 2**20, abs=0.051)
    assert float(facts["seconds"]) == pytest.approx(info["capture_seconds"], abs=0.0051)
    assert int(facts["again"] or 0) == info["recaptures"]
    reasons = ", ".join(f"{count} x {reason}" for reason, count in info["eager_calls"].items())
    assert (facts["reasons"] or "") == reasons


def batch(device: str, rows: int = 4) -> Tensor:  # [rows, 6]
    return torch.randn(rows, 6, device=device, requires_grad=True)


def mlp(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).to(device)


def doubled(x: Tensor) -> Tensor:  # [n, 6] -> [n, 6]
    return x * 2


def test_one_line_for_each_callable_in_order_of_capture_says_what_its_dictionary_does(device, lines):
    late = nn.Linear(6, 6).to(device)
    first = make_graphed_callables(mlp(device), (batch(device),), on_mismatch="capture", max_in_flight=2)
    pair = make_graphed_callables((nn.Bilinear(6, 6, 6).to(device), doubled), ((batch(device),) * 2, (batch(device),)))
    make_graphed_callables(late, (batch(device),), on_mismatch="eager")
    graphed = [first, *pair, late]
    names = ["Sequential", "callable 0 (Bilinear)", "callable 1 (doubled)", "Linear"]
    assert [line.partition(":")[0] for line in lines()] == names
    assert all(": not called yet, 1 signature, " in line for line in lines())

    for rows in (4, 2, 4, 2):
        run(first, batch(device, rows))
        run(late, batch(device, rows))
    late(batch(device))
    with torch.no_grad():
        for _ in range(3):
            late(batch(device))
    run(pair[1], batch(device))
    for line, call in zip(lines(), graphed, strict=True):
        assert_line_tells(line, call.te_graph.info())
        assert repr(call.te_graph) == line
    told = lines()
    assert told[0].startswith("Sequential: 100% of 4 calls replayed, 2 signatures, 8 graphs, ")
    assert told[0].endswith(", captured again 1 time")
    assert told[1].startswith("callable 0 (Bilinear): not called yet, 1 signature, 2 graphs, ")
    assert told[2].startswith("callable 1 (doubled): 100% of 1 calls replayed, 1 signature, 2 graphs, ")
    assert told[3].startswith("Linear: 38% of 8 calls replayed, 1 signature, ")
    reasons = "2 x expected args[0] of shape [4, 6], got [2, 6], 3 x called under no_grad, captured with gradients"
    assert told[3].endswith(f"; eager: {reasons}")


def test_a_callable_without_gradients_has_one_graph(device, lines):
    with torch.no_grad():
        graphed = make_graphed_callables(doubled, (batch(device).detach(),))
        graphed(batch(device).detach())
    (line,) = lines()
    assert ", 1 signature, 1 graph, " in line
    assert_line_tells(line, graphed.te_graph.info())


def test_a_callable_that_was_reset_is_not_told_of(device, lines):
    models = [make_graphed_callables(mlp(device), (batch(device),)) for _ in range(3)]
    function = make_graphed_callables(doubled, (batch(device),))
    run(models[2], batch(device))
    handles = [models[1].te_graph, function.te_graph]
    for handle in (*handles, *handles):
        handle.reset()
    shares = [line.split(",")[0] for line in lines()]
    assert shares == ["Sequential: not called yet", "Sequential: 100% of 1 calls replayed"]


def test_a_callable_that_is_gone_is_not_told_of_even_before_the_garbage_collector_runs(device, lines):
    gc.disable()
    try:
        models = [make_graphed_callables(mlp(device), (batch(device),)) for _ in range(3)]
        function = make_graphed_callables(doubled, (batch(device),))
        run(models[2], batch(device))
        assert len(lines()) == 4
        del models[1], function
        shares = [line.split(",")[0] for line in lines()]
        assert shares == ["Sequential: not called yet", "Sequential: 100% of 1 calls replayed"]
        models.clear()
        assert lines() == []
    finally:
        gc.enable()


def test_what_is_captured_again_after_reset_is_told_of_last_and_anew(device, lines):
    first, second = nn.Linear(6, 6).to(device), mlp(device)
    for model in (first, second):
        make_graphed_callables(model, (batch(device),))
        run(model, batch(device))
    first.te_graph.reset()
    make_graphed_callables(first, (batch(device),))
    shares = [line.split(",")[0] for line in lines()]
    assert shares == ["Sequential: 100% of 1 calls replayed", "Linear: not called yet"]


def test_a_capture_that_failed_is_not_told_of(device, lines):
    def reads(x: Tensor) -> Tensor:  # [n, 6] -> [n, 6]
        return x * x.sum().item()

    model = nn.Linear(6, 6).to(device)
    with pytest.raises(RuntimeError):
        make_graphed_callables((model, reads), ((batch(device),), (batch(device),)))
    assert lines() == []


def test_with_te_graph_disable_every_call_is_eager_and_says_so(device, monkeypatch, caplog, lines):
    monkeypatch.setenv("TE_GRAPH_DISABLE", "1")
    with caplog.at_level(logging.INFO, logger="te_graph"):
        graphed = make_graphed_callables((mlp(device), doubled), ((batch(device),), (batch(device),)))
        for call in graphed:
            for rows in (4, 2):
                run(call, batch(device, rows))
    for line, call in zip(lines(), graphed, strict=True):
        info = call.te_graph.info()
        assert_line_tells(line, info)
        assert (info["backend"], info["signatures"], info["slots"], info["graphs"], info["bytes"]) == (None, 0, 0, 0, 0)
        assert info["eager_calls"] == {"TE_GRAPH_DISABLE=1": 2}
        assert ": 0% of 2 calls replayed, 0 signatures, 0 graphs, " in line
        assert line.endswith("; eager: 2 x TE_GRAPH_DISABLE=1")
    assert [r for r in caplog.records if r.name == "te_graph"] == []


def test_reasons_are_counted_by_themselves_up_to_32_and_the_others_together(device, caplog, lines):
    graphed = make_graphed_callables(doubled, (batch(device),), on_mismatch="eager")
    for _ in range(2):
        for rows in range(5, 45):
            run(graphed, batch(device, rows))
    run(graphed, batch(device))
    info = graphed.te_graph.info()
    assert len(info["eager_calls"]) == 33
    assert info["eager_calls"].pop("other reasons") == 16
    assert set(info["eager_calls"].values()) == {2}
    assert info["forward_replays"] == 1
    (line,) = lines()
    assert_line_tells(line, graphed.te_graph.info())
    assert line.endswith(", 16 x other reasons")
    told = [r.getMessage() for r in caplog.records if r.name == "te_graph" and r.levelno == logging.WARNING]
    assert len(told) == len(set(told)) == 32


def test_captures_are_logged_once_each_with_graphs_nodes_memory_and_seconds(device, caplog):
    with caplog.at_level(logging.INFO, logger="te_graph"):
        graphed = make_graphed_callables(
            (mlp(device), doubled), ((batch(device),), (batch(device),)), max_in_flight=2, on_mismatch="capture"
        )
        for call in graphed:
            for _ in range(3):
                run(call, batch(device))
    records = [record for record in caplog.records if record.name == "te_graph"]
    assert [record.levelno for record in records] == [logging.INFO] * 2
    for record, call in zip(records, graphed, strict=True):
        info = call.te_graph.info()
        mib, seconds = f"{info['bytes'] / 2**20:.1f}", f"{info['capture_seconds']:.2f}"
        what = f"{info['graphs']} graphs, {info['nodes']} nodes, {mib} MiB in {seconds} s"
        assert record.getMessage() == f"{info['name']}: captured {what}"
        assert info["graphs"] == 4


CHANGES: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "other arguments": (lambda model: None, r"Sequential: expected args\[0\] of shape \[4, 6\], got \[2, 6\]"),
    "parameter moved": (
        lambda model: setattr(model[0].weight, "data", model[0].weight.data.clone()),
        "Sequential: weight of 0 moved",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_captures_made_later_are_logged_with_their_reason(device, change, caplog):
    model = mlp(device)
    with caplog.at_level(logging.INFO, logger="te_graph"):
        make_graphed_callables(model, (batch(device),), on_mismatch="capture")
        CHANGES[change][0](model)
        for _ in range(2):
            run(model, batch(device, 2 if change == "other arguments" else 4))
    records = [record for record in caplog.records if record.name == "te_graph"]
    assert {record.levelno for record in records} == {logging.INFO}
    told = [record.getMessage() for record in records]
    captured = r"Sequential: captured 2 graphs, \d+ nodes, \d+\.\d MiB in \d+\.\d\d s"
    assert [bool(re.fullmatch(captured, line)) for line in told] == [True, True, False]
    assert re.match(f"Sequential: captured again: {CHANGES[change][1]}", told[2])


def test_captures_and_replays_print_nothing(device, capfd):
    graphed = make_graphed_callables(doubled, (batch(device),), on_mismatch="capture")
    for rows in (4, 2):
        run(graphed, batch(device, rows))
    out, err = capfd.readouterr()
    assert out + err == ""
