"""graphed(): what the check of each call costs and sees, registered checks, the log, and streams."""

from __future__ import annotations

import functools
import gc
import logging
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable

import pytest
import torch
from sequences import called, captures, counts, reference_norm, tensors
from torch import Tensor, nn

from te_graph import graphed
from te_graph.common.replay_checks import before_replay
from te_graph.graphs.guards.function_guard import FunctionGuard
from te_graph.graphs.guards.readers.function_reader import FunctionReader
from te_graph.graphs.guards.readers.source_walker import SourceWalker
from te_graph.graphs.tracing.calls import Call
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def guard_of(function: Callable, *args: object) -> tuple[FunctionGuard, Call]:
    call = (function, args, {})
    return FunctionGuard(SourceWalker().explore(functools.partial(FunctionReader, call, False)), used=None), call


def microseconds(check: Callable[[], str]) -> float:
    times = []
    for _ in range(200):
        started = time.perf_counter_ns()
        change = check()
        times.append((time.perf_counter_ns() - started) / 1000)
        assert change == ""
    return statistics.median(times)


def test_a_thousand_tensors_are_checked_in_some_tens_of_microseconds() -> None:
    """Bounds are five to ten times what a quiet machine takes: it is a loop over Python objects that they exclude."""
    given = [torch.ones(2) for _ in range(1000)]
    listed, call = guard_of(lambda ts: None, given)
    assert listed.guard.tensors == 1000
    assert microseconds(lambda: listed.guard.check((call[0], (list(given),), {}))) < 250

    parameters = [nn.Parameter(torch.ones(2)) for _ in range(200)]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer.step()
    stepped, call = guard_of(lambda: optimizer.step())
    assert stepped.guard.tensors == 1000
    assert microseconds(lambda: stepped.guard.check(call)) < 250


def test_dictionaries_are_looked_at_again_after_a_change() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer.step()
    function_guard, call = guard_of(lambda: optimizer.step())

    def change() -> str:
        return function_guard.guard.check(call)

    assert change() == change() == ""
    state = optimizer.state[parameters[1]]
    buffer = state["momentum_buffer"]
    state["momentum_buffer"] = buffer.clone()
    assert "momentum_buffer" in change() and "moved" in change()
    state["momentum_buffer"] = buffer
    assert change() == change() == ""
    optimizer.state[parameters[1]] = {}
    assert "keys of" in change()
    optimizer.state[parameters[1]] = dict(state)
    assert change() == change() == ""
    # Another parameter in the same place: its state is looked for anew, though no dictionary changed.
    group = optimizer.param_groups[0]["params"]
    group[1] = nn.Parameter(torch.ones(2))
    assert change() != ""
    group[1] = parameters[1]
    assert change() == change() == ""
    parameters[2].grad = None
    assert "grad of" in change() and "is no longer a tensor" in change()


def test_containers_that_die_between_calls_are_not_followed() -> None:
    """Each call brings a dictionary of its own, often where the last one lay."""
    a, b = torch.ones(2), torch.ones(2)
    function_guard, call = guard_of(lambda table: None, {"x": a, "y": [b]})
    for _ in range(100):
        assert function_guard.guard.check((call[0], ({"x": a, "y": [b]},), {})) == ""
        assert function_guard.guard.check((call[0], ({"x": a, "y": [a]},), {})) != ""
        assert function_guard.guard.check((call[0], ({"y": [b], "x": a},), {})) == "keys of argument 0 changed"
        gc.collect(0)


def test_an_object_at_the_address_of_a_dead_one_is_not_taken_for_it() -> None:
    class Owner:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    tensor = torch.ones(2)
    owner = Owner(tensor)
    function_guard, call = guard_of(lambda o: None, owner)
    del call
    function = function_guard  # any object: only the argument is asked for
    del owner
    for _ in range(50):
        again = Owner(tensor)
        assert function_guard.guard.check((function, (again,), {})) != ""
        del again


def test_registered_checks_run_before_each_replay(device: str) -> None:
    class Plan:
        def __init__(self) -> None:
            self.calls: list[int] = []
            self.is_valid = True

        def apply(self, x: Tensor) -> None:
            x.add_(1)
            before_replay(self.check)

        def check(self) -> None:
            told.put(1)
            if not invalid.locked():
                return
            raise RuntimeError("the plan's tensors moved")

    told, invalid, plan, x = queue.SimpleQueue(), threading.Lock(), Plan(), torch.zeros(2, device=device)

    def apply() -> None:
        plan.apply(x)

    replayed = graphed(apply)
    replayed()
    assert told.qsize() == 0
    called(replayed, 3)
    assert told.qsize() == 3
    with invalid, pytest.raises(RuntimeError, match="the plan's tensors moved"):
        replayed()
    assert_bitwise_equal(x, torch.full_like(x, 4))
    replayed()
    assert_bitwise_equal(x, torch.full_like(x, 5))
    assert counts(replayed) == (1, 4, 0, 1)
    before_replay(plan.check)
    assert told.qsize() == 5


def test_a_check_that_changes_what_was_compared_is_found_out(device: str) -> None:
    parameter, total = nn.Parameter(torch.ones(2, device=device)), torch.zeros(2, device=device)
    parameter.grad = torch.ones(2, device=device)
    drops: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def check() -> None:
        if drops.qsize():
            parameter.grad = None

    def accumulate() -> None:
        total.add_(parameter.grad)
        parameter.grad.mul_(1)
        before_replay(check)

    accumulated = graphed(accumulate)
    called(accumulated, 3)
    drops.put(True)
    with pytest.raises(RuntimeError, match=r"grad of .* is no longer a tensor by what was to be checked"):
        accumulated()
    assert_bitwise_equal(total, torch.full_like(total, 3))


def test_changes_are_logged_once_for_each_reason(device: str, caplog: pytest.LogCaptureFixture) -> None:
    scale = graphed(lambda t, by: t * by)
    x = torch.ones(2, device=device)
    with caplog.at_level(logging.INFO, logger="te_graph"):
        called(scale, 2, x, 1.0)
        for by in range(2, 10):
            scale(x, float(by))
        scale(x.clone(), 1.0)
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 3
    assert "argument 1 changed from 1.0 to 2.0" in warnings[0] and "argument 0 moved" in warnings[2]
    assert "has run eagerly 4 times in a row, the last time since argument 1 changed from 1.0 to 5.0" in warnings[1]
    assert any("captured" in record.message for record in caplog.records if record.levelno == logging.INFO)


def test_who_is_called_with_a_new_tensor_each_time_is_told_to_copy_it_into_one_that_stays(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    double, batches = graphed(lambda t: t * 2), [torch.randn(3, device=device) for _ in range(6)]
    with caplog.at_level(logging.WARNING, logger="te_graph"):
        for batch in batches:
            assert_bitwise_equal(double(batch), batch * 2)
    (message,) = [record.message for record in caplog.records]
    assert "argument 0 moved to other memory; tensors are read in place: copy what is new" in message
    static, before = torch.empty_like(batches[0]), double.info()["forward_replays"]
    for batch in batches:
        assert_bitwise_equal(double(static.copy_(batch)).clone(), batch * 2)
    assert double.info()["forward_replays"] == before + 5


def test_who_is_called_in_vain_says_so_and_stops_looking_so_often(
    device: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    explore = SourceWalker.explore
    monkeypatch.setattr(SourceWalker, "explore", lambda *args, **given: looked.append(1) or explore(*args, **given))
    scale, x = graphed(lambda t, by: t * by), torch.ones(2, device=device)
    with caplog.at_level(logging.WARNING, logger="te_graph"):
        for by in range(64):
            assert_bitwise_equal(scale(x, float(by)), x * by)
    assert counts(scale) == (0, 0, 0, 64)
    assert len(looked) == 2 * (16 + 3)
    assert [record.message for record in caplog.records] == [
        "<lambda>: has run eagerly 4 times in a row, the last time since argument 1 changed from 2.0 to 3.0; a number "
        "that changes at every call must be a tensor (of an optimizer with fused=True or capturable=True: "
        "lr=torch.tensor(...))"
    ]
    assert_bitwise_equal(called(scale, 40, x, 3.0), x * 3)
    assert captures(scale) == 1


def test_who_is_called_in_vain_and_takes_long_to_look_at_stops_sooner(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("te_graph.graphs.functions.graphed._LONG_WALK_SECONDS", 0.0)
    looked: list[int] = []
    explore = SourceWalker.explore
    monkeypatch.setattr(SourceWalker, "explore", lambda *args, **given: looked.append(1) or explore(*args, **given))
    scale, x = graphed(lambda t, by: t * by), torch.ones(2, device=device)
    for by in range(70):
        assert_bitwise_equal(scale(x, float(by)), x * by)
    assert len(looked) == 2 * (4 + 4)  # the first calls, the 8th, 16th, 32nd and 64th
    assert_bitwise_equal(called(scale, 60, x, 3.0), x * 3)
    assert captures(scale) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on_mismatch": "guess"}, "expected on_mismatch in"),
        ({"pool": 3}, "expected pool to be"),
        ({"stream": 3}, "expected stream to be a torch.cuda.Stream, got int"),
        ({"fn": 3}, "expected fn to be a function, got int"),
        ({"fn": int}, "expected fn to be a function, got type"),
    ],
)
def test_wrong_arguments_are_named(options: dict, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"graphed: {words}"):
        graphed(**{"fn": print, **options})


@pytest.mark.gpu
def test_replays_on_other_streams_are_ordered() -> None:
    x = torch.zeros(1 << 22, device="cuda")
    bump = graphed(lambda t: [t.add_(1) for _ in range(20)] and None)
    called(bump, 2, x)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for number in range(30):
        with torch.cuda.stream(streams[number % 3]):
            bump(x)
    torch.cuda.synchronize()
    assert_bitwise_equal(x, torch.full_like(x, 32 * 20))


@pytest.mark.gpu
def test_a_capture_on_a_stream_of_the_users_in_a_pool_of_the_users() -> None:
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    grads = tensors("cuda")
    norm = graphed(lambda ts: torch.stack([t.square().sum() for t in ts]).sum().sqrt(), pool=pool, stream=stream)
    for _ in range(4):
        assert norm(grads).item() == pytest.approx(reference_norm(grads), rel=1e-5)
    assert norm.pool() == pool


@pytest.mark.gpu
def test_replays_do_not_synchronise() -> None:
    x = torch.zeros(100, device="cuda")
    double = graphed(lambda t: t * 2)
    called(double, 3, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        called(double, 10, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_capture_survives_another_thread_that_pins_memory() -> None:
    done = threading.Event()

    def pin() -> None:
        while not done.is_set():
            torch.ones(1 << 16).pin_memory()

    thread = threading.Thread(target=pin)
    thread.start()
    try:
        for _ in range(10):
            x = torch.ones(1000, device="cuda")
            double = graphed(lambda t: t * 2)
            assert_bitwise_equal(called(double, 3, x), x * 2)
    finally:
        done.set()
        thread.join()


@pytest.mark.gpu
def test_release_gives_the_memory_back() -> None:
    weight = torch.randn(512, 512, device="cuda")
    product = graphed(lambda w: w @ w @ w)
    with torch.no_grad():
        called(product, 2, weight)
        product.reset()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for _ in range(5):
            called(product, 3, weight)
            product.reset()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before, os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
