"""A graphed callable as its user holds it: it stays a module, can be copied, saved, inspected, reset and disabled."""

from __future__ import annotations

import copy
import io
import os
import pickle

import pytest
import torch
from torch import Tensor, nn
from twins import run

import te_graph as tg
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def data(device: str) -> Tensor:
    return torch.randn(5, 6, device=device, requires_grad=True)


def graphed_linear(device: str) -> nn.Linear:
    return tg.make_graphed_callables(nn.Linear(6, 6).to(device), (data(device),))


def test_module_stays_a_module(device: str) -> None:
    plain = nn.Linear(6, 6).to(device)
    names, state = [n for n, _ in plain.named_parameters()], copy.deepcopy(plain.state_dict())
    graphed = tg.make_graphed_callables(plain, (data(device),))
    assert graphed is plain
    assert isinstance(graphed, nn.Linear)
    assert type(graphed).__name__ == "Linear"
    assert repr(graphed) == repr(nn.Linear(6, 6))
    assert [n for n, _ in graphed.named_parameters()] == names
    assert_bitwise_equal(dict(graphed.state_dict()), dict(state))
    assert graphed.eval().train().training


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copied_and_loaded_modules_are_eager(device: str, how: str) -> None:
    graphed = graphed_linear(device)
    graphed(data(device)).sum().backward()
    if how == "deepcopy":
        other = copy.deepcopy(graphed)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(graphed))
    else:
        file = io.BytesIO()
        torch.save(graphed, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert type(other) is nn.Linear
    assert not hasattr(other, "te_graph")
    x = data(device)
    replays = graphed.te_graph.info()["forward_replays"]
    assert_bitwise_equal(run(other, x), run(graphed, x))
    assert graphed.te_graph.info()["forward_replays"] == replays + 1


def test_saved_module_does_not_need_te_graph_to_load() -> None:
    stream = pickle.dumps(graphed_linear("cpu"))
    assert b"te_graph" not in stream


def test_forward_given_as_an_attribute_is_kept_and_comes_back(device: str) -> None:
    module = nn.Linear(6, 6).to(device)
    calls = []

    def forward(x: Tensor) -> Tensor:
        calls.append(1)
        return nn.Linear.forward(module, x) * 2

    module.forward = forward
    eager_result = module(data(device).detach().fill_(1))
    graphed = tg.make_graphed_callables(module, (data(device),), ignore_attributes=("calls",))
    count = len(calls)
    assert torch.equal(graphed(data(device).detach().fill_(1).requires_grad_()), eager_result)
    assert len(calls) == count
    graphed.te_graph.reset()
    module(data(device))
    assert len(calls) == count + 1


def test_reset_gives_the_module_back_and_it_can_be_captured_again(device: str) -> None:
    graphed = graphed_linear(device)
    handle = graphed.te_graph
    handle.reset()
    handle.reset()
    assert type(graphed) is nn.Linear
    assert not hasattr(graphed, "te_graph")
    assert handle.info()["backend"] is None
    with torch.no_grad():
        graphed.weight.data = torch.randn(6, 6, device=device)
    eager = copy.deepcopy(graphed)
    tg.make_graphed_callables(graphed, (data(device),))
    x = data(device)
    assert_bitwise_equal(run(graphed, x), run(eager, x))


def test_info_tells_what_was_captured_and_what_ran(device: str) -> None:
    graphed = graphed_linear(device)
    graphed(data(device)).sum().backward()
    with torch.no_grad():
        graphed(data(device))
    graphed.eval()
    graphed(data(device))
    info = graphed.te_graph.info()
    assert info["name"] == "Linear"
    assert info["backend"] == ("cuda" if device == "cuda" else "recorder")
    assert (info["slots"], info["graphs"]) == (1, 2)
    assert info["nodes"] >= 3
    assert info["bytes"] > 0
    assert info["capture_seconds"] > 0
    assert (info["forward_replays"], info["backward_replays"], info["in_flight"]) == (1, 1, 0)
    assert info["eager_calls"] == {
        "called under no_grad, captured with gradients": 1,
        "called in eval mode, captured in training mode": 1,
    }


def test_function_is_wrapped_and_keeps_its_name(device: str) -> None:
    def scaled_sum(x: Tensor) -> Tensor:
        """Doc."""
        return (x * 3).sum()

    graphed = tg.make_graphed_callables(scaled_sum, (data(device),))
    assert (graphed.__name__, graphed.__doc__) == ("scaled_sum", "Doc.")
    x = data(device)
    assert_bitwise_equal(run(graphed, x), run(scaled_sum, x))
    assert graphed.te_graph.info()["forward_replays"] == 1
    graphed.te_graph.reset()
    assert_bitwise_equal(run(graphed, x), run(scaled_sum, x))


def test_hooks_on_the_graphed_module_itself_run_at_every_call(device: str) -> None:
    graphed = graphed_linear(device)
    seen = []
    graphed.register_forward_pre_hook(lambda module, args: seen.append("pre"))
    graphed.register_forward_hook(lambda module, args, output: seen.append("post"))
    graphed.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append("backward"))
    for _ in range(2):
        graphed(data(device)).sum().backward()
    assert seen == ["pre", "post", "backward"] * 2


def test_environment_variable_runs_everything_eagerly_through_the_same_api(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "TE_GRAPH_DISABLE", "1")
    module = nn.Linear(6, 6).to(device)
    eager = copy.deepcopy(module)
    graphed = tg.make_graphed_callables(module, (data(device),))
    x = data(device)
    assert_bitwise_equal(run(graphed, x), run(eager, x))
    info = graphed.te_graph.info()
    assert info["backend"] is None
    assert info["eager_calls"] == {"TE_GRAPH_DISABLE=1": 1}
    graphed.te_graph.reset()


def test_capture_without_gradients_replays_without_gradients(device: str) -> None:
    module = nn.Linear(6, 6).to(device).eval()
    eager = copy.deepcopy(module)
    with torch.no_grad():
        graphed = tg.make_graphed_callables(module, (data(device).detach(),))
        for _ in range(3):
            x = data(device).detach()
            assert_bitwise_equal(graphed(x), eager(x))
    info = graphed.te_graph.info()
    assert (info["graphs"], info["forward_replays"]) == (1, 3)
    graphed(data(device)).sum().backward()
    assert graphed.te_graph.info()["eager_calls"] == {"called with gradients, captured under no_grad": 1}


def test_capture_repeated_many_times_does_not_grow(device: str) -> None:
    module = nn.Linear(6, 6).to(device)

    def cycle() -> None:
        tg.make_graphed_callables(module, (data(device),))
        module(data(device)).sum().backward()
        module.te_graph.reset()
        module.zero_grad()

    for _ in range(3):
        cycle()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved() if device == "cuda" else 0
    for _ in range(10):
        cycle()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    assert (torch.cuda.memory_reserved() if device == "cuda" else 0) <= before


def test_nothing_reads_memory_that_is_dead_after_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder fills such memory with NaN, as a CUDA graph would have given it to others."""
    monkeypatch.setitem(os.environ, "TE_GRAPH_POISON", "1")
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model.linear1.weight.register_hook(lambda grad: grad * 2)
    twin = copy.deepcopy(model)
    twin.linear1.weight.register_hook(lambda grad: grad * 2)
    x = torch.randn(2, 3, 8, requires_grad=True)
    tg.make_graphed_callables(model, (x,))
    for seed in range(3):
        results = []
        for module in (model, twin):
            torch.manual_seed(seed)
            results.append([run(module, x), [p.grad.clone() for p in module.parameters()]])
        assert_bitwise_equal(*results)


@pytest.mark.parametrize("kind", ["module", "function"])
def test_compiled_code_around_a_graphed_callable_replays_it(device: str, kind: str) -> None:
    inner = nn.Linear(6, 6).to(device)
    twin = nn.Sequential(copy.deepcopy(inner), nn.Tanh())
    graphed = tg.make_graphed_callables(inner if kind == "module" else lambda x: inner(x), (data(device),))

    def whole(x: Tensor) -> Tensor:  # [5, 6]
        return torch.tanh(graphed(x))

    compiled = torch.compile(whole, backend="eager")
    for _ in range(3):
        x = data(device)
        assert_bitwise_equal(run(compiled, x), run(twin, x))
    assert_bitwise_equal(inner.weight.grad, twin[0].weight.grad)
    info = graphed.te_graph.info()
    assert info["forward_replays"] == info["backward_replays"] == 3
