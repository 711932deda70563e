"""externals="keep": tensors that no name in the code leads to are held, and refused where that could not be right."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from library_layouts import HIDDEN, Layout, Weighed, batch, installed
from twins import eager_copy, run

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")

_numbers = itertools.count()


@pytest.fixture(params=sorted(HIDDEN))
def package(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    with installed(HIDDEN[request.param], tmp_path, f"hidden_{next(_numbers)}") as made:
        yield made


@pytest.fixture
def install(tmp_path: Path) -> Iterator[Any]:
    """Takes the text of a layout to the package."""
    opened = []

    def make(text: str) -> Any:
        opened.append(installed(Layout(text), tmp_path, f"hidden_{next(_numbers)}"))
        return opened[-1].__enter__()

    yield make
    for one in opened:
        one.__exit__(None, None, None)


def _replays(layer: Weighed) -> int:
    return layer.te_graph.info()["forward_replays"]


def _captured(package: Any, **options: Any) -> tuple[Weighed, Weighed]:
    layer = Weighed(package)
    twin = eager_copy(layer)
    tg.make_graphed_callables(layer, (batch(),), externals="keep", **options)
    return layer, twin


def test_the_refusal_names_the_option(package: Any) -> None:
    with pytest.raises(RuntimeError, match=r'where a library keeps it .* let externals="keep" hold it; at .*ops\.py'):
        tg.make_graphed_callables(Weighed(package), (batch(),))


def test_a_tensor_that_nobody_names_is_held(package: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "te_graph"):
        layer, twin = _captured(package)
    (record,) = caplog.records
    message = record.getMessage()
    assert "externals='keep' holds a tensor of torch.float32 of shape [8]" in message
    assert "ops.py" in message
    for _ in range(2):
        x = batch()
        assert_bitwise_equal(run(layer, x), run(twin, x))
    assert_bitwise_equal(layer.linear.weight.grad, twin.linear.weight.grad)
    assert _replays(layer) == 2


def test_one_tensor_is_told_once_for_several_callables(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    package = install("kept = queue.Queue()\nkept.put(make(8))\ndef get(n): return kept.queue[0]")
    layers = tuple(Weighed(package) for _ in range(3))
    with caplog.at_level(logging.WARNING, "te_graph"):
        tg.make_graphed_callables(layers, tuple((batch(),) for _ in layers), externals="keep")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("text", ["t.mul_(2.0)", "t.data = torch.rand(8)", "t.resize_(4)", "t.requires_grad_()"])
def test_a_held_tensor_that_changes_is_no_longer_replayed(package: Any, text: str) -> None:
    layer, _ = _captured(package)
    run(layer, batch())
    get = getattr(package.tables, "get", None) or package.tables.store.get
    exec(text, {"t": get(8), "torch": torch})
    with pytest.raises(RuntimeError, match=r"that externals='keep' holds .*since capture"):
        layer(batch())
    assert _replays(layer) == 1


def test_a_held_tensor_lives_with_the_graph(install: Any) -> None:
    package = install("kept = queue.Queue()\nkept.put(make(8))\ndef get(n): return kept.queue[0]")
    layer, twin = _captured(package)
    x = batch()
    expected = run(twin, x)
    package.tables.kept.queue.clear()
    torch.full((1000, 8), 7.0)
    assert_bitwise_equal(run(layer, x), expected)


_TAKES_TURNS = """
kept = queue.Queue()
for number in range({count}): kept.put(make(8) + number)
def get(n):
    kept.put(kept.get())
    return kept.queue[-1]
"""


@pytest.mark.parametrize("count", [2, 3])
def test_two_warm_ups_that_use_different_tensors_are_refused(install: Any, count: int) -> None:
    package = install(_TAKES_TURNS.format(count=count))
    with pytest.raises(RuntimeError, match=r"Weighed: externals='keep' cannot hold .* two warm-ups read different"):
        _captured(package)


def test_two_that_change_places_are_refused(install: Any) -> None:
    package = install(
        _TAKES_TURNS.format(count=2)
        + "def get(n):\n    kept.put(kept.get())\n    return torch.neg(kept.queue[0]) * 3.0 + torch.abs(kept.queue[1])"
    )
    with pytest.raises(RuntimeError, match="two warm-ups read different tensors there"):
        _captured(package)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kept.put(make(8).requires_grad_())\ndef get(n): return kept.queue[0]", "requires a gradient"),
        ("kept.put(make(8))\ndef get(n): return kept.queue[0].add_(1.0)", "is changed in place by the callable"),
        ("with torch.inference_mode(): kept.put(make(8))\ndef get(n): return kept.queue[0]", "inference mode"),
    ],
)
def test_what_cannot_be_held_is_refused(install: Any, text: str, words: str) -> None:
    package = install(f"kept = queue.Queue()\n{text}")
    with pytest.raises(RuntimeError, match=rf"cannot hold a tensor of shape .8. .*{words}.* at .*py"):
        tg.make_graphed_callables(
            lambda x: package.tables.get(8).detach() * 1.0 + x if "inference" in words else package.ops.weighed(x, 8),
            (torch.randn(3, 8, requires_grad=True),),
            externals="keep",
        )


def test_what_a_first_call_makes_of_its_arguments_is_refused(install: Any) -> None:
    package = install(
        "kept = queue.Queue()\ndef get(n): return kept.queue[0]\n"
        "def of(x):\n    if kept.empty(): kept.put(x.detach().mean(0))\n    return kept.queue[0]"
    )
    with pytest.raises(RuntimeError, match=r"the first call makes .* of its arguments"):
        tg.make_graphed_callables(lambda x: x * package.tables.of(x), (batch(),), externals="keep")


def test_what_is_no_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected externals in \('refuse', 'keep'\), got 'hold'"):
        tg.make_graphed_callables(torch.nn.Linear(8, 8), (batch(),), externals="hold")


def test_an_eager_call_takes_the_place_where_one_changed(install: Any) -> None:
    package = install("kept = queue.Queue()\nkept.put(make(8))\ndef get(n): return kept.queue[0]")
    layer, twin = _captured(package, on_mismatch="eager")
    package.tables.get(8).add_(1.0)
    x = batch()
    assert_bitwise_equal(run(layer, x), run(twin, x))
    assert _replays(layer) == 0
