"""graphed(): an exception of the function leaves what it leaves in eager execution, also in the call that captures."""

from __future__ import annotations

import copy
import statistics
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sequences import counts
from torch import Tensor, nn

from te_graph import CaptureError, graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class Stop(Exception):
    pass


class Halt(BaseException):
    pass


class Run:
    """Fails in the second call, behind what it does to tensors and objects."""

    def __init__(self, device: str, fail: Callable[[Run], Any]) -> None:
        self.fail = fail
        self.steps, self.log, self.table = 0, [], {}
        self.total, self.noise = (torch.zeros(3, device=device) for _ in range(2))
        self.weight = nn.Parameter(torch.ones(3, device=device))

    def step(self) -> None:
        self.total.add_(1)
        self.noise.add_(torch.rand_like(self.noise))
        self.steps += 1
        if self.steps == 2:
            self.log.append(self.steps)
            self.weight.grad = torch.ones_like(self.weight)
            self.fail(self)

    def state(self) -> tuple:
        return self.steps, self.log, self.total, self.noise, self.weight.grad


def _raise(run: Run) -> None:
    raise Stop


def _halt(run: Run) -> None:
    raise Halt


FAILURES: dict[str, tuple[Callable[[Run], Any], type[BaseException]]] = {
    "its own": (_raise, Stop),
    "its own, no Exception": (_halt, Halt),
    "exit": (lambda run: sys.exit(1), SystemExit),
    "of a dictionary": (lambda run: run.table["missing"], KeyError),
    "of a number": (lambda run: 1 // len(run.table), ZeroDivisionError),
    "of Python's library": (lambda run: statistics.mean([]), statistics.StatisticsError),
    "of torch's code": (lambda run: nn.init.calculate_gain("nothing"), ValueError),
    "of autograd": (lambda run: torch.autograd.grad(run.weight.detach().sum(), run.weight), RuntimeError),
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_a_call_did_before_it_raised_stays(name: str, device: str, caplog: pytest.LogCaptureFixture) -> None:
    fail, kind = FAILURES[name]
    states = []
    for wrap in (lambda function: function, graphed):
        torch.manual_seed(0)
        run = Run(device, fail)
        step = wrap(run.step)
        step()
        with pytest.raises(kind) as caught:
            step()
        assert caught.value.__context__ is None
        states.append((*run.state(), torch.rand(3)))
    assert_bitwise_equal(states[1], states[0])
    assert counts(step) == (0, 0, 0, 2)
    assert f"raised {kind.__name__} where it was to be captured" in str(step.info()["eager_calls"])
    assert "Run.step: raised" in caplog.text


def test_a_refused_call_still_leaves_no_trace(device: str) -> None:
    run = Run(device, lambda run: run.total.sum().item())
    step = graphed(run.step)
    step()
    before = [value.clone() if isinstance(value, Tensor) else copy.copy(value) for value in run.state()]
    with pytest.raises(CaptureError, match="_local_scalar_dense"):
        step()
    assert_bitwise_equal(list(run.state()), before)
