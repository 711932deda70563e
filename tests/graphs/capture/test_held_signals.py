"""Handlers of signals run when a capture is over, and leave nothing in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from mismatches import counts
from torch import Tensor, nn
from twins import eager_copy

from te_graph import Recorder, capture_to_graph, graph_layers, graphed, make_graphed_callables, replay_graph
from te_graph.common import held_signals
from te_graph.common.capture_state import is_capturing
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

_SIGNALS = (signal.SIGUSR2, signal.SIGUSR1)


@pytest.fixture
def handle() -> Iterator[Callable[[Callable[..., Any]], None]]:
    """Sets a handler of two signals."""
    before = [signal.getsignal(number) for number in _SIGNALS]
    yield lambda handler: [signal.signal(number, handler) for number in _SIGNALS]
    for number, handler in zip(_SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Python's handler, also where the tests run in the background of a shell, which has interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Signalled(nn.Linear):
    """Gets signals in the middle of its forward."""

    numbers: tuple[int, ...] = _SIGNALS

    def forward(self, x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        x = x * 2
        for number in self.numbers:
            signal.raise_signal(number)
        return super().forward(x)


@pytest.mark.parametrize("is_late", [False, True], ids=["samples", "first call"])
def test_a_callable(device: str, handle: Callable, is_late: bool) -> None:
    model, x = Signalled(4, 4).to(device), torch.ones(3, 4, device=device)
    twin, hits, arrived = eager_copy(model), torch.zeros((), device=device), []

    def note(number: int, frame: Any) -> None:
        hits.add_(1)
        arrived.append((number, is_capturing()))

    handle(note)
    make_graphed_callables(model, *([] if is_late else [(x,)]))
    if is_late:
        model(x)
    assert arrived == [(number, False) for number in _SIGNALS]
    assert [signal.getsignal(number) for number in _SIGNALS] == [note, note]
    for _ in range(3):
        result = model(x).detach()
    assert hits.item() == 2
    twin.numbers = ()
    assert_bitwise_equal(result, twin(x).detach())
    assert counts(model) == (1, 0, 0)


def test_layers(device: str, handle: Callable) -> None:
    model, arrived = nn.Sequential(Signalled(4, 4), Signalled(4, 4)).to(device), []
    handle(lambda number, frame: arrived.append((number, is_capturing())))
    layers = graph_layers(model, torch.ones(3, 4, device=device))
    assert layers.layers == ("0", "1")
    assert arrived == [(number, False) for number in _SIGNALS]


def test_a_graph_by_hand(handle: Callable) -> None:
    graph, x, hits = Recorder(), torch.ones(4), torch.zeros(())
    handle(lambda number, frame: hits.add_(1))
    with capture_to_graph(graph):
        signal.raise_signal(signal.SIGUSR1)
        x.mul_(2)
    for _ in range(3):
        replay_graph(graph)
    assert hits.item() == 1
    assert_bitwise_equal(x, torch.full_like(x, 8.0))


def test_a_new_shape(device: str, handle: Callable) -> None:
    model, hits = Signalled(4, 4).to(device), torch.zeros((), device=device)
    model.numbers = ()
    make_graphed_callables(model, (torch.ones(3, 4, device=device),), on_mismatch="capture")
    handle(lambda number, frame: hits.add_(1))
    del model.numbers
    for _ in range(3):
        model(torch.ones(5, 4, device=device))
    assert hits.item() == 2
    assert counts(model) == (2, 1, 0)


def test_a_function_that_reads_what_the_handler_changes(device: str, handle: Callable) -> None:
    x, state, due = torch.ones(4, device=device), {"signals": 0}, SimpleQueue()  # where no guard looks
    handle(lambda number, frame: state.update(signals=state["signals"] + 1))

    @graphed
    def step(t: Tensor) -> Tensor:  # [4] -> [4]
        if not due.empty():
            signal.raise_signal(due.get())
        return t * (1 + state["signals"])

    results = [step(x).clone()]
    due.put(signal.SIGUSR1)  # in the call that captures
    results += [step(x).clone() for _ in range(4)]
    assert_bitwise_equal(results, [x, x, x * 2, x * 2, x * 2])
    assert step.info()["forward_replays"] == 3


def test_an_error_of_a_handler_comes_after_the_capture(device: str, handle: Callable) -> None:
    model, x = Signalled(4, 4).to(device), torch.ones(3, 4, device=device)

    arrived: list[int] = []

    def fail(number: int, frame: Any) -> None:
        arrived.append(number)
        raise TimeoutError

    handle(fail)
    with pytest.raises(TimeoutError):
        make_graphed_callables(model, (x,))
    assert arrived == [*_SIGNALS]
    model(x)
    assert counts(model) == (1, 0, 0)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_comes_at_once(device: str, handle: Callable) -> None:
    model, x = Signalled(4, 4).to(device), torch.ones(3, 4, device=device)
    arrived: list[int] = []
    handle(note := lambda number, frame: arrived.append(number))
    model.numbers = (signal.SIGUSR1, signal.SIGINT, signal.SIGUSR2)
    with pytest.raises(KeyboardInterrupt):
        make_graphed_callables(model, (x,))
    assert arrived == [signal.SIGUSR1]
    assert [signal.getsignal(number) for number in _SIGNALS] == [note, note]
    assert type(model) is Signalled


def test_a_handler_ends_what_hangs(handle: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits no longer than a minute, which is shorter here."""
    monkeypatch.setattr(held_signals, "_PATIENCE", 0.2)

    def fail(number: int, frame: Any) -> None:
        raise TimeoutError

    def hangs(t: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGUSR1)
        threading.Event().wait(30)
        return t * 2

    handle(fail)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        graphed(hangs)(torch.ones(4))
    assert time.monotonic() - start < 20
    assert signal.getsignal(signal.SIGUSR1) is fail


def test_a_handler_that_the_captured_code_sets_is_its_own(handle: Callable) -> None:
    arrived: list[str] = []
    handle(note := lambda number, frame: arrived.append("outer"))

    def sets(t: Tensor) -> Tensor:
        before = signal.signal(signal.SIGUSR1, lambda number, frame: arrived.append("inner"))
        signal.raise_signal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, before)
        return t * 2

    graphed(sets)(torch.ones(4))
    assert arrived == ["inner"] and signal.getsignal(signal.SIGUSR1) is note


def test_what_code_in_c_does_with_a_signal_stays() -> None:
    """``faulthandler`` stands in front of Python's handler, which does not know of it."""
    program = """
import faulthandler, signal, sys, torch
import te_graph as tg
signal.signal(signal.SIGUSR1, lambda number, frame: None)
faulthandler.register(signal.SIGUSR1, file=sys.stdout)
tg.make_graphed_callables(torch.nn.Linear(4, 4), (torch.ones(3, 4),))
signal.raise_signal(signal.SIGUSR1)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "most recent call first" in done.stdout
