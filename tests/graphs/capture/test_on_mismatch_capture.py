"""on_mismatch="capture" in the middle of training: several signatures, stale captures, captures that fail.

The reference is eager execution of a copy of the same module on the same inputs, from the same generator state.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from twins import backward_of, eager_copy, gradients_of, leaf_copy, run, snapshot, train

from te_graph import make_graphed_callables
from te_graph.graphs.callables import handle as handle_module
from te_graph.graphs.capture.session import capture_all
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def batch(device: str, rows: int = 4) -> Tensor:  # [rows, 6]
    return torch.randn(rows, 6, device=device, requires_grad=True)


def stateful(device: str) -> nn.Sequential:
    """Dropout draws random numbers, batch norm updates buffers."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 6)).to(device)


def graphed_pair(device: str, **options: Any) -> tuple[nn.Sequential, nn.Sequential]:
    """A module captured for [4, 6] with ``on_mismatch="capture"``, and its eager twin."""
    model = stateful(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),), on_mismatch="capture", **options)
    return model, twin


def compare(model: nn.Module, twin: nn.Module, step: Callable[[nn.Module], Any]) -> None:
    """Let both do ``step`` from one generator state, and compare everything that it leaves."""
    device = next(twin.parameters()).device
    seed, seen = int(torch.randint(2**31, ())), []
    for net in (model, twin):
        torch.manual_seed(seed)
        state = [step(net), gradients_of(list(net.parameters())), leaf_copy(dict(net.named_buffers()))]
        seen.append([*state, torch.rand(3, device=device)])
    assert_bitwise_equal(*seen)


def counts(model: Any) -> tuple[int, int, int]:
    """Signatures, recaptures, eager calls."""
    info = model.te_graph.info()
    return info["signatures"], info["recaptures"], sum(info["eager_calls"].values())


def messages(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "te_graph" and r.levelno == level]


# Several signatures.


@pytest.mark.parametrize("set_to_none", [True, False])
def test_micro_batches_of_alternating_shapes_train_as_in_eager_execution(device, set_to_none, seed):
    model, twin = graphed_pair(device)
    rows_of_steps = [(4, 2), (2, 4), (4, 4, 2), (3, 2, 4), (2, 2), (4, 3)]
    steps = [[(batch(device, rows),) for rows in step] for step in rows_of_steps]
    torch.manual_seed(seed)
    seen = train(model, steps, set_to_none)
    torch.manual_seed(seed)
    assert_bitwise_equal(seen, train(twin, steps, set_to_none))
    assert counts(model) == (3, 2, 0)
    assert model.te_graph.info()["backward_replays"] == 14


@pytest.mark.parametrize("rows", [(4, 2), (2, 4)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("is_captured_in_flight", [True, False])
def test_a_forward_waits_for_its_backward_while_the_other_signature_runs(device, rows, order, is_captured_in_flight):
    model, twin = graphed_pair(device)
    if not is_captured_in_flight:
        compare(model, twin, lambda net: run(net, batch(device, 2)))

    def step(net: nn.Module) -> list:
        leaves = [batch(device, count) for count in rows]
        outputs = [net(x) for x in leaves]
        for index in order:
            backward_of(outputs[index])
        return [gradients_of(leaves), [output.detach() for output in outputs]]

    for _ in range(3):
        compare(model, twin, step)
    assert counts(model) == (2, 1, 0)


def test_the_signatures_have_slots_of_their_own(device):
    model, _ = graphed_pair(device, max_in_flight=2)
    waiting = [model(batch(device, rows)) for rows in (4, 2, 4, 2)]
    assert model.te_graph.info()["in_flight"] == 4
    for rows in (4, 2):
        with pytest.raises(RuntimeError, match=r"2 earlier .*max_in_flight=3"):
            model(batch(device, rows))
    waiting.clear()
    assert model.te_graph.info()["in_flight"] == 0
    assert counts(model) == (2, 1, 0)


def test_results_of_one_signature_may_be_kept_and_fed_to_the_other(device):
    model, twin = graphed_pair(device)

    def step(net: nn.Module) -> list:
        first = net(batch(device))
        second = net(first[:2])
        logged = [first.detach(), second.detach(), first[2:].detach()]
        backward_of(second)
        logged.append(net(batch(device)).detach())
        return [*logged, net(batch(device, 2)).detach()]

    for _ in range(3):
        model.zero_grad()
        twin.zero_grad()
        compare(model, twin, step)
    assert counts(model) == (2, 1, 0)


def test_constants_of_a_function_select_its_graphs(device):
    weight = torch.randn(6, 6, device=device, requires_grad=True)
    other = weight.detach().clone().requires_grad_()

    def function_of(weight: Tensor) -> Callable:
        def function(x: Tensor, how: str, *, power: int = 1) -> Tensor:  # [n, 6] -> [n, 6]
            x = x @ weight
            return (x.tanh() if how == "tanh" else x.sin()) ** power

        return function

    graphed = make_graphed_callables(function_of(weight), (batch(device), "tanh"), on_mismatch="capture")
    eager = function_of(other)
    calls = [("tanh", {}), ("sin", {}), ("sin", {"power": 2}), ("tanh", {"power": 2}), ("tanh", {}), ("sin", {})]
    for how, kwargs in calls:
        x = batch(device)
        assert_bitwise_equal(run(graphed, x, how, **kwargs), run(eager, x, how, **kwargs))
        assert_bitwise_equal(weight.grad, other.grad)
    assert counts(graphed) == (4, 3, 0)
    graphed.te_graph.reset()
    assert graphed.te_graph.info()["graphs"] == 0


# Captures that are stale.


def test_a_capture_in_the_middle_of_a_step_leaves_what_eager_execution_leaves(device):
    """Micro-batches in flight, gradients of an earlier one there, some None, random numbers, buffers."""
    model, twin = graphed_pair(device, max_in_flight=3)

    def step(net: nn.Module) -> list:
        leaves = [batch(device, rows) for rows in (4, 4, 2, 4, 3)]
        backward_of(net(leaves[0]))
        net[4].bias.grad = None
        kept = net[0].weight.grad
        outputs = [net(x) for x in leaves[1:]]
        for index in (2, 1, 0, 3):
            backward_of(outputs[index])
        assert net[0].weight.grad is kept
        return [gradients_of(leaves), [output.detach() for output in outputs]]

    for _ in range(2):
        compare(model, twin, step)
    assert counts(model) == (3, 2, 0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_backward_that_is_due_runs_on_the_capture_that_was_replaced_and_frees_it(device, order):
    model, twin = graphed_pair(device)
    handle = model.te_graph
    compare(model, twin, lambda net: run(net, batch(device)))
    replaced, old = weakref.ref(handle._entry), StorageWeakRef(model[0].weight.untyped_storage())

    def step(net: nn.Module) -> list:
        leaves = [batch(device), batch(device)]
        first, outputs = net[0].weight, [net(leaves[0])]
        net[0].weight = nn.Parameter(first.detach() * 2)
        outputs.append(net(leaves[1]))
        for index in order:
            backward_of(outputs[index])
        return [first.grad.clone(), gradients_of(leaves), [output.detach() for output in outputs]]

    compare(model, twin, step)
    assert replaced() is None
    assert old.expired()
    assert counts(model) == (1, 1, 0)
    info = handle.info()
    assert (info["graphs"], info["forward_replays"], info["in_flight"]) == (2, 3, 0)


def test_each_stale_signature_is_replaced_when_it_is_called_and_nothing_of_it_stays(device):
    model, twin = graphed_pair(device, max_captures=100)
    compare(model, twin, lambda net: run(net, batch(device, 2)))
    graphs = model.te_graph.info()["graphs"]
    for number in range(3):
        entries = [weakref.ref(entry.graphed) for entry in model.te_graph._entries]
        old = StorageWeakRef(model[0].weight.untyped_storage())
        for net in (model, twin):
            net[0].weight.data = net[0].weight.data.clone()
        for rows in (2, 4, 4, 2):
            compare(model, twin, lambda net, rows=rows: run(net, batch(device, rows)))
        assert [entry() for entry in entries] == [None, None]
        assert old.expired()
        assert counts(model) == (2, 1 + 2 * (number + 1), 0)
        assert model.te_graph.info()["graphs"] == graphs
    assert model.te_graph.info()["forward_replays"] == 13


def test_reset_frees_all_signatures(device):
    model, twin = graphed_pair(device)
    for rows in (2, 3):
        compare(model, twin, lambda net, rows=rows: run(net, batch(device, rows)))
    entries = [weakref.ref(entry.graphed) for entry in model.te_graph._entries]
    assert len(entries) == 3
    handle = model.te_graph
    handle.reset()
    assert [entry() for entry in entries] == [None] * 3
    info = handle.info()
    assert (info["signatures"], info["graphs"], info["bytes"], info["forward_replays"]) == (0, 0, 0, 2)
    compare(model, twin, lambda net: run(net, batch(device, 2)))


# The bound.


def test_more_captures_than_max_captures_run_eagerly_with_this_reason(device, caplog):
    model, twin = graphed_pair(device, max_captures=2)
    for rows in (2, 3, 5, 5, 7, 4, 3, 2):
        compare(model, twin, lambda net, rows=rows: run(net, batch(device, rows)))
    info = model.te_graph.info()
    assert (info["signatures"], info["recaptures"], info["forward_replays"]) == (3, 2, 5)
    assert sum(info["eager_calls"].values()) == 3
    for reason, rows in zip(info["eager_calls"], (5, 7), strict=True):
        assert reason.startswith("expected args[0] of shape [") and f"got [{rows}, 6]; max_captures=2" in reason
    assert len(messages(caplog, logging.WARNING)) == 2
    # A stale one cannot be replaced any more.
    for net in (model, twin):
        net[4].bias.data = net[4].bias.data.clone()
    compare(model, twin, lambda net: run(net, batch(device)))
    assert "bias of 4 moved" in messages(caplog, logging.WARNING)[-1]
    assert counts(model) == (3, 2, 4)


# Captures that fail.


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
        ("left behind", r"capturing again failed: Fragile: the callable leaves a tensor .* last"),
        ({object()}, r"capturing again failed: Fragile: sample args\[1\]: expected tensors, .* got set"),
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


def test_autocast_is_another_capture(device):
    model = nn.Linear(6, 6).to(device)
    twin = eager_copy(model)
    make_graphed_callables(model, (batch(device),), on_mismatch="capture")

    def step(net: nn.Module, caches: bool) -> list:
        x = batch(device)
        with torch.autocast(device, torch.bfloat16, cache_enabled=caches):
            output = net(x)
        backward_of(output)
        return [output.detach(), x.grad]

    for caches in (True, True, False, False):
        compare(model, twin, lambda net, caches=caches: step(net, caches))
    assert counts(model)[2] == 0
    assert model.te_graph.info()["forward_replays"] == 4


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [("cuda", "cpu"), ("cpu", "cpu")])
def test_a_tensor_on_another_device_than_the_graphs_runs_eagerly(devices):
    """A CUDA graph would hold the value that a tensor on the host had at capture."""

    def scaled(x: Tensor, factor: Tensor | float) -> Tensor:  # [n, 6], [] -> [n, 6]
        return x * factor

    graphed = make_graphed_callables(scaled, (batch("cuda"), 2.0), on_mismatch="capture")
    for value in (3.0, 5.0):
        x, factor = batch(devices[0]), torch.tensor(value, device=devices[1])
        assert_bitwise_equal(run(graphed, x, factor), run(scaled, x, factor))
    assert counts(graphed) == (1, 0, 2)


# Weights that callables share.


class Gated(nn.Module):
    """Uses ``gate`` only when it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, is_gated: bool = True) -> Tensor:  # [n, 6] -> [n, 6]
        x = self.linear(x)
        return x * self.gate(x).sigmoid() if is_gated else x


def gated_steps(device: str, nets: nn.ModuleList, calls: list[tuple[int, bool]]) -> list:
    """Both layers one after the other, in bfloat16, where the order of additions shows."""
    seen = []
    for rows, is_gated in calls:
        leaf = torch.randn(rows, 6, device=device).bfloat16().requires_grad_()
        output = nets[1](nets[0](leaf, True).relu(), is_gated)
        output.float().square().sum().backward()
        seen.append([output.detach(), leaf.grad, gradients_of(list(nets.parameters()))])
    return seen


@pytest.mark.parametrize("is_shared_at_first", [True, False])
def test_weights_shared_between_callables_are_summed_first_for_a_signature_captured_later(device, is_shared_at_first):
    layers = nn.ModuleList([Gated(), Gated()]).to(device, torch.bfloat16)
    layers[1].gate = layers[0].gate
    twins = copy.deepcopy(layers)
    x = torch.randn(4, 6, device=device).bfloat16().requires_grad_()
    samples = (x, True), (x, is_shared_at_first)
    make_graphed_callables(tuple(layers), samples, on_mismatch="capture")
    for nets in (layers, twins):
        run(nets[1], x[:2], True)  # captured while no forward of the other is in flight
        run(nets[1], x, True)
    calls = [(4, is_shared_at_first), (2, True), (4, True), (2, is_shared_at_first), (2, True)]
    compare(layers, twins, lambda nets: gated_steps(device, nets, calls))
    infos = [layer.te_graph.info() for layer in layers]
    assert [info["eager_calls"] for info in infos] == [{}, {}]
    assert [info["signatures"] for info in infos] == [2, 2 if is_shared_at_first else 4]
