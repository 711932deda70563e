"""Random training scripts leave what eager execution leaves: losses, gradients, weights, states of optimizers.

The first seed is printed and changes with the code (seeds.py); ``training_scripts.py``
beside this file runs many.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
import torch
import training_scripts
from seeds import first_seed
from torch import Tensor, nn
from training_scripts import Event, Script, compare, draw, shrink

import te_graph as tg

pytestmark = pytest.mark.usefixtures("one_thread")
_SCRIPTS, _MOST_SECONDS = 20, 5.0


def test_random_training_scripts_leave_what_eager_execution_leaves() -> None:
    first, start, ran, replayed, wrong = first_seed("training scripts"), time.monotonic(), 0, 0, []
    for seed in range(first, first + _SCRIPTS):
        if time.monotonic() - start > _MOST_SECONDS:
            break
        script = draw(seed)
        verdict, detail, replays = compare(script)
        if verdict == "eager error":
            continue  # what is left to train after a few events may be nothing
        if verdict != "same" and not (verdict == "rounded" and script.may_round):
            wrong.append((verdict, detail, script))
        ran += 1
        replayed += replays > 0
    assert not wrong, f"TE_GRAPH_PROGRAM_SEED={first}\n{wrong[0]}"
    # On a slow machine few run, of which a chance majority may change something in each step.
    assert ran and (ran < 10 or replayed > 0.2 * ran)


def _script(**changed: Any) -> Script:
    kinds = ("train", "evaluate", "train")
    events = tuple(Event(kind, number) for number, kind in enumerate(kinds))
    plain = {"is_tied": False, "is_autocast": False, "dtype": torch.float32, "accumulation": 2, "set_to_none": True}
    script = Script(
        seed=0,
        names=("gated", "attention"),
        mode="layers",
        optimizer="sgd",
        options={},
        events=events,
        clip="norm",
        **plain,
    )
    return dataclasses.replace(script, **changed)


def test_a_script_replays() -> None:
    verdict, detail, replays = compare(_script())
    assert (verdict, detail) == ("same", "")
    assert replays >= 8


@pytest.mark.parametrize("factor, verdict", [(1 + 1e-6, "rounded"), (2.0, "differs")])
def test_a_wrong_replay_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch, factor: float, verdict: str) -> None:
    def wrong(callables: tuple[nn.Module, ...], *_: Any, **options: Any) -> None:
        def scaled(module: nn.Module, args: tuple, result: Tensor) -> Tensor:
            return result * factor if module.training else result

        for module in callables:
            module.register_forward_hook(scaled)

    monkeypatch.setattr(tg, "make_graphed_callables", wrong)
    script = _script()
    assert compare(script)[0] == verdict
    small = shrink(script)
    assert (len(small.events), small.accumulation, small.clip) == (1, 1, "none")


def test_an_error_of_either_side_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(trainer: Any, rng: Any) -> None:
        if trainer.is_graphed or trainer.script.seed:
            raise RuntimeError("no")

    monkeypatch.setitem(training_scripts.EVENTS, "train", refuse)
    assert compare(_script())[:2] == ("refused", "event 0 (train): RuntimeError: no")
    assert compare(_script(seed=1))[0] == "eager error"
