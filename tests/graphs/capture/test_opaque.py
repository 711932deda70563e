"""torch.compile and graphed callables: what replays is opaque to it, and te_graph does not load it unasked."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import eager_copy, gradients_of, run

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def batch(device: str) -> Tensor:  # [5, 6]
    return torch.randn(5, 6, device=device, requires_grad=True)


class Seen:
    """A backend for torch.compile that runs what it is given, and remembers the operations."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def __call__(self, module: torch.fx.GraphModule, example_inputs: list) -> Callable:
        self.operations += [
            getattr(node.target, "__name__", str(node.target)) for node in module.graph.nodes if node.op[:4] == "call"
        ]
        return module.forward


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_import_loads_no_compiler() -> None:
    program = """
import sys
import torch
before = set(sys.modules)
import te_graph
new = {name for name in set(sys.modules) - before if name.split(".")[0] != "te_graph"}
heavy = {name for name in new if name.split(".")[0] in ("torch", "sympy", "numpy", "triton", "networkx")}
assert not heavy, sorted(heavy)
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def step(call: Callable, x: Tensor) -> Tensor:  # [5, 6] -> []
    loss = call(x.sin()).cos().sum()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("kind", ["module", "function", "hooked module"])
def test_nothing_below_a_replay_is_traced(device: str, kind: str) -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).to(device)
    twin = eager_copy(module)
    target: Any = (lambda x: module(x)) if kind == "function" else module
    graphed = tg.make_graphed_callables(target, (batch(device),))
    if kind == "hooked module":
        module.register_forward_pre_hook(lambda *_: None)
    seen = Seen()
    compiled = torch.compile(lambda x: step(graphed, x), backend=seen)
    for _ in range(3):
        x = batch(device)
        other = x.detach().clone().requires_grad_()
        assert_bitwise_equal(compiled(x), step(twin, other))
        assert_bitwise_equal(gradients_of([x, *module.parameters()]), gradients_of([other, *twin.parameters()]))
    info = graphed.te_graph.info()
    assert info["forward_replays"] == info["backward_replays"] == 3
    assert set(seen.operations) <= {"sin", "cos", "sum", "detach", "backward"}, seen.operations


def test_eager_calls_of_what_is_graphed_are_not_traced(device: str) -> None:
    module = nn.Linear(6, 6).to(device)
    twin = eager_copy(module)
    graphed = tg.make_graphed_callables(module, (batch(device),)).eval()
    seen = Seen()
    compiled = torch.compile(lambda x: step(graphed, x), backend=seen)
    for _ in range(2):
        x = batch(device)
        assert_bitwise_equal(compiled(x), step(twin, x))
    assert graphed.te_graph.info()["eager_calls"] == {"called in eval mode, captured in training mode": 2}
    assert set(seen.operations) <= {"sin", "cos", "sum", "detach", "backward"}, seen.operations


KINDS = {  # what is graphed, and how it is called
    "module": (lambda device: nn.Linear(6, 6).to(device), lambda graphed, x: graphed(x)),
    "forward": (lambda device: nn.Linear(6, 6).to(device), lambda graphed, x: graphed.forward(x)),
    "function": (lambda device: lambda x: x.sin() * 2, lambda graphed, x: graphed(x)),
}


@pytest.mark.parametrize(("call_of", "called"), KINDS.values(), ids=KINDS)
@pytest.mark.filterwarnings("error:Dynamo")
def test_a_graph_breaks_without_a_warning(device: str, call_of: Callable, called: Callable, caplog: Any) -> None:
    graphed, seen = tg.make_graphed_callables(call_of(device), (batch(device),)), Seen()
    compiled = torch.compile(lambda x: called(graphed, x.sin()).cos(), backend=seen)
    for _ in range(3):
        x = batch(device)
        assert_bitwise_equal(run(compiled, x), run(lambda x: called(graphed, x.sin()).cos(), x))
    assert graphed.te_graph.info()["forward_replays"] == 6
    assert set(seen.operations) == {"sin", "cos"}
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("call_of", "called"), KINDS.values(), ids=KINDS)
def test_graph_that_must_not_break_is_an_error(device: str, call_of: Callable, called: Callable) -> None:
    graphed = tg.make_graphed_callables(call_of(device), (batch(device),))
    compiled = torch.compile(lambda x: called(graphed, x) + 1, backend="eager", fullgraph=True)
    words = "te_graph replays a graph there, .*: compile what is around it, without fullgraph=True"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        compiled(batch(device))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])  # inductor takes 15 s for each piece
def test_model_with_graphed_layers_is_compiled_around_them(device: str, backend: str) -> None:
    layers = [nn.Linear(6, 6).to(device) for _ in range(2)]
    twins = copy.deepcopy(layers)
    tg.make_graphed_callables(tuple(layers), ((batch(device),),) * 2)

    def whole(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:  # [5, 6]
        return second(first(x * 2) * 4) * 0.5  # powers of two: exact, however they are computed

    compiled = torch.compile(whole, backend=backend)
    for _ in range(2):
        x = batch(device)
        assert_bitwise_equal(run(lambda x: compiled(*layers, x), x), run(lambda x: whole(*twins, x), x))
    for layer, twin in zip(layers, twins, strict=True):
        assert_bitwise_equal(gradients_of(dict(layer.named_parameters())), gradients_of(dict(twin.named_parameters())))
        assert layer.te_graph.info()["forward_replays"] == layer.te_graph.info()["backward_replays"] == 2
