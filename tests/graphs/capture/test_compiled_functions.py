"""Functions that torch.compile made, called inside a callable: on a GPU their kernels are in the graph, bit for bit as
eager calls run them; a capture changes nothing in how they run outside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from twins import eager_copy, train

import te_graph as tg
from te_graph.common.as_written import as_written
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def gelu(x: Tensor) -> Tensor:  # [...] -> [...]
    return 0.5 * x * (1 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def gelu_backward(grad: Tensor, x: Tensor) -> Tensor:  # [...], [...] -> [...]
    t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    return grad * (0.5 * x * (1 - t * t) * (0.79788456 + 0.1070322243 * x * x) + 0.5 * (1 + t))


class OwnGelu(torch.autograd.Function):
    """Compiled both ways, as libraries of fused layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable, backward: Callable) -> Tensor:
        ctx.save_for_backward(x)
        ctx.backward_of = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return ctx.backward_of(grad, *ctx.saved_tensors), None, None


class Layer(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 48, dtype=dtype), nn.Linear(48, 16, dtype=dtype)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:  # [rows, 16] -> [rows, 16]
        return self.second(self.act(self.first(x)))


class Backend:
    """Of torch.compile: counts the calls of what it compiled."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, module: torch.fx.GraphModule, example_inputs: list) -> Callable:
        def run(*args: Any) -> Any:
            self.calls += 1
            return module.forward(*args)

        return run


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def batch(device: str, dtype: torch.dtype = torch.float32) -> Tensor:  # [5, 16]
    return torch.randn(5, 16, device=device, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("is_called_before", [True, False])
def test_a_capture_leaves_them_compiled(is_called_before: bool, device: str) -> None:
    backend = Backend()
    layer = Layer(torch.compile(gelu, backend=backend)).to(device)
    twin = eager_copy(layer)
    if is_called_before:
        twin(batch(device))
    tg.make_graphed_callables(layer, (batch(device),))
    before = backend.calls
    for _ in range(3):
        twin(batch(device))
    assert backend.calls == before + 3
    steps = [[(batch(device),) for _ in range(2)] for _ in range(2)]
    assert_bitwise_equal(train(layer, steps), train(twin, steps))
    assert layer.te_graph.info()["forward_replays"] == 4


def test_a_stance_that_another_thread_chooses_meanwhile_stays() -> None:
    def choose() -> None:
        torch.compiler.set_stance("eager_on_recompile")

    try:
        with as_written:
            thread = threading.Thread(target=choose)
            thread.start()
            thread.join()
        assert eval_frame._stance.stance == "eager_on_recompile"
    finally:
        torch.compiler.set_stance("default")


def test_marks_that_the_compiler_leaves_on_tensors_change_nothing(device: str) -> None:
    layer = Layer(torch.relu).to(device)
    twin = eager_copy(layer)
    tg.make_graphed_callables(layer, (batch(device),))
    function = tg.graphed(lambda x: x * vars(layer.first.weight).get("scale", 2.0))
    x = torch.randn(5, device=device)
    for _ in range(3):
        function(x)
    torch._dynamo.mark_static(layer.first.weight)
    assert any(name.startswith("_dynamo_") for name in vars(layer.first.weight))
    function(x)
    assert function.info()["forward_replays"] == 3
    steps = [[(batch(device),)]]
    assert_bitwise_equal(train(layer, steps), train(twin, steps))
    assert layer.te_graph.info()["forward_replays"] == 1


def test_a_graphed_function_leaves_them_compiled(device: str) -> None:
    backend = Backend()
    compiled = torch.compile(gelu, backend=backend)
    function = tg.graphed(lambda x: compiled(x) + 1)
    x = torch.randn(5, device=device)
    for _ in range(3):
        assert_bitwise_equal(function(x).clone(), gelu(x) + 1)
    assert function.info()["forward_replays"] > 0
    before = backend.calls
    compiled(x)
    assert backend.calls == before + 1


@pytest.mark.gpu
@pytest.mark.parametrize("is_called_before", [True, False])
@pytest.mark.parametrize("is_own", [False, True], ids=["by autograd", "by a Function"])
def test_their_kernels_are_in_the_graph(is_own: bool, is_called_before: bool) -> None:
    compiled, compiled_backward = torch.compile(gelu), torch.compile(gelu_backward)

    def act(x: Tensor) -> Tensor:
        return OwnGelu.apply(x, compiled, compiled_backward) if is_own else compiled(x)

    layer = Layer(act, torch.bfloat16).to("cuda")
    twin = eager_copy(layer)
    as_written = eager_copy(layer)
    as_written.act = gelu
    steps = [[(batch("cuda", torch.bfloat16),) for _ in range(2)] for _ in range(3)]
    if is_called_before:
        train(eager_copy(layer), steps[:1])
    tg.make_graphed_callables(layer, (batch("cuda", torch.bfloat16),))
    results = train(layer, steps)
    assert_bitwise_equal(results, train(twin, steps))
    with pytest.raises(AssertionError, match="differs"):  # fused, it rounds once
        assert_bitwise_equal(results, train(as_written, steps))
    info = layer.te_graph.info()
    assert info["forward_replays"] == info["backward_replays"] == 6 and not info["eager_calls"]
