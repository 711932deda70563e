"""graphed(): of several functions of one code each that can have run is compared, also where no place leads to it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sequences import counts
from torch import Tensor

from te_graph import graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Config:
    def __init__(self) -> None:
        self.scale = 2.0


def of_an_object() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    config = Config()

    def scaled(x: Tensor) -> Tensor:
        return x * config.scale

    return scaled, lambda value: setattr(config, "scale", value)


def of_a_number() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    scale = 2.0

    def scaled(x: Tensor) -> Tensor:
        return x * scale

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return scaled, change


def of_a_default() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    def scaled(x: Tensor, scale: float = 2.0) -> Tensor:
        return x * scale

    return scaled, lambda value: setattr(scaled, "__defaults__", (value,))


MAKERS = (of_an_object, of_a_number, of_a_default)


def out_of_reach(function: Any) -> Callable[[], Any]:
    """What gives ``function``, and refers to it in a way that is not followed."""
    kept = [function]
    give = functools.lru_cache(kept.pop)
    give()
    return give


@pytest.mark.parametrize("make", MAKERS)
def test_a_change_of_one_that_ran_out_of_reach_is_seen(make: Callable, device: str) -> None:
    (near, change_near), (far, change_far) = make(), make()
    give, x = out_of_reach(far), torch.ones(3, device=device)
    del far

    def function(x: Tensor) -> Tensor:
        return near(x) + give()(x)

    replaying = graphed(function)
    for change in (lambda _: None, change_far, change_near):
        change(5.0)
        for _ in range(3):
            assert_bitwise_equal(replaying(x).clone(), function(x))
    assert counts(replaying) == (3, 6, 2, 3)


def test_one_that_another_call_chooses_is_seen(device: str) -> None:
    """It did not run in the first call, and is of code that did."""
    (first, _), (second, change) = of_an_object(), of_an_object()
    give, x = out_of_reach({1: first, 2: second}), torch.ones(3, device=device)
    del first, second

    def function(x: Tensor, which: int) -> Tensor:
        return x + give()[which](x)

    replaying = graphed(function)
    for which in (1, 2):
        for _ in range(3):
            assert_bitwise_equal(replaying(x, which).clone(), function(x, which))
    change(5.0)
    assert_bitwise_equal(replaying(x, 2).clone(), function(x, 2))
    assert counts(replaying) == (2, 4, 2, 3)


def test_those_that_did_not_run_may_change(device: str) -> None:
    """A decorator makes one for each function that it decorates, and they count their calls."""

    def counted(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        calls = [0.0]

        def wrapper(x: Tensor, step: int = 0) -> Tensor:
            calls[0] += step
            return function(x)

        return wrapper

    doubled, others = counted(lambda x: x * 2), [counted(lambda x: x * 3) for _ in range(100)]
    give, x = out_of_reach(doubled), torch.ones(3, device=device)
    del doubled
    replaying = graphed(lambda x: give()(x) + 1)
    for _ in range(5):
        for other in others:
            other(x, 1)
        assert_bitwise_equal(replaying(x).clone(), x * 2 + 1)
    assert counts(replaying) == (1, 4, 0, 1)


def test_too_many_to_be_compared_run_eagerly_and_the_log_says_so(device: str, caplog: Any) -> None:
    made = [of_a_number() for _ in range(100)]
    give, x = out_of_reach([function for function, _ in made]), torch.ones(3, device=device)
    change = made[99][1]
    del made
    replaying = graphed(lambda x: give()[99](x))
    with caplog.at_level(logging.WARNING, logger="te_graph"):
        for scale in (2.0, 2.0, 3.0, 3.0, 4.0, 4.0):
            change(scale)
            assert_bitwise_equal(replaying(x).clone(), x * scale)
    assert counts(replaying) == (0, 0, 0, 6)
    assert "100 functions scaled are more than can be compared" in caplog.text
