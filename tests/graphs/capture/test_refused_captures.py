"""on_mismatch="capture" where a capture is refused or raises: such calls run eagerly, and leave what eager ones leave.

The reference is eager execution of a copy of the same module on the same inputs, from the same generator state.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import torch
from mismatches import batch, compare, counts, graphed_pair, messages
from torch import Tensor, nn
from twins import backward_of, eager_copy, gradients_of, leaf_copy, run, snapshot

from te_graph import make_graphed_callables
from te_graph.graphs.callables import handle as handle_module
from te_graph.graphs.capture.session import capture_all
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


class ReadsInBackward(torch.autograd.Function):
    """Identity whose backward reads a value on the host."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # [...] -> [...]
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # [...] -> [...]
        return grad * (2 if grad.abs().sum().item() >= 0 else 3)


class Fragile(nn.Module):
    """What ``how`` tells it to do after layers with state cannot be captured, but for "fine"."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)), None
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, how: Any) -> Tensor:  # [n, 6] -> [n, 6]
        self.steps += 1
        x = self.body(x)
        if how == "item":
            return x * (2 if x.detach().abs().sum().item() >= 0 else 3)
        if how == "item in backward":
            return ReadsInBackward.apply(x)
        if how == "left behind":
            self.last = x.detach() * 2
        return x * 2


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("item", "capturing again failed"),
        ("item in backward", "capturing again failed"),
        ("left behind", r"capturing again failed: the callable leaves a tensor .* last"),
        ({object()}, r"capturing again failed: sample args\[1\]: expected tensors, .* got set"),
    ],
    ids=["item", "item in backward", "left behind", "a set of objects"],
)
def test_a_capture_that_fails_runs_eagerly_says_why_and_leaves_no_trace(device, how, words, caplog):
    model = Fragile().to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device), "fine"), on_mismatch="capture", max_in_flight=2)
    compare(model, twin, lambda net: run(net, batch(device), "fine"))
    model.body[0].bias.grad = twin.body[0].bias.grad = None

    def step(net: nn.Module) -> list:
        leaves = [batch(device) for _ in range(3)]
        outputs = [net(x, way) for x, way in zip(leaves, ("fine", how, "fine"), strict=True)]
        for output in outputs:
            backward_of(output)
        return [gradients_of(leaves), outputs[1].detach(), leaf_copy(net.last), net.steps.clone()]

    for _ in range(2):
        compare(model, twin, step)
    info = model.te_graph.info()
    assert (info["signatures"], info["graphs"], info["forward_replays"], info["in_flight"]) == (1, 4, 5, 0)
    assert list(info["eager_calls"].values()) == [2]
    (told,) = messages(caplog, logging.WARNING)
    assert pytest.raises(RuntimeError, match=words).matches(RuntimeError(told))


@pytest.fixture
def attempts(monkeypatch) -> list:
    """Grows with each capture that is tried."""
    made: list = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return capture_all(*args, **kwargs)

    monkeypatch.setattr(handle_module, "capture_all", counted)
    return made


def run_kinds(model: Fragile, twin: Fragile, kinds: list[tuple[int, Any]], device: str) -> None:
    """Calls with so many rows, and ``how``."""
    for rows, how in kinds:
        compare(model, twin, lambda net, rows=rows, how=how: run(net, batch(device, rows), how))


def test_refused_captures_leave_max_captures_to_those_that_succeed(device, attempts):
    model = Fragile().to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device), "fine"), on_mismatch="capture", max_captures=2)
    run_kinds(model, twin, [(3, "item")] * 6 + [(3, "left behind")] * 3 + [(2, "fine")] * 2, device)
    assert len(attempts) == 3  # each form once, though it came often
    run_kinds(model, twin, [(3, "item"), (3, "fine"), (3, "fine"), (5, "fine")], device)
    info = model.te_graph.info()
    assert (info["signatures"], info["recaptures"], info["forward_replays"]) == (3, 2, 4)
    assert [reason.endswith("max_captures=2 are made") for reason in info["eager_calls"]][-1]


def test_a_callable_whose_captures_are_always_refused_is_not_captured_for_ever(device, attempts, caplog):
    model = Fragile().to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device), "fine"), on_mismatch="capture")
    run_kinds(model, twin, [(rows, "item") for rows in range(2, 24) for _ in range(2)], device)
    assert len(attempts) == 8
    (told,) = (one for one in messages(caplog, logging.WARNING) if "capturing again failed" not in one)
    assert told == "Fragile: 8 captures in a row were refused, so that no call is captured any more (runs eagerly)"
    run_kinds(model, twin, [(4, "fine")], device)
    assert model.te_graph.info()["forward_replays"] == 1


def test_arguments_that_cannot_be_captured_are_no_refused_capture(device, attempts):
    model = Fragile().to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device), "fine"), on_mismatch="capture", max_captures=1)
    run_kinds(model, twin, [(4, {object()}) for _ in range(12)] + [(2, "fine")], device)
    assert len(attempts) == 1
    assert model.te_graph.info()["forward_replays"] == 1


def test_calls_that_no_capture_serves_leave_max_captures_to_others(device, attempts):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.randn(6))
            self.register_buffer("total", torch.zeros(4, 6))

        def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 6]
            self.total.add_(1)
            return x * self.total[: len(x)] * self.factor

    model = Counting().to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (torch.randn(4, 6, device=device),), on_mismatch="capture", max_captures=1)
    for _ in range(4):
        compare(model, twin, lambda net: net(net.total).clone())  # reads what the replay writes
    assert (len(attempts), counts(model)) == (1, (1, 0, 4))
    for rows in (3, 3):
        x = torch.randn(rows, 6, device=device)
        compare(model, twin, lambda net, x=x: net(x).clone())
    assert counts(model) == (2, 1, 4)


def test_an_exception_that_eager_execution_raises_too_reaches_the_caller(device):
    def picky(x: Tensor, how: str) -> Tensor:  # [n, 6] -> [n, 6]
        return x * {"double": 2}[how]

    graphed = make_graphed_callables(picky, (batch(device), "double"), on_mismatch="capture")
    x = batch(device)
    before = snapshot()
    for error, arguments in ((KeyError, (x, "triple")), (TypeError, (x,))):
        with pytest.raises(error):
            graphed(*arguments)
    assert_bitwise_equal(snapshot(), before)
    assert_bitwise_equal(run(graphed, x, "double"), run(picky, x, "double"))
    assert graphed.te_graph.info()["signatures"] == 1


@pytest.mark.parametrize("error", [KeyError, ValueError, StopIteration, AssertionError])
def test_a_call_that_raises_in_its_capture_does_what_an_eager_one_does_before_it_raises(device, error):
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), device=device))

        def forward(self, x: Tensor) -> Tensor:  # [n, 6] -> [n, 6]
            noise = torch.rand_like(self.calls.add_(1))
            if len(x) > 4:
                raise error("too many rows")
            return x * noise

    twin = eager_copy(model := Picky())
    make_graphed_callables(model, (batch(device),), on_mismatch="capture")
    for rows in (4, 5, 3, 6, 4):
        x, found = batch(device, rows), []
        for net in (model, twin):
            torch.manual_seed(rows)
            with pytest.raises(error, match="too many rows") if rows > 4 else contextlib.nullcontext():
                net(x)
            found.append([net.calls.clone(), torch.rand(2, device=device)])
        assert_bitwise_equal(*found)


def test_a_hook_that_would_be_refused_at_capture_runs_eagerly_until_it_is_removed(device, caplog):
    model, twin = graphed_pair(device)
    hooks = [net[3].register_forward_hook(lambda module, args, output: output * 3) for net in (model, twin)]
    for _ in range(2):
        compare(model, twin, lambda net: run(net, batch(device)))
    (told,) = messages(caplog, logging.WARNING)
    assert "forward hooks of 3 changed" in told and 'hooks="captured"' in told
    for hook in hooks:
        hook.remove()
    compare(model, twin, lambda net: run(net, batch(device)))
    info = model.te_graph.info()
    assert (info["signatures"], info["forward_replays"], list(info["eager_calls"].values())) == (1, 1, [2])
