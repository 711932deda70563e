"""Random programs over a graphed function give what they give in eager execution, whatever Python state they read.

The first seed changes with the code (seeds.py). A failure prints the program, made as small as it goes.
"""

from __future__ import annotations

import time

import pytest
from seeds import first_seed
from stress_sequences import generate, report, run

pytestmark = pytest.mark.usefixtures("repeatable")
_PROGRAMS = 8


def test_random_programs_give_what_eager_execution_gives() -> None:
    seed = first_seed("sequences")
    replays = calls = programs = 0
    deadline = time.monotonic() + 25
    while programs < 5 or (programs < _PROGRAMS and time.monotonic() < deadline):
        program = generate(seed + programs)
        difference, replayed, called = run(program)
        assert not difference, report(seed + programs, program, difference)
        programs, replays, calls = programs + 1, replays + replayed, calls + called
    assert replays > calls / 4, f"{replays} of {calls} calls replayed: the programs say little"
