"""Random programs of graphed blocks among companions leave what eager execution leaves (companion_programs.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import companion_programs
import pytest
import torch
from companion_programs import Plain, Program, one_rank, shrunk, verdict_of
from seeds import first_seed
from torch import Tensor

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")
_PROGRAMS, _MOST_SECONDS = 8, 4.0


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with one_rank():
        yield


def test_random_programs_leave_what_eager_execution_leaves() -> None:
    first, begin = first_seed("companion programs"), time.process_time()
    for seed in range(first, first + _PROGRAMS):
        program = Program.draw(seed)
        verdict, _ = verdict_of(program)
        assert not verdict, f"TE_GRAPH_PROGRAM_SEED={seed}: {verdict}\n{shrunk(program)}"
        if time.process_time() - begin > _MOST_SECONDS:
            break


def test_a_difference_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(Plain):
        """Forgets where a recording begins what it does otherwise."""

        def forward(self, x: Tensor) -> Tensor:  # [n, WIDTH] -> [n, WIDTH]
            return super().forward(x) * (2 if torch._C._len_torch_dispatch_stack() else 1)

    monkeypatch.setitem(companion_programs.BLOCKS, "Plain", Wrong)
    simple = {"whole": "", "around": "", "autocast": "", "scaler": False, "optimizer": "sgd", "step": ""}
    options = (("on_mismatch", "eager"),)
    program = replace(Program.draw(3), graphed=(1,), wraps_first=False, options=options, **simple)
    small, verdict = shrunk(replace(program, blocks=("Dropped", "Plain"), events=(("load", 1), ("step", 2))))
    assert "differs" in verdict
    assert (small.blocks, small.graphed, [event for event, _ in small.events]) == (("Plain",), (0,), ["step"])
