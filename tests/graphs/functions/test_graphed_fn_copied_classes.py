"""What copy and pickle keep in a class, of which code that goes through all attributes may count them, is no change."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sequences import counts
from torch import Tensor, nn

from te_graph import graphed, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")

OPTIONS = {"rate": 0.5, "betas": [0.9, 0.99]}
SETTINGS = SimpleNamespace(rate=0.5)

LOOKS: dict[str, Callable[[], Any]] = {
    "deepcopy": lambda: copy.deepcopy(OPTIONS),
    "copy": lambda: copy.copy(OPTIONS),
    "vars": lambda: vars(SETTINGS),
    "__dict__": lambda: SETTINGS.__dict__,
}


def _result_class() -> type:
    """A class of which nobody has made a copy."""

    @dataclass
    class Result:
        loss: Tensor  # []
        rate: float

    return Result


@pytest.mark.parametrize("name", LOOKS)
def test_results_of_a_class_that_was_never_copied(name: str, device: str) -> None:
    kind, look = _result_class(), LOOKS[name]
    step = graphed(lambda x: kind(x.sum(), look()["rate"]))
    x = torch.ones(3, device=device)
    for _ in range(4):
        result = step(x)
        assert_bitwise_equal(result.loss, x.sum())
        assert result.rate == 0.5
    assert counts(step)[:3] == (1, 3, 0)
    assert "__slotnames__" not in vars(kind)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda obj: obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)])
def test_results_that_are_copied_after_the_capture(copied: Callable[[Any], Any], device: str) -> None:
    kind = _result_class()
    step = graphed(lambda x: kind(x.sum(), vars(SETTINGS)["rate"]), on_mismatch="raise")
    x = torch.ones(3, device=device)
    result = [step(x) for _ in range(3)][-1]
    copied(result)
    assert "__slotnames__" in vars(kind)
    step(x)
    assert counts(step)[:3] == (1, 3, 0)


def test_results_of_a_callable_that_are_copied_after_the_capture(device: str) -> None:
    kind = _result_class()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:  # [2, 3]
            return kind(self.linear(x).sum(), vars(SETTINGS)["rate"])

    x = torch.ones(2, 3, device=device)
    model = make_graphed_callables(Model().to(device), (x,))
    assert "__slotnames__" not in vars(kind)
    copy.copy(model(x)).loss.backward()
    model(x)
    assert model.te_graph.info()["forward_replays"] == 2


def test_attributes_that_a_class_gets_are_still_seen(device: str) -> None:
    kind = _result_class()
    step = graphed(lambda x: x * len(vars(kind)))
    x = torch.ones(3, device=device)
    for _ in range(3):
        step(x)
    before = len(vars(kind))
    kind.more = 1
    assert_bitwise_equal(step(x), x * (before + 1))
