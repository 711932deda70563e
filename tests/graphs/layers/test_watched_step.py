"""The step that graph_layers runs: once, for real, and the model is afterwards as it was, whatever happens."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from blocks import Block, InTurn, batch
from torch import Tensor, nn
from twins import eager_copy, run, snapshot

import te_graph as tg
from te_graph.graphs.layers import layer_captures
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")


class Eventful(InTurn):
    """Counts, draws, keeps, and has a buffer."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.norm = nn.BatchNorm1d(6)
        self.calls, self.kept = 0, {}

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        self.calls += 1
        self.kept.setdefault("first", x)
        return super().forward(self.norm(x) * random.random() + torch.rand(1, device=x.device))


def eventful(device: str) -> nn.Module:
    model = Eventful(Block(), Block()).to(device)
    model(batch(device)).sum().backward()
    model.kept.clear()
    return model


def state_of(model: nn.Module) -> list:
    return [snapshot(model), random.getstate(), model.calls, list(model.kept)]


def test_the_step_runs_once_and_leaves_the_model_as_it_was(device: str) -> None:
    model, losses = eventful(device), []

    def step() -> None:
        model.zero_grad()
        losses.append(model(batch(device)).square().mean())
        losses[-1].backward()
        model.last.requires_grad_(False)
        model.train(False).train()

    before = [random.getstate(), torch.get_rng_state(), model.calls]
    grads = [(p.grad, p.grad.clone()) for p in model.parameters()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    tg.graph_layers(model, step)
    assert len(losses) == 1
    assert_bitwise_equal([random.getstate(), torch.get_rng_state(), model.calls], before)
    assert model.kept == {}
    assert all(p.grad is grad for p, (grad, _) in zip(model.parameters(), grads, strict=True))
    assert_bitwise_equal([grad for grad, _ in grads], [value for _, value in grads])
    assert_bitwise_equal(dict(model.state_dict()), values)
    assert model.last.weight.requires_grad


class Trainer:
    """Has a model, and a weak proxy of it."""

    def __init__(self, model: nn.Module) -> None:
        self.strategy = SimpleNamespace(model=model, seen=[])
        self.proxy = weakref.proxy(model)


def test_what_has_the_model_is_left_alone_though_the_model_leads_to_it(device: str) -> None:
    model = InTurn(Block(), Block()).to(device)
    model.trainer = Trainer(model)
    model.proxies = [weakref.proxy(model), weakref.proxy(Trainer(model))]  # the last is dead

    def step() -> None:
        model(batch(device)).sum().backward()
        model.trainer.strategy.seen.append(1)

    assert tg.graph_layers(model, step).layers == ("layers.0", "layers.1")
    assert model.trainer.strategy.seen == [1]


def failing_steps(model: nn.Module, device: str) -> dict[str, tuple]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def with_optimizer() -> None:
        model(batch(device)).sum().backward()
        optimizer.step()

    def with_changes() -> None:
        model(batch(device)).sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad

    def with_an_error() -> None:
        model(batch(device)).sum().backward()
        raise KeyError("of the user")

    return {
        "optimizer": (with_optimizer, RuntimeError, r"the step calls SGD\.step\(\), .*lambda: loss_fn"),
        "changes": (with_changes, RuntimeError, r"the step changes first\.weight \(aten\.sub_"),
        "error": (with_an_error, KeyError, "of the user"),
        "nothing": (lambda: None, RuntimeError, "found no layers: expected two or more modules of one class"),
    }


@pytest.mark.parametrize("why", ["optimizer", "changes", "error", "nothing"])
def test_a_step_that_fails_leaves_everything_as_it_was(device: str, why: str) -> None:
    model = eventful(device)
    step, kind, words = failing_steps(model, device)[why]
    before = state_of(model)
    with pytest.raises(kind, match=words):
        tg.graph_layers(model, step)
    assert_bitwise_equal(state_of(model), before)
    model(batch(device)).sum().backward()  # nothing of the watch is left


def test_activations_of_the_step_are_gone_before_the_first_capture(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: list[int] = []
    made: list = []
    capture = layer_captures.capture_and_install

    def seen(*args: object, **options: object) -> object:
        alive.append(sum(reference() is not None for reference in made))
        return capture(*args, **options)

    monkeypatch.setattr(layer_captures, "capture_and_install", seen)
    model = InTurn(Block(), Block()).to(device)
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, result: made.append(weakref.ref(result)) if not alive else None
    )
    try:
        tg.graph_layers(model, lambda: model(batch(device)).sum().backward())
    finally:
        hook.remove()
    assert len(made) > 6
    assert alive == [0]


class Drawing(InTurn):
    """Changes tensors that are no buffers, a list in a tuple, and draws from generators of its own."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.steps, self.history = torch.zeros(1), {"all": [torch.zeros(2)]}
        self.pair = ([0], "kept")
        self.own, self.generator = random.Random(1), torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        self.steps += 1
        self.history["all"][0].add_(1)
        self.pair[0][0] += 1
        self.last.weight.average.lerp_(self.last.weight[0].detach(), 0.1)
        return super().forward(x * self.own.random() + torch.rand(1, generator=self.generator)) * self.steps


def test_other_tensors_and_generators_of_the_model_are_put_back() -> None:
    torch.manual_seed(1)
    model = Drawing(Block(), Block())
    twin = eager_copy(model)
    for each in (model, twin):
        each.last.weight.average = torch.zeros(6)
    tg.graph_layers(model, (batch("cpu"),))
    x = batch("cpu")
    assert_bitwise_equal(run(model, x), run(twin, x))
    seen = [[one.steps, one.history, one.pair, one.last.weight.average] for one in (model, twin)]
    assert_bitwise_equal(*seen)


def test_gradients_of_leaves_beside_the_model_are_put_back(device: str) -> None:
    model, scale, shift = InTurn(Block(), Block()).to(device), nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))
    shift.grad = torch.full((6,), 3.0)
    kept = shift.grad
    tg.graph_layers(model, lambda: (model(batch(device)).cpu() * scale + shift).sum().backward())
    assert scale.grad is None and shift.grad is kept
    assert_bitwise_equal(kept, torch.full((6,), 3.0))


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # [n, 6], [6]
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)


class Twice(nn.Module):
    """Uses a weight twice that others use as well."""

    def __init__(self, w: nn.Parameter, times: Callable) -> None:
        super().__init__()
        self.linear, self.w, self.times = nn.Linear(6, 6), w, times

    def forward(self, x: Tensor) -> Tensor:  # [n, 6]
        return self.times(torch.tanh(self.times(self.linear(x), self.w)), self.w)


def cast_and_multiply(x: Tensor, w: Tensor) -> Tensor:  # [n, 6], [6]
    return (x.bfloat16() * w.to(torch.bfloat16)).float()


@pytest.mark.parametrize("times", [torch.mul, Times.apply, cast_and_multiply], ids=["op", "function", "cast"])
def test_layers_that_use_a_shared_weight_several_times_stay_eager(times: Callable) -> None:
    w = nn.Parameter(torch.randn(6))
    model = InTurn(Block(), Block(), Twice(w, times), Twice(w, times))
    twin = eager_copy(model)
    report = tg.graph_layers(model, (batch("cpu"),), layers=[Block, Twice])
    assert len(report.layers) == 2 and all("several times" in why for why in report.left_out.values())
    for _ in range(4):
        x = batch("cpu")
        assert_bitwise_equal(run(model, x), run(twin, x))
    assert_bitwise_equal(*(dict(one.named_parameters()) for one in (model, twin)))
    assert_bitwise_equal(*({n: p.grad for n, p in one.named_parameters()} for one in (model, twin)))
