"""Random programs over a graphed function give what they give in eager execution, whatever Python state they read.

Each run draws its programs from a new seed. A failure prints the program, made as small as it goes.
"""

from __future__ import annotations

import os
import time

import pytest
from stress_sequences import generate, report, run

pytestmark = pytest.mark.usefixtures("repeatable")


def test_random_programs_give_what_eager_execution_gives() -> None:
    seed = int(os.environ.get("TE_GRAPH_STRESS_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"TE_GRAPH_STRESS_SEED={seed}")
    replays = calls = programs = 0
    deadline = time.monotonic() + 8
    while programs < 5 or time.monotonic() < deadline:
        program = generate(seed + programs)
        difference, replayed, called = run(program)
        assert not difference, report(seed + programs, program, difference)
        programs, replays, calls = programs + 1, replays + replayed, calls + called
    assert replays > calls / 4, f"{replays} of {calls} calls replayed: the programs say little"
