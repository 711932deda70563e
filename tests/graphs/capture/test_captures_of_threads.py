"""Threads that meet the same new call together: one of them captures it, and the others replay that."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mismatches import batch, counts
from torch import Tensor, nn

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

THREADS = 4


def all_at_once(call: Callable[[], Any]) -> list:
    """What ``call`` returns on several threads that begin together."""
    barrier, results = threading.Barrier(THREADS), []

    def run() -> None:
        barrier.wait()
        results.append(call())

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def gradient_of(model: nn.Module, x: Tensor) -> Tensor:  # [n, 6] -> [n, 6]
    leaf = x.detach().clone().requires_grad_()
    model(leaf).square().sum().backward()
    return leaf.grad


class Reading(nn.Linear):
    """No graph can hold what it does with more than four rows."""

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        return super().forward(x) * (2.0 if len(x) > 4 and x.detach().sum().item() > 1e9 else 1.0)


def test_a_new_shape_is_captured_once(device: str) -> None:
    model, x = nn.Linear(6, 6).to(device), batch(device, 5)
    expected = gradient_of(model, x)
    make_graphed_callables(model, (batch(device),), max_in_flight=2 * THREADS, on_mismatch="capture")
    results = all_at_once(lambda: gradient_of(model, x))
    assert counts(model) == (2, 1, 0)
    assert model.te_graph.info()["forward_replays"] == THREADS
    assert_bitwise_equal(results, [expected] * THREADS)


def test_a_new_shape_is_refused_once(device: str, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Reading(6, 6).to(device), batch(device, 5)
    make_graphed_callables(model, (batch(device),), max_in_flight=2 * THREADS, on_mismatch="capture")
    all_at_once(lambda: gradient_of(model, x))
    assert counts(model) == (1, 0, THREADS)
    assert sum("capturing again failed" in record.getMessage() for record in caplog.records) == 1


def test_the_first_call_is_captured_once(device: str) -> None:
    model, x = nn.Linear(6, 6).to(device), batch(device)
    expected = gradient_of(model, x)
    make_graphed_callables(model, max_in_flight=2 * THREADS)
    results = all_at_once(lambda: gradient_of(model, x))
    assert counts(model) == (1, 0, 0)
    assert model.te_graph.info()["forward_replays"] == THREADS
    assert_bitwise_equal(results, [expected] * THREADS)


def test_max_captures_counts_those_of_all_threads(device: str) -> None:
    model = nn.Linear(6, 6).to(device)
    make_graphed_callables(model, (batch(device),), max_in_flight=2 * THREADS, on_mismatch="capture", max_captures=2)
    rows = iter(range(5, 5 + THREADS))
    all_at_once(lambda: gradient_of(model, torch.ones(next(rows), 6, device=device)))
    assert counts(model) == (3, 2, THREADS - 2)


class OtherCall(logging.Handler):
    """Calls on another thread while te_graph says that it has captured."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call = call

    def emit(self, record: logging.LogRecord) -> None:
        if "captured again" in record.getMessage():
            thread = threading.Thread(target=self._call)
            thread.start()
            thread.join()


def test_results_are_those_of_the_own_call_while_another_thread_calls(device, caplog):
    """A count of rows, which each capture has as its own constant."""
    module = nn.Linear(6, 6).to(device)
    call = make_graphed_callables(
        lambda x: (module(x), len(x)), (batch(device, 2),), on_mismatch="capture", max_in_flight=2
    )
    others: list[Any] = []
    handler = OtherCall(lambda: others.append(call(batch(device, 2))[1]))
    log = logging.getLogger("te_graph")
    with caplog.at_level(logging.INFO, "te_graph"):
        log.addHandler(handler)
        try:
            rows = [(call(batch(device, count))[1], count) for count in (3, 4, 5)]
        finally:
            log.removeHandler(handler)
    assert rows == [(3, 3), (4, 4), (5, 5)] and others == [2, 2, 2]
