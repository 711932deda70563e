"""A capture refuses code that sets the state of a generator, as a replay would not, though nobody draws from it."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from te_graph import CaptureError, graphed, make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")

held = SimpleNamespace(python=random.Random(0), numpy=np.random.RandomState(0), torch=torch.Generator())
STATES = {
    "random": random.getstate(),
    "numpy": np.random.get_state(),
    "held.python": held.python.getstate(),
    "held.numpy": held.numpy.get_state(),
    "held.torch": held.torch.get_state(),
}
SETS: dict[str, tuple[Callable[[], Any], str]] = {
    "random.seed": (lambda: random.seed(0), "Python's random module"),
    "random.setstate": (lambda: random.setstate(STATES["random"]), "Python's random module"),
    "np.random.seed": (lambda: np.random.seed(0), r"numpy\.random"),
    "np.random.set_state": (lambda: np.random.set_state(STATES["numpy"]), r"numpy\.random"),
    "Random.seed": (lambda: held.python.seed(0), r".*held\.python"),
    "Random.setstate": (lambda: held.python.setstate(STATES["held.python"]), r".*held\.python"),
    "RandomState.seed": (lambda: held.numpy.seed(0), r".*held\.numpy"),
    "RandomState.set_state": (lambda: held.numpy.set_state(STATES["held.numpy"]), r".*held\.numpy"),
    "Generator.manual_seed": (lambda: held.torch.manual_seed(0), r".*held\.torch"),
    "Generator.set_state": (lambda: held.torch.set_state(STATES["held.torch"]), r".*held\.torch"),
    "seed after a look": (lambda: (random.getstate(), random.seed(0)), "Python's random module"),
    "np.random.seed after a look": (lambda: (np.random.get_state(), np.random.seed(0)), r"numpy\.random"),
    "manual_seed after a look": (lambda: (held.torch.get_state(), held.torch.manual_seed(0)), r".*held\.torch"),
    "seed after it was put back": (
        lambda: (_kept(held.torch.get_state, lambda: None, held.torch.set_state), held.torch.manual_seed(0)),
        r".*held\.torch",
    ),
    "through a partial": (lambda: functools.partial(held.torch.manual_seed, 0)(), r".*held\.torch"),
    "through a partial of its class": (
        lambda: functools.partial(torch.Generator.manual_seed, held.torch, 0)(),
        r".*held\.torch",
    ),
    "through a map": (lambda: list(map(held.torch.manual_seed, [0])), r".*held\.torch"),
}


UNSEEN = frozenset(case for case in SETS if case.startswith(("np.", "RandomState", "through")))
CASES = [
    pytest.param(case, marks=pytest.mark.skipif(sys.version_info < (3, 12), reason="called from C: not seen before"))
    if case in UNSEEN
    else case
    for case in SETS
]


@pytest.mark.parametrize("case", CASES)
def test_a_state_that_a_function_sets_is_refused(case: str) -> None:
    set_state, name = SETS[case]
    total = torch.zeros(3)

    def begin() -> None:
        total.add_(1)
        set_state()

    begin = graphed(begin)
    begin()
    with pytest.raises(CaptureError, match=f"begin: sets the state of {name}, which a replay would not do"):
        for _ in range(2):
            begin()


@pytest.mark.parametrize("case", CASES)
def test_a_state_that_a_callable_sets_is_refused(case: str) -> None:
    set_state, name = SETS[case]

    def forward(x: Tensor) -> Tensor:  # [3] -> [3]
        set_state()
        return x * 2

    with pytest.raises(RuntimeError, match=f"changes the state of {name}"):
        make_graphed_callables(forward, (torch.ones(3, requires_grad=True),))


def _kept(get: Callable[[], Any], change: Callable[[], Any], put: Callable[[Any], Any]) -> None:
    state = get()
    change()
    put(state)


PUT_BACK: dict[str, Callable[[], None]] = {
    "Random": lambda: _kept(held.python.getstate, held.python.random, held.python.setstate),
    "RandomState": lambda: _kept(held.numpy.get_state, lambda: held.numpy.seed(1), held.numpy.set_state),
    "Generator": lambda: _kept(held.torch.get_state, lambda: held.torch.manual_seed(1), held.torch.set_state),
    "numpy": lambda: _kept(np.random.get_state, lambda: None, np.random.set_state),
}
OWN: dict[str, Callable[[], Any]] = {
    "Random": lambda: random.Random(0).seed(1),
    "RandomState": lambda: np.random.RandomState(0).seed(1),
    "Generator": lambda: torch.Generator().manual_seed(1),
}


@pytest.mark.parametrize("run", [*PUT_BACK.values(), *OWN.values()], ids=[*PUT_BACK, *(f"own {one}" for one in OWN)])
def test_a_state_that_is_put_back_or_goes_is_captured(run: Callable[[], Any]) -> None:
    def step(x: Tensor) -> Tensor:  # [3] -> [3]
        run()
        return x * 2

    replaying, x = graphed(step), torch.ones(3)
    for _ in range(3):
        assert torch.equal(replaying(x), x * 2)
    assert replaying.info()["forward_replays"] == 2
