"""graphed(): what a function makes anew refers to objects that were there before, which others may have replaced."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sequences import counts

from te_graph import CaptureError, graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def _state() -> Any:
    return SimpleNamespace(
        losses=[],
        table={"a": [1.0], "rate": 0.5},
        config=SimpleNamespace(options={"betas": [0.9], "rate": 0.5}),
        last=None,
    )


# What is left, which of it is an object that was there before, and how that is found and replaced.
LEAVES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "in a dictionary": (lambda s: setattr(s, "last", {"it": s.losses, "rate": 0.5}), lambda s: s.last["it"]),
    "in a list": (lambda s: setattr(s, "last", [s.losses, s.table]), lambda s: s.last[0]),
    "in a tuple": (lambda s: setattr(s, "last", (s.losses, 1)), lambda s: s.last[0]),
    "two below": (lambda s: setattr(s, "last", {"a": [[s.losses]]}), lambda s: s.last["a"][0][0]),
    "in a container that stays": (lambda s: s.table.__setitem__("a", s.losses), lambda s: s.table["a"]),
}


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("name", LEAVES)
def test_an_object_that_was_replaced_by_an_equal_one(name: str, is_kept: bool, device: str) -> None:
    leave, read = LEAVES[name]
    state, total, kept = _state(), torch.zeros(3, device=device), []

    def step() -> None:
        total.add_(1)
        leave(state)

    replayed = graphed(step)
    for number in range(9):
        if number in (4, 7):
            state.losses = []
        replayed()
        assert read(state) is state.losses
        if is_kept:
            kept.append(state.last)
    if is_kept and state.last is not None:
        assert len(set(map(id, kept))) == 9
    assert counts(replayed)[1] >= 5
    assert_bitwise_equal(total, torch.full_like(total, 9))


def test_a_shallow_copy_of_what_was_replaced(device: str) -> None:
    state, total = _state(), torch.zeros(3, device=device)

    def step() -> None:
        total.add_(1)
        state.last = dict(state.config.options)

    replayed = graphed(step)
    for number in range(8):
        if number == 4:
            state.config.options = {"betas": [0.9], "rate": 0.5}
        replayed()
        assert state.last["betas"] is state.config.options["betas"]
        assert state.last is not state.config.options
    assert counts(replayed)[1] >= 5


def test_a_copy_that_the_function_makes_of_its_own_goes_on_with_the_same_members(device: str) -> None:
    state, total = _state(), torch.zeros(3, device=device)
    member = state.config.options["betas"]

    def step() -> None:
        total.add_(1)
        state.config.options = dict(state.config.options)

    replayed, kept = graphed(step), []
    for _ in range(6):
        replayed()
        kept.append(state.config.options)
        assert state.config.options["betas"] is member
    assert len(set(map(id, kept))) == 6
    assert counts(replayed)[1] == 5


def test_members_that_change_places_in_what_is_made_are_refused(device: str) -> None:
    total = torch.zeros(3, device=device)
    state = SimpleNamespace(window=[[1.0], [1.0]])

    def step() -> None:
        total.add_(1)
        state.window = [state.window[1], [1.0]]

    replayed = graphed(step)
    replayed()
    with pytest.raises(CaptureError, match=r"window.* gets an object that was elsewhere"):
        replayed()
