"""Random numbers that come from the system are refused by name: of these no state of a generator tells.

Generators that are made without a seed take theirs from there; those with one draw the same numbers in each call.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import tempfile
import uuid
from collections.abc import Callable

import numpy as np
import pytest
import torch
from calls import replays
from mutations import batch
from torch import Tensor

from te_graph import graphed, make_graphed_callables

pytestmark = pytest.mark.usefixtures("repeatable")

Draw = Callable[[], float]


class Drawing(random.Random):
    """A generator of the user's own."""


class Seeds(torch.autograd.Function):
    """Draws in the backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # [3, 4] -> [3, 4]
        return grad * random.SystemRandom().random()


_system, _seeds, _spawning = random.SystemRandom(), np.random.SeedSequence(1), np.random.default_rng(1)

SYSTEM, WITHOUT_SEED = r"the system \(os.urandom", "random.Random without a seed"
DRAWS: dict[str, tuple[Draw, str]] = {
    "Random": (lambda: random.Random().random(), WITHOUT_SEED),
    "Random of the user's": (lambda: Drawing().random(), WITHOUT_SEED),
    "Random with None": (lambda: random.Random(None).random(), WITHOUT_SEED),
    "seed": (lambda: _seeded_anew(random.Random(1)), WITHOUT_SEED),
    "default_rng": (lambda: float(np.random.default_rng().random()), SYSTEM),
    "RandomState": (lambda: float(np.random.RandomState().rand()), SYSTEM),
    "RandomState of a generator": (lambda: float(np.random.RandomState(np.random.MT19937()).rand()), SYSTEM),
    "Generator": (lambda: float(np.random.Generator(np.random.PCG64()).random()), SYSTEM),
    "SeedSequence": (lambda: float(np.random.SeedSequence().generate_state(1)[0] % 7), SYSTEM),
    "SystemRandom": (lambda: random.SystemRandom().random(), SYSTEM),
    "SystemRandom in a variable": (lambda: _system.uniform(0, 1), SYSTEM),
    "secrets": (lambda: float(secrets.randbelow(7)), SYSTEM),
    "os.urandom": (lambda: float(os.urandom(1)[0]), SYSTEM),
    "uuid4": (lambda: float(uuid.uuid4().int % 7), SYSTEM),
    "seed of torch": (lambda: float(torch.Generator().seed() % 7), "torch.Generator.seed"),
    "spawned seeds": (lambda: _of_seeds(_seeds.spawn(1)[0]), "global variable _seeds"),
}
if hasattr(_spawning, "spawn"):  # NumPy 1.25 and newer
    DRAWS["spawned generator"] = lambda: float(_spawning.spawn(1)[0].random()), "global variable _spawning"
FIXED: dict[str, Draw] = {
    "Random": lambda: random.Random(0).random(),
    "default_rng": lambda: float(np.random.default_rng(0).random()),
    "RandomState": lambda: float(np.random.RandomState(0).rand()),
    "RandomState by keyword": lambda: float(np.random.RandomState(seed=0).rand()),
    "RandomState by **": lambda: float(np.random.RandomState(**{"seed": 0}).rand()),
    "Generator": lambda: float(np.random.Generator(np.random.PCG64(0)).random()),
    "spawned seeds": lambda: _of_seeds(np.random.SeedSequence(0).spawn(1)[0]),
    "name of a file": lambda: 2.0 * os.path.isdir(tempfile.gettempdir()),
}


def _seeded_anew(generator: random.Random) -> float:
    generator.seed()
    return generator.random()


def _of_seeds(seeds: np.random.SeedSequence) -> float:
    return float(np.random.default_rng(seeds).random())


@pytest.fixture(params=[True, False], ids=["monitoring", "profile"])
def _events(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs is known by events of Python 3.12, or by a profile function, as before."""
    if not request.param:
        monkeypatch.delattr(sys, "monitoring", raising=False)


@pytest.mark.usefixtures("_events")
@pytest.mark.parametrize("case", DRAWS)
def test_a_draw_is_refused_by_name(case: str, device: str) -> None:
    draw, name = DRAWS[case]
    with pytest.raises(RuntimeError, match=f"it draws from {name}.*torch.rand"):
        make_graphed_callables(lambda x: x * draw(), (batch(device),))


@pytest.mark.parametrize("case", DRAWS)
def test_a_graphed_function_says_so(case: str, device: str) -> None:
    draw, name = DRAWS[case]
    function, x = graphed(lambda x: x * draw()), torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match=f"draws random numbers from {name}"):
        for _ in range(4):
            function(x)


def test_a_draw_in_a_backward_is_refused_by_name(device: str) -> None:
    with pytest.raises(RuntimeError, match=rf"it draws from {SYSTEM}.*in backward"):
        make_graphed_callables(lambda x: Seeds.apply(x), (batch(device),))


@pytest.mark.usefixtures("_events")
@pytest.mark.parametrize("draw", FIXED.values(), ids=FIXED)
def test_numbers_from_a_fixed_seed_are_captured(draw: Draw, device: str) -> None:
    call = make_graphed_callables(lambda x: x * draw(), (batch(device),))
    function, x = graphed(lambda x: x * draw()), batch(device)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(function(x), x * draw())
    assert function.info()["forward_replays"] > 1
    assert torch.equal(call(x), x * draw())
    assert replays(call) == 1


def test_a_state_of_numpy_that_is_given_none_is_not_seen_a_documented_limit(device: str) -> None:
    call = make_graphed_callables(lambda x: x * float(np.random.RandomState(None).rand()), (batch(device),))
    x = batch(device)
    first = call(x).detach().clone()
    assert torch.equal(call(x), first)
