"""Tensors that installed packages keep: found wherever a package keeps them, and guarded."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from library_layouts import LAYOUTS, WIDTH, Layout, Weighed, batch, installed
from library_programs import call_for, run_program
from seeds import first_seed
from torch import nn
from twins import eager_copy, run

import te_graph as tg
from te_graph import _C
from te_graph.graphs.guards.readers.cached_results import cached_results
from te_graph.graphs.guards.sources import Source
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")

_PROGRAMS, _LEAST, _MOST_SECONDS = 20, 2, 3
_numbers = itertools.count()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.one_of(5)
def test_a_tensor_that_is_exchanged_is_seen(name: str, folder: Path) -> None:
    layout = LAYOUTS[name]
    with installed(layout, folder, f"package_{next(_numbers)}") as package:
        layer = Weighed(package)
        twin = eager_copy(layer)
        tg.make_graphed_callables(layer, (batch(),))
        x = batch()
        assert_bitwise_equal(run(layer, x), run(twin, x))
        assert layer.te_graph.info()["forward_replays"] == 1
        names = {**vars(package.tables), "T": package.tables, "tables": package.tables}
        before = eval(call_for(layout, WIDTH), names)  # lives on: that it is gone would be seen by itself
        exec(layout.clear, names)
        with pytest.raises(RuntimeError, match="since capture"):
            layer(batch())
        run(twin, x)  # makes the tensor anew
        assert before is not eval(call_for(layout, WIDTH), names)
        with pytest.raises(RuntimeError, match="since capture"):
            layer(batch())


def test_random_programs_of_packages(folder: Path) -> None:
    first, started, count = first_seed("libraries"), time.monotonic(), 0
    while count < _LEAST or (count < _PROGRAMS and time.monotonic() - started < _MOST_SECONDS):
        torch.manual_seed(first + count)
        run_program(first + count, folder)
        count += 1
    print(f"{count} programs, seeds from {first}")


_COUNTS = """
class Store:
    def __init__(self): self.kept, self.{name} = {{}}, 0
    def get(self, n):
        self.{name} += 1
        if n not in self.kept: self.kept[n] = make(n)
        return self.kept[n]
store = Store()
"""


def test_what_changes_beside_a_kept_tensor_is_refused(folder: Path) -> None:
    layout = Layout(_COUNTS.format(name="hits"), call="T.store.get(n)")
    with installed(layout, folder, f"package_{next(_numbers)}") as package:
        with pytest.raises(RuntimeError, match=r"the forward changes .*hits .from \d to \d.*ignore_attributes"):
            tg.make_graphed_callables(Weighed(package), (batch(),))
        layer = Weighed(package)
        twin = eager_copy(layer)
        tg.make_graphed_callables(layer, (batch(),), ignore_attributes=("hits",))
        x = batch()
        assert_bitwise_equal(run(layer, x), run(twin, x))


def test_values_beside_a_kept_tensor_are_compared(folder: Path) -> None:
    text = (
        "class Rotary:\n    kept, factor = {}, 1.0\n    @classmethod\n    def get(cls, n):\n"
        "        if n not in cls.kept: cls.kept[n] = make(n)\n        return cls.kept[n] * cls.factor"
    )
    with installed(Layout(text, "T.Rotary.get(n)"), folder, f"package_{next(_numbers)}") as package:
        layer = Weighed(package)
        tg.make_graphed_callables(layer, (batch(),))
        layer(batch())
        package.tables.Rotary.factor = 2.0
        with pytest.raises(RuntimeError, match=r"factor.* changed from 1.0 to 2.0"):
            layer(batch())


def test_a_table_that_a_first_call_makes_of_its_arguments_is_refused(folder: Path) -> None:
    text = (
        "class Store:\n    def __init__(self): self.kept = None\n    def of(self, x):\n"
        "        if self.kept is None: self.kept = x.detach().mean(0)\n        return self.kept\nstore = Store()"
    )
    with (
        installed(Layout(text, "T.store.of(x)"), folder, f"package_{next(_numbers)}") as package,
        pytest.raises(RuntimeError, match=r"the first call makes .*kept of its arguments"),
    ):
        tg.make_graphed_callables(Weighed(package), (batch(),))


@pytest.mark.parametrize(
    ("option", "words"), [("refuse", "neither an argument nor a parameter"), ("keep", "two warm-ups read different")]
)
def test_a_table_that_is_made_anew_by_each_call_is_refused(folder: Path, option: str, words: str) -> None:
    text = (
        "class Store:\n    def __init__(self): self.kept = None\n    def get(self, n):\n"
        "        kept, self.kept = self.kept, make(n)\n        return make(n) if kept is None else kept\n"
        "store = Store()"
    )
    with (
        installed(Layout(text, "T.store.get(n)"), folder, f"package_{next(_numbers)}") as package,
        pytest.raises(RuntimeError, match=words),
    ):
        tg.make_graphed_callables(Weighed(package), (batch(),), externals=option)


def test_layers_of_one_package_share_a_table(folder: Path) -> None:
    with installed(LAYOUTS["functools.cache"], folder, f"package_{next(_numbers)}") as package:
        model = nn.Sequential(*(Weighed(package) for _ in range(3)))
        twin = eager_copy(model)
        tg.make_graphed_callables(tuple(model), (batch(),), chain=True)
        for _ in range(2):
            x = batch()
            assert_bitwise_equal(run(model, x), run(twin, x))
        assert [layer.te_graph.info()["forward_replays"] for layer in model] == [2, 2, 2]


def _kept_by(function: Any) -> Iterator[tuple[Any, Any]]:
    return ((one.key, one.obj) for one in cached_results(Source(function, "function")))


@pytest.mark.parametrize("size", [None, 3, 128])
def test_what_a_cached_function_keeps_is_found(size: int | None) -> None:
    @functools.lru_cache(size)
    def made(number: Any, **more: Any) -> dict:
        return {"number": number}

    expected = [made(8), made((1, 2)), made(3, mode="a")]
    made(functools)  # an object as key is left out
    found = list(_kept_by(made))
    results = [result for _, result in found]
    left = expected if size != 3 else expected[1:]
    assert len(results) == len(left) and all(any(one is result for one in results) for result in left)
    guard = _C.CallableGuard()
    known = guard.add_step(_C.StepKind.KNOWN, -1, None, 0, made, "made")
    for key, result in found:
        step = guard.add_step(_C.StepKind.CACHED, known, key, int(size is not None), None, "a result")
        guard.add_step(_C.StepKind.LENGTH, step, None, len(result), None, "its length")
    assert guard.steps == 1 + 2 * len(found)


def test_a_result_that_is_a_dictionary_is_not_taken_for_the_table() -> None:
    @functools.lru_cache(maxsize=2)
    def made(number: int) -> dict:
        return {number: "wrong"}

    made(1), made(2)
    assert [result for _, result in _kept_by(made)] == [{1: "wrong"}, {2: "wrong"}]
    empty = functools.lru_cache(maxsize=0)(lambda number: {})
    empty(1)
    assert not list(_kept_by(empty))
