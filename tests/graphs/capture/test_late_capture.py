"""make_graphed_callables without samples: the first call that trains captures, with its arguments, and replays."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from twins import eager_copy, mlp, run, sample, train

from te_graph import CaptureError, make_graphed_callables
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")


class Counted(nn.Module):
    """Has effects: a buffer, dropout, a batch norm. [n, 7] -> [n, 7]"""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:  # [n, 7], bool [n, 1]
        self.calls += 1
        y = self.drop(self.norm(self.linear(x))) * scale
        return y if mask is None else y.masked_fill(mask, 0.0)


def info(module: Any) -> dict[str, Any]:
    return module.te_graph.info()


def test_the_first_call_that_trains_captures_and_each_call_has_its_effects_once(device: str) -> None:
    model = Counted().to(device)
    twin = eager_copy(model)
    make_graphed_callables(model)
    for step in range(3):
        mask = torch.rand(3, 1, device=device) < 0.3
        x = sample(device, requires_grad=True)
        seen = []
        for one in (model, twin):
            torch.manual_seed(step)
            seen.append([run(one, x, scale=2.0, mask=mask), torch.rand(2), dict(one.state_dict())])
        assert_bitwise_equal(*seen)
    assert (info(model)["forward_replays"], info(model)["backward_replays"]) == (3, 3)
    assert info(model)["eager_calls"] == {}


def test_calls_before_it_are_eager(device: str) -> None:
    model = mlp(device)
    twin = eager_copy(model)
    make_graphed_callables(model)
    x = sample(device)
    with torch.no_grad():
        assert_bitwise_equal(model(x), twin(x))
    model.eval()
    run(model, x)
    model.train()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert model(mode.from_tensor(x)).shape == (3, 5)
    with torch.inference_mode():
        model(x)
    assert info(model)["backend"] is None
    assert info(model)["eager_calls"] == {
        "called under no_grad, not captured yet": 2,
        "called in eval mode, not captured yet": 1,
        "called where operations are watched or captured, not captured yet": 1,
    }
    steps = [[(sample(device),)] for _ in range(2)]
    assert_bitwise_equal(train(model, steps), train(twin, steps))
    assert info(model)["forward_replays"] == 2


def test_shapes_on_meta_are_inferred_without_a_capture() -> None:
    model = make_graphed_callables(mlp("meta"))
    assert model(sample("meta")).shape == (3, 5)
    assert info(model)["backend"] is None


def test_another_capture_takes_it_as_it_is(device: str) -> None:
    inner = mlp(device)
    twin = eager_copy(inner)
    make_graphed_callables(inner)
    outer = make_graphed_callables(lambda x: inner(x) * 2, (sample(device, requires_grad=True),))
    x = sample(device, requires_grad=True)
    assert_bitwise_equal(run(outer, x), run(lambda x: twin(x) * 2, x))
    assert info(inner)["backend"] is None
    assert_bitwise_equal(run(inner, x), run(twin, x))
    assert info(inner)["forward_replays"] == 1


def test_each_of_several_is_captured_at_its_own_first_call(device: str) -> None:
    layers = [nn.Sequential(nn.Linear(7, 7), nn.Tanh()).to(device) for _ in range(3)]
    model = nn.Sequential(*layers)
    twin = eager_copy(model)
    make_graphed_callables(tuple(layers))
    run(layers[1], sample(device, requires_grad=True))
    assert [info(layer)["signatures"] for layer in layers] == [0, 1, 0]
    model.zero_grad()
    steps = [[(sample(device),), (sample(device),)] for _ in range(2)]
    assert_bitwise_equal(train(model, steps), train(twin, steps))
    assert [info(layer)["forward_replays"] for layer in layers] == [4, 5, 4]


def reading(x: Tensor) -> Tensor:  # [n, 7]
    return x * (2.0 if x.sum().item() > 1e9 else 1.0)


def test_a_capture_that_fails_raises_at_that_call_alone(device: str) -> None:
    graphed = make_graphed_callables(reading)
    x = sample(device, requires_grad=True)
    with pytest.raises(CaptureError, match=r"reading: .*\.item\(\)"):
        graphed(x)
    assert_bitwise_equal(run(graphed, x), run(reading, x))
    (reason,) = info(graphed)["eager_calls"]
    assert reason.startswith("the capture failed: ")


def test_a_capture_that_fails_stays_eager_if_that_is_wished(device: str, caplog: pytest.LogCaptureFixture) -> None:
    graphed = make_graphed_callables(reading, on_mismatch="eager")
    with caplog.at_level(logging.WARNING, "te_graph"):
        for _ in range(2):
            x = sample(device, requires_grad=True)
            assert_bitwise_equal(run(graphed, x), run(reading, x))
    (record,) = caplog.records
    assert "the capture failed: " in record.message


def test_later_calls_do_what_the_options_say(device: str) -> None:
    model, others = mlp(device), mlp(device)
    make_graphed_callables(model)
    make_graphed_callables(others, on_mismatch="capture")
    for one in (model, others):
        run(one, sample(device))
    with pytest.raises(ValueError, match="requires_grad=False, got requires_grad=True"):
        model(sample(device, requires_grad=True))
    run(others, sample(device, requires_grad=True))
    assert (info(others)["signatures"], info(others)["recaptures"]) == (2, 1)


def test_gradients_that_belong_into_main_grad_do_not_go_elsewhere(device: str) -> None:
    model = nn.Sequential(nn.Linear(7, 7)).to(device, torch.bfloat16)
    make_graphed_callables(model, grad_dtype=torch.float32)
    x = sample(device, torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"called in eval mode, .*instead of main_grad"):
        model.eval()(x)
    model.train()(x).sum().backward()
    assert all(p.grad is None and p.main_grad.dtype == torch.float32 for p in model.parameters())


def test_what_needs_samples_is_refused() -> None:
    layers = (nn.Linear(7, 7), nn.Linear(7, 7))
    with pytest.raises(ValueError, match=r"chain=True without sample_args: .*graph_layers"):
        make_graphed_callables(layers, chain=True)
    with pytest.raises(ValueError, match=r"sample_kwargs without sample_args: give sample_args=\(\)"):
        make_graphed_callables(layers, sample_kwargs=({}, {}))


def test_reset_ends_the_waiting_and_copies_are_eager(device: str) -> None:
    model = mlp(device)
    make_graphed_callables(model)
    assert not hasattr(eager_copy(model), "te_graph")
    handle = model.te_graph
    handle.reset()
    run(model, sample(device))
    assert handle.info()["signatures"] == 0
    assert type(model) is nn.Sequential


@pytest.mark.parametrize("has_grad", [True, False])
def test_a_weight_that_a_callable_uses_while_a_backward_of_another_one_is_due(
    device: str, caplog: pytest.LogCaptureFixture, has_grad: bool
) -> None:
    """As docs/limits.md says: where there is a gradient to add to, that backward adds one after the other."""
    layers = nn.ModuleList(nn.Linear(7, 7, device=device) for _ in range(2))
    layers[1].weight = layers[0].weight
    twins = eager_copy(layers)
    if has_grad:
        grad = torch.randn(7, 7, device=device)
        layers[0].weight.grad, twins[0].weight.grad = grad.clone(), grad
    make_graphed_callables(tuple(layers))
    with caplog.at_level(logging.WARNING, "te_graph"):
        for step in range(3):
            x = sample(device)
            for first, second in (layers, twins):
                second(first(x).tanh()).square().sum().backward()
            if step == 0 and has_grad:
                torch.testing.assert_close(layers[0].weight.grad, twins[0].weight.grad)
                twins[0].weight.grad = layers[0].weight.grad.clone()
            assert_bitwise_equal(layers[0].weight.grad, twins[0].weight.grad)
    assert caplog.text.count("is used by callable 1 (Linear) as well, captured since its forward") == has_grad
    assert info(layers[1])["backward_replays"] == 3
