"""graphed(): results that were given, or are in reach, are the very objects, also those in others without tensors."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sequences import counts
from torch import Tensor

from te_graph import graphed

pytestmark = pytest.mark.usefixtures("repeatable")


class Log:
    def __init__(self) -> None:
        self.metrics = {"rate": 0.5, "seen": {0}, "sizes": [1, [2]]}
        self.table = {"a": {"b": deque([[1.0]])}, "array": [np.ones(2)]}
        self.last: Any = None


# What code says beside, so that the attributes of the object are compared as one value.
LOOKS: dict[str, Callable[[Log], Any]] = {
    "nothing": lambda log: None,
    "vars": vars,
    "__dict__": lambda log: log.__dict__,
    "deepcopy": lambda log: copy.deepcopy({"a": [1]}),
    "copy": lambda log: copy.copy([1]),
}
RESULTS: dict[str, Callable[[Log], Any]] = {
    "an attribute": lambda log: log.metrics,
    "a set": lambda log: log.metrics["seen"],
    "a list in a list": lambda log: log.metrics["sizes"][1],
    "a list in a deque": lambda log: log.table["a"]["b"][0],
    "an array": lambda log: log.table["array"][0],
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", RESULTS)
def test_an_object_in_reach(name: str, look: str, device: str) -> None:
    log, total = Log(), torch.zeros((), device=device)

    def step(x: Tensor) -> Any:  # []
        total.add_(x)
        LOOKS[look](log)
        return RESULTS[name](log), {"again": RESULTS[name](log)}

    replayed, x = graphed(step), torch.ones((), device=device)
    for _ in range(4):
        result, others = replayed(x)
        assert result is others["again"] is RESULTS[name](log)
    assert counts(replayed)[1] == 3
    log.metrics, log.table = copy.deepcopy((log.metrics, log.table))
    assert replayed(x)[0] is RESULTS[name](log)


def test_an_object_in_an_argument(device: str) -> None:
    total = torch.zeros((), device=device)

    def step(options: dict[str, Any]) -> Any:
        total.add_(options["rate"])
        return options["groups"]["a"]

    replayed = graphed(step)
    for _ in range(4):
        options = {"rate": 0.5, "groups": {"a": [1]}}
        assert replayed(options) is options["groups"]["a"]
    assert counts(replayed)[1] == 3


def test_an_object_that_each_call_makes_and_leaves(device: str) -> None:
    log, total, kept = Log(), torch.zeros((), device=device), []

    def step() -> Any:
        total.add_(1)
        log.last = {"groups": [[1.0]]}
        vars(log)
        return log.last["groups"][0]

    replayed = graphed(step)
    for _ in range(6):
        kept.append(replayed())
        assert kept[-1] is log.last["groups"][0]
    assert len(set(map(id, kept))) == 6
    assert counts(replayed)[1] == 5
