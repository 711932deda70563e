"""Arguments and results that are no tensors: by value or by identity, never by a recycled address."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hazards import batch
from torch import Tensor, nn
from twins import backward_of, run

from te_graph import make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


def scaled_by(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


class Rank(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass(frozen=True)
class Spec:
    span: range = range(0, 3, 2)


def instant(hour: int, offset: int = 0, name: str = "Z", fold: int = 0) -> datetime.datetime:
    zone = datetime.timezone(datetime.timedelta(hours=offset), name)
    return datetime.datetime(2020, 1, 1, hour, tzinfo=zone, fold=fold)


PAIRS = {
    "size": (lambda: torch.Size([2, 3]), torch.Size([2, 4])),
    "range": (lambda: range(3), range(4)),
    "frozenset": (lambda: frozenset({1, "a"}), frozenset({1, "b"})),
    "set": (lambda: {1, 2}, {1, 3}),
    "set of booleans": (lambda: {1}, {True}),
    "numpy float": (lambda: np.float32(0.5), np.float32(0.25)),
    "numpy float of another width": (lambda: np.float32(0.5), np.float64(0.5)),
    "numpy int": (lambda: np.int64(3), np.int64(4)),
    "numpy dtype": (lambda: np.dtype("float32"), np.dtype("float64")),
    "negative zero": (lambda: 0.0, -0.0),
    "complex negative zero": (lambda: complex(1, 0.0), complex(1, -0.0)),
    "numpy negative zero": (lambda: np.float64(0.0), np.float64(-0.0)),
    "slice": (lambda: slice(1, None), slice(True, None)),
    "enum": (lambda: Level.LOW, Level.HIGH),
    "enum and its value": (lambda: Level.LOW, 1),
    "decimal": (lambda: decimal.Decimal("0.1"), decimal.Decimal("0.2")),
    "fraction": (lambda: fractions.Fraction(1, 3), fractions.Fraction(2, 3)),
    "timedelta": (lambda: datetime.timedelta(1), datetime.timedelta(2)),
    "path": (lambda: pathlib.PurePosixPath("a"), pathlib.PurePosixPath("b")),
    "class": (lambda: dict, list),
    "function": (lambda: F.relu, F.gelu),
    "dispatching function": (lambda: F.max_pool2d, F.max_pool1d),
    "builtin": (lambda: torch.relu, torch.sigmoid),
    "method": (lambda: torch.Tensor.relu, torch.Tensor.exp),
    "operator": (lambda: torch.ops.aten.relu.default, torch.ops.aten.exp.default),
    "range of the same numbers": (lambda: range(0, 3, 2), range(0, 4, 2)),
    "frozen set of a float": (lambda: frozenset({2}), frozenset({2.0})),
    "frozen set of an enumeration": (lambda: frozenset({Level.LOW}), frozenset({Rank.LOW})),
    "frozen set of negative zero": (lambda: frozenset({0.0}), frozenset({-0.0})),
    "set of negative zero": (lambda: {0.0}, {-0.0}),
    "nested frozen set": (lambda: frozenset({frozenset({1})}), frozenset({frozenset({True})})),
    "time in another zone": (lambda: instant(12), instant(13, 1)),
    "time in a zone of another name": (lambda: instant(12), instant(12, name="UTC")),
    "time again": (lambda: instant(12), instant(12, fold=1)),
    "decimal of more places": (lambda: decimal.Decimal("1.0"), decimal.Decimal("1.000")),
    "path of another case": (lambda: pathlib.PureWindowsPath("a"), pathlib.PureWindowsPath("A")),
    "identifier": (lambda: uuid.UUID(int=1), uuid.UUID(int=1, is_safe=uuid.SafeUUID.safe)),
    "dataclass with a range": (lambda: Spec(), Spec(range(0, 4, 2))),
    "one line of code": (lambda: scaled_by(2.0), scaled_by(3.0)),
}


@pytest.mark.parametrize(("make", "other"), PAIRS.values(), ids=PAIRS)
def test_a_constant_of_the_same_value_replays_and_another_is_refused(device, make, other):
    captured = make()
    assert captured == make() or callable(captured)

    def chosen(x: Tensor, how: Any) -> Tensor:  # [3, 4]
        return x * 2

    graphed = make_graphed_callables(chosen, (batch(device), captured))
    for _ in range(3):
        x = batch(device)
        assert_bitwise_equal(run(lambda x: graphed(x, make()), x), run(lambda x: chosen(x, make()), x))
    assert graphed.te_graph.info()["forward_replays"] == 3
    with pytest.raises(ValueError, match=r"expected args\[1\].*as at capture, got"):
        graphed(batch(device), other)


@pytest.mark.parametrize("act", [F.relu, torch.tanh, torch.Tensor.exp, scaled_by(0.5)])
def test_an_activation_function_as_argument(device, act):
    def layer(x: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:  # [3, 4]
        return act(x * 2) + 1

    graphed = make_graphed_callables(layer, (batch(device), act))
    for _ in range(2):
        x = batch(device)
        assert_bitwise_equal(run(graphed, x, act), run(layer, x, act))


def test_a_function_whose_variable_got_another_value_is_refused(device):
    factor = 2.0

    def act(x: Tensor) -> Tensor:
        return x * factor

    graphed = make_graphed_callables(lambda x, act: act(x), (batch(device), act))
    x = batch(device)
    assert_bitwise_equal(graphed(x, act), act(x))
    factor = 3.0
    with pytest.raises(ValueError, match=r"expected args\[1\] \(act\) to be <function .*act"):
        graphed(x, act)
    factor = 2.0
    assert_bitwise_equal(graphed(x, act), act(x))


WEIGHT = torch.ones(4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.ReLU(), "ReLU: let the callable hold the module"),
        (lambda: nn.ReLU().forward, "method: let the callable hold it"),
        (lambda: lambda x, held=WEIGHT: x * held, "function: let the callable hold it"),
        (lambda: scaled_by(torch.ones(4)), "function: let the callable hold it"),
        (lambda: [].append, "builtin_function_or_method: let the callable hold it"),
        (lambda: np.ones(3), "ndarray: give a tensor"),
        (lambda: torch.Generator(), "Generator: only the default generator"),
        (lambda: frozenset({nn.ReLU()}), "frozenset"),
        (lambda: bytearray(b"a"), "bytearray"),
    ],
)
def test_what_may_change_without_a_word_is_refused_with_advice(device, make, words):
    with pytest.raises(TypeError, match=rf"sample args\[1\]: .*got {words}"):
        make_graphed_callables(lambda x, how: x * 2, (batch(device), make()))


class Describing(nn.Module):
    """Returns constants beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.level, self.factor = Level.HIGH, np.float64(0.5)

    def forward(self, x: Tensor) -> dict[str, Any]:  # [3, 4]
        y = x * self.weight
        constants = (y.shape, self.level, self.factor, frozenset({1}), range(2), F.relu, dict, {3})
        return {"y": y, "constants": constants, "of": type(self), "none": None}


def test_constants_in_a_result_are_returned(device):
    model = Describing().to(device)
    graphed = make_graphed_callables(model, (batch(device),))
    x = batch(device)
    with torch.no_grad():
        expected = x * model.weight
    result = graphed(x)
    backward_of(result["y"])
    assert result["constants"] == (x.shape, Level.HIGH, np.float64(0.5), frozenset({1}), range(2), F.relu, dict, {3})
    assert type(result["constants"][0]) is torch.Size and type(result["constants"][2]) is np.float64
    assert_bitwise_equal(result["y"].detach(), expected)
    result["constants"][-1].add(4)
    assert graphed(x)["constants"][-1] == {3}
