"""Random programs of packages that keep tensors: what is done to these between calls of a layer that uses one.

``python tests/graphs/guards/library_programs.py`` runs as many as LIBRARY_PROGRAMS says.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from library_layouts import LAYOUTS, WIDTH, Layout, Weighed, batch, installed
from twins import eager_copy, run

import te_graph as tg
from te_graph.testing import assert_bitwise_equal, deterministic

_CALLS = 6


def changes_of(layout: Layout) -> dict[str, bool]:
    """Statements that may run between two calls, and whether the calls have to replay after each."""
    call, other, *others = (call_for(layout, n) for n in (WIDTH, 5, 2, 3, 4, 6))
    cleared = {layout.clear: False, f"{layout.clear}; T.scale = 3.0": False, f"{layout.clear}; {call}": False}
    return {
        "pass": True,
        call: True,
        other: not layout.forgets,
        "; ".join([other, *others]): not layout.forgets,
        f"{call}.mul_(1.5)": True,
        f"{call}.data = torch.rand({WIDTH})": False,
        "T.scale = T.scale + 1.0": False,
        "T.something = 1": True,
        **(cleared if layout.clear else {}),
    }


def call_for(layout: Layout, n: int) -> str:
    """The call of ``layout`` for length ``n``, outside of its package."""
    return layout.call.replace("(n", f"({n}").replace("[n", f"[{n}").replace("x.device", "torch.device('cpu')")


def run_program(seed: int, folder: Path) -> None:
    """A package, a layer that calls it, and changes between its calls: each replays with the bits of eager execution,
    or is refused by name."""
    rng = random.Random(seed)
    name = rng.choice(sorted(LAYOUTS))
    layout = LAYOUTS[name]
    print(f"{seed}: {name}")
    with installed(layout, folder, f"package_of_program_{seed}") as package:
        if rng.random() < 0.5:
            _do(package, rng.choice(["T.scale = 0.5", "pass"]))
            package.ops.weighed(torch.ones(WIDTH), WIDTH)
        layer = Weighed(package)
        twin = eager_copy(layer)
        tg.make_graphed_callables(layer, (batch(),), on_mismatch=rng.choice(["raise", "eager", "capture"]))
        choices, is_as_captured = changes_of(layout), True
        for _ in range(_CALLS):
            change = rng.choice(sorted(choices))
            _do(package, change)
            is_as_captured &= choices[change]
            if not _is_right(layer, twin, f"{name}: {change}", must_replay=is_as_captured):
                break


def _is_right(layer: Weighed, twin: Weighed, what: str, must_replay: bool) -> bool:
    """False where the call is refused."""
    x, before = batch(), _replays(layer)
    try:
        result = run(layer, x)
    except RuntimeError as error:
        assert "since capture" in str(error), what
        assert not must_replay, f"{what}: {error}"
        return False
    assert_bitwise_equal(result, run(twin, x))
    assert_bitwise_equal(layer.linear.weight.grad, twin.linear.weight.grad)
    assert not must_replay or _replays(layer) > before, what
    return True


def _replays(layer: Weighed) -> int:
    return layer.te_graph.info()["forward_replays"]


def _do(package: ModuleType, statement: str) -> None:
    names = {"T": package.tables, "tables": package.tables, "torch": torch, "get": getattr(package.tables, "get", None)}
    exec(statement, names)


if __name__ == "__main__":
    first = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    with deterministic(), tempfile.TemporaryDirectory() as place:
        for number in range(int(os.environ.get("LIBRARY_PROGRAMS", "100"))):
            torch.manual_seed(first + number)
            run_program(first + number, Path(place))
