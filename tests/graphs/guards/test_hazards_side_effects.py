"""What a forward changes in Python, and random numbers drawn elsewhere than in torch, are refused by name."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from calls import replays
from mutations import assert_not_seen, batch
from torch import Tensor, nn

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


# ---- What a forward leaves behind ----


class Counting(nn.Module):
    """[3, 4] -> [3, 4]: counts its calls in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        self.calls += 1
        return x * 2


class Remembering(Counting):
    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        self.seen.append(len(self.seen))
        return x * 2


class Flipping(Counting):
    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        self.seen = types.SimpleNamespace(shape=x.shape)
        return x * 2


_count = 0


def counts_globally(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
    global _count
    _count += 1
    return x * 2


_seen: dict[str, int] = {"calls": 0}


def counts_in_a_dict(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
    _seen["calls"] += 1
    return x * 2


def counting_in_a_closure() -> Callable:
    count = 0

    def call(x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        nonlocal count
        count += 1
        return x * 2

    call.count = lambda: count
    return call


COUNTERS: dict[str, tuple[Callable[[], Callable], str, str]] = {
    "attribute": (Counting, r"changes calls \(from \d to \d\)", "calls"),
    "attribute below": (lambda: nn.Sequential(Counting()), r"changes calls of 0 \(from \d to \d\)", "0.calls"),
    "list": (Remembering, r"changes seen \(from \[.*\] to \[.*\]\)", "seen"),
    "object": (Flipping, "changes seen", "seen"),
    "closure": (counting_in_a_closure, r"changes closure variable count \(from \d to \d\)", "count"),
    "global dict": (lambda: counts_in_a_dict, r"changes global variable _seen \(from \{.*\} to \{.*\}\)", "_seen"),
    "global": (lambda: counts_globally, r"changes global variable _count \(from \d to \d\)", "_count"),
}


@pytest.mark.parametrize("counter", COUNTERS)
def test_what_a_forward_changes_is_refused_by_name_unless_it_is_ignored(device, counter):
    build, words, ignored = COUNTERS[counter]
    call = build()
    with pytest.raises(RuntimeError, match=f"{words}.*ignore_attributes="):
        make_graphed_callables(call, (batch(device),))
    if counter == "attribute":
        assert call.calls == 0
    if counter == "closure":
        assert call.count() == 0
    assert (_count, _seen) == (0, {"calls": 0})
    graphed = make_graphed_callables(call, (batch(device),), ignore_attributes=(ignored,))
    x = batch(device)
    assert torch.equal(graphed(x), x * 2)
    assert replays(graphed) == 1
    reset_counts()


def reset_counts() -> None:
    global _count
    _count = _seen["calls"] = 0


@pytest.mark.parametrize("wrong", ["calls", [1], 3])
def test_ignore_attributes_is_a_tuple_of_names(device, wrong):
    with pytest.raises(TypeError, match="expected ignore_attributes to be a tuple of names"):
        make_graphed_callables(Counting(), (batch(device),), ignore_attributes=wrong)


def test_what_only_the_first_call_sets_up_is_no_change(device):
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ready, self.scale = False, None

        def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
            if not self.ready:
                self.ready, self.scale = True, 2
            return x * self.scale

    graphed = make_graphed_callables(Lazy(), (batch(device),))
    x = batch(device)
    assert torch.equal(graphed(x), x * 2)


# ---- Random numbers from elsewhere ----


class Draws(nn.Module):
    """[3, 4] -> [3, 4]: times a random number."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x * self.draw()


_own, _own_numpy, _legacy = random.Random(0), np.random.default_rng(0), np.random.RandomState(0)
_bits, _of_torch = np.random.PCG64(0), torch.Generator()

DRAWS: dict[str, tuple[Callable[[], float], str]] = {
    "random": (random.random, "draws from Python's random module"),
    "random in a function": (lambda: random.uniform(0, 1), "draws from Python's random module"),
    "numpy.random": (lambda: float(np.random.rand()), "draws from numpy.random"),
    "random.Random": (lambda: _own.random(), "draws from global variable _own,"),
    "Generator of NumPy": (lambda: float(_own_numpy.random()), "draws from global variable _own_numpy"),
    "RandomState": (lambda: float(_legacy.rand()), "draws from global variable _legacy"),
    "PCG64": (lambda: _bits.random_raw() % 7, "draws from global variable _bits"),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_random_numbers_of_python_and_numpy_are_refused_by_name_and_put_back(device, draw):
    function, words = DRAWS[draw]
    states = random.getstate(), repr(np.random.get_state()), _own.getstate(), repr(_own_numpy.bit_generator.state)
    with pytest.raises(RuntimeError, match=f"Draws: it {words}.*torch.rand"):
        make_graphed_callables(Draws(function), (batch(device),))
    after = random.getstate(), repr(np.random.get_state()), _own.getstate(), repr(_own_numpy.bit_generator.state)
    assert after == states


def test_numbers_of_a_generator_of_torch_are_put_back():
    before = _of_torch.get_state()
    with pytest.raises(RuntimeError, match="it draws from a generator of its own"):
        make_graphed_callables(Draws(lambda: torch.rand((), generator=_of_torch)), (batch("cpu"),))
    assert_bitwise_equal(_of_torch.get_state(), before)


def test_random_numbers_that_others_draw_between_calls_do_not_matter(device):
    def build() -> tuple[Callable, Any]:
        return Draws(lambda: 2.0), None

    assert_not_seen(build, lambda _: (random.random(), np.random.rand()), device)
