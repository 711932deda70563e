"""Random operations on graphed layers leave, after each of them, what they leave on an eager twin, or are refused.

Each state of the code draws other operations. A failure tells the seed: TE_GRAPH_PROGRAM_SEED=<seed> repeats the run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from seeds import first_seed
from stress import World
from stress_calls import CALLS
from stress_changes import CHANGES
from stress_model import KINDS

pytestmark = pytest.mark.usefixtures("repeatable")

OPERATIONS = (*CALLS, *CHANGES)
OPTIONS = (
    {"accumulate_grads": False},
    {"hooks": "captured"},
    {"on_exhausted": "eager"},
    {"on_mismatch": "eager"},
    {"on_mismatch": "capture"},
    {"chain": True},
    {"chain": True, "on_mismatch": "capture", "on_exhausted": "eager"},
)


@pytest.fixture(autouse=True)
def garbage_of_earlier_tests_is_out_of_the_way() -> Iterator[None]:
    """Collections are one of the operations; this makes them cheap."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def stress(device: str, kind: str, options: dict[str, Any], steps: int) -> World:
    world = World(device, kind, options, first_seed(f"stress of {kind} with {options}"))
    world.run(OPERATIONS, steps)
    return world


def assert_that_all_was_done(world: World) -> None:
    missing = {operation.name for operation in OPERATIONS} - {name for name, _ in world.counts}
    assert not missing, f"never done: {missing}"
    # By far less than what is usual (0.6 and 0.7 of all), since a few dozens of draws decide.
    assert world.calls["replayed"] > world.calls.total() / 3, f"calls of layers: {dict(world.calls)}"
    assert world.counts["backward", "replayed"] * 3 > world.counts["backward", "eager"], dict(world.counts)
    for tensor in world.sides[0].model.state_dict().values():
        assert torch.isfinite(tensor).all(), "the values say nothing any more"


@pytest.mark.parametrize("kind", KINDS)
def test_hundreds_of_random_operations_leave_what_eager_execution_leaves(device: str, kind: str) -> None:
    world = stress(device, kind, {}, steps=500 if device == "cuda" else 250)
    assert_that_all_was_done(world)
    refused = {name for name, outcome in world.counts if outcome == "raised"}
    assert refused >= {"forwards_until_all_slots_are_used", "forward_with_other_arguments"}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()))
@pytest.mark.one_of(3)
def test_random_operations_leave_what_eager_execution_leaves_with_options(device: str, options: dict) -> None:
    assert_that_all_was_done(stress(device, "tied", options, steps=250))
