"""graphed() on several threads, and called from what it calls. The reference is the function itself."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from sequences import called, captures
from torch import Tensor, nn

from te_graph import graphed, make_graphed_callables
from te_graph.common.replay_checks import before_replay
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def on_threads(count: int, work: Callable[[int], None]) -> None:
    """Run ``work`` with each number on a thread of its own; raise what the first of them raised."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def test_threads_with_tensors_of_their_own() -> None:
    def scale(ts: list[Tensor], factor: float) -> None:
        for t in ts:
            t.mul_(factor).add_(1.0)

    scaled = graphed(scale)
    sets, wanted = ([[torch.ones(64) for _ in range(8)] for _ in range(3)] for _ in range(2))
    for given in sets:
        called(scaled, 3, given, 0.5)
    for given in wanted:
        called(scale, 3, given, 0.5)

    def work(number: int) -> None:
        for _ in range(300):
            scaled(sets[number], 0.5)
            scale(wanted[number], 0.5)
            assert_bitwise_equal(sets[number], wanted[number])

    on_threads(3, work)
    assert scaled.info()["forward_replays"] > 100


def test_threads_that_capture_at_once() -> None:
    """A capture draws from a generator of its own, in place of the default one; another one must not see that."""
    modules = [nn.Linear(4, 4) for _ in range(3)]

    def work(number: int) -> None:
        x = torch.full((4,), float(number))
        for _ in range(6):
            added = graphed(lambda t: t * 2 + number)
            for _ in range(3):
                assert_bitwise_equal(added(x), x * 2 + number)
        module = modules[number]
        expected = module(x)
        make_graphed_callables(module, (torch.ones(4, requires_grad=True),))
        assert_bitwise_equal(module(x.requires_grad_()), expected)

    on_threads(3, work)


def test_a_call_looks_into_nothing_of_a_capture_on_another_thread(caplog: pytest.LogCaptureFixture) -> None:
    """The capture has a hook on all modules for a time, and what the hook leads to is large, and changing."""
    twice = graphed(lambda t: t * 2)

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # [4] -> [4]
            on_threads(1, lambda _: assert_bitwise_equal(twice(torch.ones(4)), torch.full((4,), 2.0)))
            return super().forward(x)

    make_graphed_callables(Net(4, 4), (torch.ones(4, requires_grad=True),))
    assert not [record.message for record in caplog.records if "places" in record.message]


def test_a_capture_takes_no_notice_of_modules_that_another_thread_calls() -> None:
    hooked = nn.Linear(4, 4)
    hooked.register_forward_hook(lambda module, args, result: result * 2)

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:  # [4] -> [4]
            on_threads(1, lambda _: hooked(torch.ones(4)))
            return super().forward(x)

    make_graphed_callables(Net(4, 4), (torch.ones(4, requires_grad=True),))


def test_one_graphed_function_captured_from_several_threads() -> None:
    double = graphed(lambda t: t * 2)

    def work(number: int) -> None:
        x = torch.full((4,), float(number))
        for _ in range(50):
            assert_bitwise_equal(double(x).clone(), x * 2)

    on_threads(4, work)


def test_a_first_call_that_waits_for_another_thread() -> None:
    """While the function itself runs it may wait for whom it likes, in a graphed function as in a plain one."""
    both, x = threading.Barrier(2, timeout=30), torch.ones(2)

    def meet(t: Tensor) -> Tensor:
        both.wait()
        return t * 2

    met = graphed(meet)
    on_threads(2, lambda number: assert_bitwise_equal(met(x), x * 2))


def test_a_function_that_calls_itself() -> None:
    def power(x: Tensor, depth: int) -> Tensor:
        return x * 2 if depth == 0 else powered(x, depth - 1) * 2

    powered, x = graphed(power), torch.ones(2)
    for _ in range(4):
        assert_bitwise_equal(powered(x, 3), x * 16)
    assert captures(powered) == 1


def test_a_check_that_calls_the_function_runs_it_plainly() -> None:
    x, calls = torch.ones(2), threading.Event()

    def doubled(t: Tensor) -> Tensor:
        before_replay(lambda: calls.set() or assert_bitwise_equal(replayed(x), x * 2))
        return t * 2

    replayed = graphed(doubled)
    for _ in range(4):
        assert_bitwise_equal(replayed(x), x * 2)
    assert calls.is_set()
    assert replayed.info()["forward_replays"] == 3
