"""Random numbers of which no state of a generator tells are refused by name: those from the system, and those of a
generator whose state is put back after the draw.

Generators that are made without a seed take theirs from the system; those with one draw the same numbers in each call.
A generator at a source has the state that it had at the capture, or the draw is another one.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable
from typing import Any

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


_put_back, _of_numpy, _derived = random.Random(1), np.random.default_rng(1), Drawing(1)
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
    "random, put back": (lambda: _peeked(random), "Python's random module"),
}
# Whose functions, written in Cython, no profile function is told of.
DRAWS_OF_NUMPY: dict[str, tuple[Draw, str]] = {
    "numpy.random, put back": (lambda: _peeked_of_numpy(np.random), "numpy.random"),
}
SEEN_DRAWS = DRAWS | DRAWS_OF_NUMPY if sys.version_info >= (3, 12) else DRAWS  # docs/limits.md
PEEKS: dict[str, Draw] = {
    "Random": lambda: _peeked(_put_back),
    "Generator": lambda: _peeked_of_bits(_of_numpy),
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


def _peeked(generator: Any) -> float:
    """Draws, and leaves the state as it was."""
    state = generator.getstate()
    drawn = generator.random()
    generator.setstate(state)
    return drawn


def _peeked_of_numpy(generator: Any) -> float:
    state = generator.get_state()
    drawn = float(generator.rand())
    generator.set_state(state)
    return drawn


def _peeked_of_bits(generator: np.random.Generator) -> float:
    state = generator.bit_generator.state
    drawn = float(generator.random())
    generator.bit_generator.state = state
    return drawn


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


@pytest.mark.skipif(not hasattr(sys, "monitoring"), reason="Python before 3.12")
@pytest.mark.parametrize("case", DRAWS_OF_NUMPY)
def test_a_draw_of_numpy_is_refused_by_name(case: str, device: str) -> None:
    draw, name = DRAWS_OF_NUMPY[case]
    with pytest.raises(RuntimeError, match=f"it draws from {name}.*torch.rand"):
        make_graphed_callables(lambda x: x * draw(), (batch(device),))


@pytest.mark.parametrize("draw", PEEKS.values(), ids=PEEKS)
def test_a_state_that_is_put_back_is_compared(draw: Draw, device: str) -> None:
    call = make_graphed_callables(lambda x: x * draw(), (batch(device),), on_mismatch="eager")
    function, x = graphed(lambda x: x * draw()), batch(device)
    for step in range(6):
        if step == 3:
            _put_back.random()
            _of_numpy.random()
        assert torch.equal(function(x.detach()), x * draw())
        assert torch.equal(call(x), x * draw())
    assert function.info()["forward_replays"] > 0
    assert replays(call) == 3


def test_a_state_that_the_code_neither_sees_nor_sets_is_not_compared(device: str) -> None:
    call = make_graphed_callables(lambda x: x * (_put_back.random() if x.dim() > 2 else 2.0), (batch(device),))
    _put_back.random()
    x = batch(device)
    assert torch.equal(call(x), x * 2.0)


def test_a_generator_of_a_derived_class_whose_state_is_put_back_is_refused(device: str) -> None:
    with pytest.raises(RuntimeError, match="_derived is a Drawing, a generator of a derived class"):
        make_graphed_callables(lambda x: x * _peeked(_derived), (batch(device),))
    function, x = graphed(lambda x: x * _peeked(_derived)), torch.ones(3, device=device)
    for _ in range(4):
        _derived.random()
        assert torch.equal(function(x), x * _peeked(_derived))


@pytest.mark.parametrize("case", SEEN_DRAWS)
def test_a_graphed_function_says_so(case: str, device: str) -> None:
    draw, name = SEEN_DRAWS[case]
    function, x = graphed(lambda x: x * draw()), torch.ones(3, device=device)
    with pytest.raises(RuntimeError, match=f"draws random numbers from {name}"):
        for _ in range(4):
            function(x)


def test_a_draw_in_a_backward_is_refused_by_name(device: str) -> None:
    with pytest.raises(RuntimeError, match=rf"it draws from {SYSTEM}.*in backward"):
        make_graphed_callables(lambda x: Seeds.apply(x), (batch(device),))


@pytest.mark.usefixtures("_events")
@pytest.mark.parametrize("draw", FIXED.values(), ids=FIXED)
@pytest.mark.one_of(5)
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


@pytest.mark.parametrize("module", [random, np.random], ids=["random", "numpy"])
def test_states_that_are_saved_and_put_back_without_a_draw_are_no_draws(module: Any, device: str) -> None:
    get, put = (module.getstate, module.setstate) if module is random else (module.get_state, module.set_state)

    def fn(x: Tensor) -> Tensor:  # [n, 4] -> [n, 4]
        state = get()
        y = x * 2
        put(state)
        return y

    call = make_graphed_callables(fn, (batch(device),))
    assert torch.equal(call(x := batch(device)), x * 2)


@pytest.mark.parametrize("draw", [lambda: float(np.random.sample()), lambda: float(np.random.ranf())])
def test_draws_of_functions_without_an_owner_are_refused_beside_a_thread(draw: Draw, device: str) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match=r"draws from numpy\.random"):
            make_graphed_callables(lambda x: x * draw(), (batch(device),))
    finally:
        stop.set()
        thread.join()
