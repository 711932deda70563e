"""Random training programs on flat parameters leave, after each step, what plain eager execution leaves.

The first seed is printed and changes with the code (seeds.py); ``python -m tests.flat.flat_programs`` runs more, and
makes what fails small.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from flat_programs.backwards import WAYS
from flat_programs.generate import generate
from flat_programs.program import Program, Setup, Step
from flat_programs.run import failure_of, first_failure, run_programs
from flat_programs.shrink import shrink
from flat_programs.training import Training
from ranks import ranks_of
from seeds import first_seed

from te_graph import FlatGradScaler, FlatParameters
from te_graph.flat.bucket_reductions import BucketReductions
from te_graph.flat.carried_gradients import CarriedGradients
from te_graph.flat.flat_buffer import FlatBuffer
from te_graph.flat.foreign_functions import _Beside
from te_graph.flat.optimizer import FlatOptimizer

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")
one_rank = pytest.fixture(ranks_of, scope="module", params=[pytest.param(("cpu", 1), id="gloo-1")])
two_ranks = pytest.fixture(ranks_of, scope="module", params=[pytest.param(("cpu", 2), id="gloo-2")])


def program(*steps: tuple[str, dict[str, Any]], **setup: Any) -> Program:
    return Program(1, Setup(**setup), tuple(Step(name, arguments) for name, arguments in steps))


EMBEDDING = 3  # among the parameters
BACKWARD, STEP, DROP = ("backward", {}), ("step", {"max_norm": 1.0}), ("drop", {"by": "flat"})
ADDED, FAILING = ("backward", {"syncs": False}), ("backward", {"fails": "backward"})
AT_ONCE, CREATE_GRAPH = ("backward", {"way": "at_once"}), ("backward", {"way": "create_graph"})
REENTRANT = ("backward", {"checkpoints": ("", "reentrant")})
SET_ALONE = ("set_alone", {"number": EMBEDDING, "by": "optimizer"})
REPLACE, OVERFLOW = ("replace", {"number": EMBEDDING}), ("step", {"overflows": EMBEDDING})
CLIP, CLIP_NAN = ("clip", {"max_norm": 0.1}), ("clip", {"max_norm": 0.1, "poisoned": EMBEDDING})
ZERO, OWN_ZEROS = ("zero", {}), ("zero", {"by": "user"})
CLOSE_AND_ZERO = ("flatten_again", {"way": "close", "sets_to_none": False})
LEFT_OVER = {"frozen": True, "left_over": True}
LOW = {"dtypes": ("bfloat16",)}
ONCE_FAILED = (
    program(BACKWARD, CLIP_NAN, DROP, BACKWARD, CLIP),
    program(*[AT_ONCE] * 4),
    program(*[AT_ONCE] * 4, **LOW),
    program(BACKWARD, FAILING, DROP, BACKWARD, STEP, gradient_scale=0.5),
    program(BACKWARD, FAILING, BACKWARD, STEP, gradient_scale=0.5),
    program(BACKWARD, ADDED, STEP, DROP, BACKWARD, STEP, gradient_scale=0.5),
    program(REPLACE, BACKWARD, BACKWARD, STEP, gradient_scale=0.5),
    program(BACKWARD, REPLACE, BACKWARD, STEP, gradient_scale=0.5, **LOW),
    program(CREATE_GRAPH, BACKWARD, STEP, gradient_scale=0.5),
    program(CREATE_GRAPH, BACKWARD, STEP, **LOW),
    program(BACKWARD, ("reduce_gradients", {}), STEP, gradient_scale=0.5),
    program(("backward", {"way": "with_inputs"}), BACKWARD, gradient_scale=0.5),
    program(BACKWARD, DROP, ("flatten_again", {"way": "close"}), BACKWARD, **LOW),
    program(BACKWARD, DROP, ("flatten_again", {"way": "file"}), BACKWARD, **LOW),
    program(BACKWARD, ("flatten_again", {"way": "forget"}), BACKWARD, STEP),
    program(BACKWARD, ("keep", {}), BACKWARD),
    program(("hook", {"kind": "after", "number": EMBEDDING}), BACKWARD, FAILING, STEP, **LOW),
    program(("hook", {"kind": "node", "number": EMBEDDING}), BACKWARD, STEP, **LOW),
    program(BACKWARD, STEP, ZERO, STEP, optimizer="momentum"),
    program(BACKWARD, ADDED, OWN_ZEROS, BACKWARD, STEP, gradient_scale=0.5),
    program(BACKWARD, ADDED, OWN_ZEROS, STEP, BACKWARD, STEP, gradient_scale=0.5, **LOW),
    program(BACKWARD, ADDED, REPLACE, BACKWARD, STEP, gradient_scale=0.5),
    program(BACKWARD, ADDED, SET_ALONE, BACKWARD, gradient_scale=0.5, **LOW),
    program(BACKWARD, CLOSE_AND_ZERO, BACKWARD, STEP),
    program(BACKWARD, CLOSE_AND_ZERO, BACKWARD, STEP, **LOW, **LEFT_OVER),
    program(BACKWARD, ADDED, ("flatten_again", {"way": "close"}), BACKWARD, STEP, gradient_scale=0.5),
    program(BACKWARD, ("drop", {"by": "optimizer"}), BACKWARD, **LEFT_OVER),
    program(BACKWARD, ("clip", {"max_norm": 0.1, "by": "torch"}), STEP, **LOW, **LEFT_OVER),
)
ONCE_FAILED_ON_TWO_RANKS = (
    program(REENTRANT, REENTRANT, REENTRANT, STEP, ties=("head",), has_head_bias=False, bucket_bytes=64),
    program(BACKWARD, BACKWARD, FAILING, DROP, BACKWARD, BACKWARD, STEP, bucket_bytes=64),
    program(BACKWARD, OVERFLOW, DROP, BACKWARD, STEP, shard="optimizer", scaled=True),
    program(ADDED, ZERO, STEP, BACKWARD, STEP, shard="optimizer", optimizer="momentum"),
    program(BACKWARD, ADDED, OWN_ZEROS, STEP, BACKWARD, STEP, shard="optimizer"),
    program(SET_ALONE, STEP, ZERO, SET_ALONE, STEP, shard="optimizer"),
    program(
        ("backward", {"uses": ((False, False), (False, False))}),
        ("backward", {"uses": ((True, False), (False, False))}),
        STEP,
        bucket_bytes=64,
    ),
)


def programs(topic: str, count: int) -> list[Program]:
    first = first_seed(topic)
    return [generate(seed) for seed in range(first, first + count)]


def test_one_rank_trains_as_eager_execution_does(one_rank: Any, seed: int) -> None:
    one_rank.run(run_programs, seed, programs("flat programs", 10))


def test_two_ranks_train_as_eager_execution_does(two_ranks: Any, seed: int) -> None:
    two_ranks.run(run_programs, seed, [*ONCE_FAILED_ON_TWO_RANKS, *programs("flat programs of two ranks", 3)])


def test_programs_that_once_failed(one_rank: Any, seed: int) -> None:
    one_rank.run(run_programs, seed, ONCE_FAILED)


@pytest.mark.full
@pytest.mark.parametrize("part", range(5))
def test_one_rank_trains_as_eager_execution_does_at_length(one_rank: Any, part: int) -> None:
    first = first_seed(f"flat programs, part {part}")
    assert not first_failure(one_rank, range(first, first + 60))


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_two_ranks_train_as_eager_execution_does_at_length(two_ranks: Any, part: int) -> None:
    first = first_seed(f"flat programs of two ranks, part {part}")
    assert not first_failure(two_ranks, range(first, first + 20))


# What follows shows that a defect would be seen.


def skip(cls: type, name: str, when: Callable[..., bool] = lambda *arguments: True) -> Callable[[Any], None]:
    """A defect: a method of ``cls`` does nothing ``when`` it is called with such arguments."""
    method = getattr(cls, name)

    def defective(self: Any, *arguments: Any) -> Any:
        return None if when(*arguments) else method(self, *arguments)

    return lambda monkeypatch: monkeypatch.setattr(cls, name, defective)


DEFECTS = {
    "what was reduced is not added": (
        skip(CarriedGradients, "of"),
        program(BACKWARD, BACKWARD, gradient_scale=0.5),
    ),
    "what was reduced is reduced again": (
        skip(CarriedGradients, "put_aside"),
        program(BACKWARD, BACKWARD, gradient_scale=0.5),
    ),
    "what was dropped is added": (
        skip(CarriedGradients, "_forget"),
        program(BACKWARD, ("backward", {"syncs": False}), DROP, BACKWARD, gradient_scale=0.5),
    ),
    "zeros of the user's are not seen": (
        skip(CarriedGradients, "forget_overwritten"),
        program(BACKWARD, ADDED, OWN_ZEROS, BACKWARD, gradient_scale=0.5),
    ),
    "gradients of others are not clipped": (
        lambda monkeypatch: monkeypatch.setattr(
            _Beside, "gradient_parts", lambda beside: beside._flat.gradient_parts()
        ),
        program(BACKWARD, ("clip", {"max_norm": 0.1, "by": "torch"}), **LOW, **LEFT_OVER),
    ),
    "gradients that are not reduced are stepped": (
        skip(BucketReductions, "expect_reduced"),
        program(BACKWARD, ("backward", {"syncs": False}), STEP, gradient_scale=0.5),
    ),
    "a bucket is not reduced": (
        skip(BucketReductions, "_run_bucket", lambda number, *_: number == 1),
        program(BACKWARD, gradient_scale=0.5),
    ),
    "what autograd has left does not become main_grad": (
        skip(FlatBuffer, "settle_"),
        program(("hook", {"kind": "after", "number": EMBEDDING}), BACKWARD, BACKWARD, STEP, dtypes=("bfloat16",)),
    ),
    "gradients stay": (
        skip(FlatParameters, "zero_grad"),
        program(BACKWARD, DROP),
    ),
    "masters do not follow": (
        skip(FlatOptimizer, "read_parameters"),
        program(BACKWARD, STEP, ("write", {"number": EMBEDDING}), STEP, dtypes=("bfloat16",)),
    ),
    "an overflow is stepped": (
        skip(FlatGradScaler, "_unscale_grads_"),
        program(BACKWARD, ("step", {"overflows": EMBEDDING}), scaled=True),
    ),
    "a state is not loaded": (
        skip(FlatOptimizer, "load_state_dict"),
        program(BACKWARD, STEP, ("save_and_load", {}), STEP, optimizer="momentum"),
    ),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(one_rank: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    defect, right = DEFECTS[name]
    assert not failure_of(one_rank, right)
    defect(monkeypatch)
    failure = failure_of(one_rank, right)
    assert str(right) in failure and "\n\nIn " in failure


def test_a_program_that_fails_is_made_small() -> None:
    def fails(one: Program) -> bool:
        return one.setup.has_conv and any(step.name == "step" for step in one.steps)

    large = next(one for one in map(generate, itertools.count()) if fails(one))
    small = shrink(large, fails)
    assert [step.name for step in small.steps] == ["step"]
    assert small.setup == Setup(has_conv=True)


def test_programs_are_printed_and_repeat() -> None:
    for seed in range(100):
        assert generate(seed) == generate(seed)
    right = program(BACKWARD, STEP, shard="optimizer")
    assert str(right).splitlines() == [
        "training = Training(1, Setup(shard='optimizer'), rank)",
        "training.backward()",
        "training.step(max_norm=1.0)",
    ]


def test_all_kinds_of_steps_are_drawn() -> None:
    drawn = [step for seed in range(200) for step in generate(seed).steps]
    methods = {name for name, value in vars(Training).items() if callable(value) and not name.startswith("_")}
    assert {step.name for step in drawn} == methods
    assert {step.arguments.get("way") for step in drawn if step.name == "backward"} == {way.__name__ for way in WAYS}
