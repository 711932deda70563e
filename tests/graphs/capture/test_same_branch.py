"""Code that asks for its circumstances takes the same branch under capture as in eager execution."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, has_torch_function
from twins import eager_copy

import te_graph as tg
from te_graph.graphs.tracing.host_access import HostAccessWatch
from te_graph.graphs.tracing.refusals import Refusals
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def tokens(device: str) -> Tensor:  # [2, 3, 8]
    return torch.randn(2, 3, 8, device=device)


def encoder_layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("is_one", [True, False])
def test_attention_takes_its_fast_path(device: str, count: int, is_one: bool) -> None:
    model = {
        1: encoder_layer,
        2: lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        3: lambda: nn.MultiheadAttention(8, 2, batch_first=True),
    }[count]()
    model = model.to(device).eval()
    twin = eager_copy(model)
    with torch.no_grad():
        args = (tokens(device),) * count if is_one else tuple(tokens(device) for _ in range(count))
        tg.make_graphed_callables(model, args)
        for _ in range(2):
            args = (tokens(device),) * count if is_one else tuple(tokens(device) for _ in range(count))
            assert_bitwise_equal(model(*args), twin(*args))
    assert model.te_graph.info()["forward_replays"] == 2


def test_stacked_encoder_takes_its_fast_path(device: str) -> None:
    model = nn.TransformerEncoder(encoder_layer(), 2).to(device).eval()
    twin = eager_copy(model)
    with torch.no_grad():
        tg.make_graphed_callables(model, (tokens(device),))
        x = tokens(device)
        assert torch.equal(model(x), twin(x))
    assert model.te_graph.info()["forward_replays"] == 1


def test_graphed_function_takes_the_fast_path_before_and_after_its_capture() -> None:
    model = encoder_layer().eval()

    @tg.graphed
    def call(x: Tensor) -> Tensor:  # [2, 3, 8]
        return model(x)

    x = tokens("cpu")
    with torch.no_grad():
        expected = model(x)
        assert all(torch.equal(call(x), expected) for _ in range(4))
    assert call.info()["forward_replays"] >= 2


def test_capture_looks_like_no_override_of_torch_functions(device: str) -> None:
    answers = {}

    def asks(x: Tensor) -> Tensor:  # [2, 3, 8]
        answers[len(answers)] = has_torch_function((x,))
        return x * 2

    tg.make_graphed_callables(asks, (tokens(device),), ignore_attributes=("answers",))
    assert answers
    assert not any(answers.values())


@pytest.mark.parametrize(
    ("call", "node"),
    [
        (lambda x: x.prod(), "ProdBackward0"),
        (lambda x: x.prod(0), "ProdBackward1"),
        (lambda x: x.cumprod(0), "CumprodBackward0"),
        (lambda x: torch.zeros_like(x).masked_fill(x.detach() > 0, x.sum()), "MaskedFillBackward1"),
    ],
)
def test_derivative_that_torch_computes_otherwise_under_a_mode_is_named(
    caplog: pytest.LogCaptureFixture, call: Callable, node: str
) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with caplog.at_level(logging.WARNING, "te_graph"), tg.Recorder().capture():
        torch.autograd.grad(call(x).sum(), x)
    assert [record.getMessage() for record in caplog.records] == [
        f"Recorder: {node} is computed otherwise while it is recorded: its rounding differs"
    ]


def test_mode_of_the_user_sees_a_recording_as_it_sees_eager_code() -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(3)
    with Mode(), tg.Recorder().capture():
        x.mul(2)
    assert torch.Tensor.mul in seen


def test_methods_of_tensors_are_what_they_were_after_captures() -> None:
    def methods() -> dict:
        return {name: getattr(torch.Tensor, name) for name in (*dir(torch._C.TensorBase), "__repr__", "__array__")}

    before, own = methods(), set(vars(torch.Tensor))
    with tg.Recorder().capture():
        torch.ones(3).mul(2)
        assert torch.Tensor.tolist is not before["tolist"]
    with pytest.raises(tg.CaptureError), tg.Recorder().capture():
        torch.ones(3).tolist()
    assert methods() == before
    assert set(vars(torch.Tensor)) == own


def test_other_threads_read_tensors_while_one_records() -> None:
    x, found = torch.arange(3.0), []

    def read() -> None:
        x.data = torch.arange(3.0) * 2
        found.extend([x.tolist(), x.numpy().tolist(), x.cpu() is x, x.to("cpu") is x, repr(x)])

    with tg.Recorder().capture():
        reader = threading.Thread(target=read)
        reader.start()
        reader.join()
    assert found == [[0.0, 2.0, 4.0], [0.0, 2.0, 4.0], True, True, "tensor([0., 2., 4.])"]


def test_two_threads_are_watched_at_once_and_each_is_refused_what_it_does() -> None:
    both_on, one_off, results = threading.Barrier(2), threading.Event(), []

    def first() -> None:
        with HostAccessWatch(Refusals()):
            both_on.wait(10)
        one_off.set()

    def second() -> None:
        with HostAccessWatch(Refusals()):
            both_on.wait(10)
            one_off.wait(10)
            with pytest.raises(tg.CaptureError, match=r"Tensor\.tolist cannot be captured"):
                torch.ones(3).tolist()
            results.append("refused")

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["refused"]
    assert torch.ones(2).tolist() == [1, 1]


def test_compiler_that_torch_loads_in_a_capture_finds_the_methods_of_torch() -> None:
    program = """
import sys
import torch
import te_graph
assert "torch._dynamo" not in sys.modules
graphed = te_graph.graphed(lambda x: x * 2)
x = torch.ones(3)
assert all(graphed(x).tolist() == [2, 2, 2] for _ in range(3))
compiled = torch.compile(lambda x: x.to(torch.float64).data + 1, backend="eager", fullgraph=True)
assert compiled(x).tolist() == [2, 2, 2]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
