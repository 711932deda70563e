"""graphed(): whole optimizer steps, bit for bit what eager steps leave in parameters and state."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sequences import called, counts
from torch import Tensor, nn
from twins import mlp, sample

from te_graph import Fp8Weights, graphed
from te_graph.testing import assert_bitwise_equal

pytestmark = pytest.mark.usefixtures("repeatable")


def adamw(model: nn.Module, device: str, lr: Tensor | float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=device == "cuda", weight_decay=0.1)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float = 0.5) -> Callable[[], Tensor]:
    def step() -> Tensor:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, foreach=True)
        optimizer.step()
        return norm

    return step


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return [(p.detach(), p.grad, dict(optimizer.state.get(p, {}))) for p in model.parameters()]


class Twins:
    """A model with its optimizer, and copies of both that stay eager."""

    def __init__(self, device: str, make: Callable, lr: Callable[[], Tensor | float]) -> None:
        self.device = device
        self.models = [mlp(device)]
        self.models.append(copy.deepcopy(self.models[0]))
        self.optimizers = [make(model, device, lr()) for model in self.models]
        self.steps = [step_of(*both) for both in zip(self.models, self.optimizers, strict=True)]

    def backward(self, set_to_none: bool = False) -> None:
        x = sample(self.device)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            model(x).square().sum().backward()

    def assert_equal(self) -> None:
        states = [state_of(*both) for both in zip(self.models, self.optimizers, strict=True)]
        assert_bitwise_equal(states[0], states[1])


def test_adamw_with_a_clip_equals_eager_over_50_steps_of_changing_learning_rate(device: str) -> None:
    twins = Twins(device, adamw, lambda: torch.tensor(0.1, device=device))
    step = graphed(twins.steps[0])
    for number in range(50):
        for optimizer in twins.optimizers:
            optimizer.param_groups[0]["lr"].fill_(0.1 / (1 + number))
        twins.backward()
        assert_bitwise_equal(step().clone(), twins.steps[1]())
        twins.assert_equal()
    assert counts(step) == (1, 49, 0, 1)


def test_gradients_that_are_made_anew_are_followed(device: str) -> None:
    """Where they come to lie decides whether a call replays, not what it computes."""
    twins = Twins(device, adamw, lambda: torch.tensor(0.1, device=device))
    step = graphed(twins.steps[0])
    kept = []
    for number in range(20):
        twins.backward(set_to_none=True)
        if number % 3 == 0:
            kept.append([p.grad for p in twins.models[0].parameters()])
        assert_bitwise_equal(step().clone(), twins.steps[1]())
        twins.assert_equal()
    assert sum(counts(step)[1::2]) == 20


def scheduled(twins: Twins, schedule: Callable[[torch.optim.Optimizer], Any], count: int) -> Any:
    """The graphed step of the first of ``twins`` after ``count`` steps, each with one of a scheduler."""
    schedulers = [schedule(optimizer) for optimizer in twins.optimizers]
    # A scheduler has put its own step on the optimizer by now.
    step = graphed(step_of(twins.models[0], twins.optimizers[0]))
    for _ in range(count):
        twins.backward()
        assert_bitwise_equal(step().clone(), twins.steps[1]())
        for scheduler in schedulers:
            scheduler.step()
        twins.assert_equal()
    return step


def test_a_scheduler_of_float_learning_rates_captures_anew(device: str) -> None:
    twins = Twins(device, adamw, lambda: 0.1)
    step = scheduled(twins, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5), 12)
    assert counts(step) == (3, 9, 2, 3)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_scheduler_of_a_learning_rate_that_is_a_tensor_is_followed(
    device: str, kind: type[torch.optim.Optimizer]
) -> None:
    options = {"capturable": True} if device == "cuda" and kind is torch.optim.AdamW else {}
    make = lambda model, _, lr: kind(model.parameters(), lr=lr, fused=True, **options)  # noqa: E731
    twins = Twins(device, make, lambda: torch.tensor(0.1, device=device))
    step = scheduled(twins, lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5), 8)
    assert counts(step) == (1, 7, 0, 1)


def test_a_learning_rate_that_changes_at_every_step_is_never_captured(device: str) -> None:
    twins = Twins(device, adamw, lambda: 0.1)
    step = graphed(twins.steps[0])
    for number in range(12):
        for optimizer in twins.optimizers:
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        twins.backward()
        assert_bitwise_equal(step().clone(), twins.steps[1]())
        twins.assert_equal()
    assert counts(step) == (0, 0, 0, 12)


def test_a_float_learning_rate_that_changed_is_named(device: str) -> None:
    twins = Twins(device, adamw, lambda: 0.1)
    step = graphed(twins.steps[0], on_mismatch="raise")
    twins.backward()
    called(step, 3)
    twins.optimizers[0].param_groups[0]["lr"] = 0.05
    with pytest.raises(RuntimeError, match=r"step: .*param_groups\[0\]\['lr'\] changed from 0.1 to 0.05"):
        step()


def test_a_new_parameter_group_is_a_change(device: str) -> None:
    twins = Twins(device, adamw, lambda: 0.1)
    step = graphed(twins.steps[0])
    twins.backward()
    for _ in range(3):
        step(), twins.steps[1]()
    extra = torch.randn(3, device=device)
    extras = [nn.Parameter(extra.clone()) for _ in twins.models]
    for optimizer, parameter in zip(twins.optimizers, extras, strict=True):
        optimizer.add_param_group({"params": [parameter]})
        parameter.grad = torch.ones_like(parameter)
    for _ in range(3):
        step(), twins.steps[1]()
    twins.assert_equal()
    assert_bitwise_equal(extras[0], extras[1])
    assert counts(step) == (2, 4, 1, 2)


def test_loading_a_state_is_a_change(device: str) -> None:
    twins = Twins(device, adamw, lambda: torch.tensor(0.1, device=device))
    step = graphed(twins.steps[0])
    twins.backward()
    saved = []
    for number in range(8):
        step(), twins.steps[1]()
        if number == 2:
            saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in twins.optimizers]
        if number == 4:
            for optimizer, state in zip(twins.optimizers, saved, strict=True):
                optimizer.load_state_dict(state)
        twins.assert_equal()
    assert counts(step) == (2, 6, 1, 2)


def test_an_optimizers_step_itself_can_be_graphed(device: str) -> None:
    twins = Twins(device, adamw, lambda: torch.tensor(0.1, device=device))
    step = graphed(twins.optimizers[0].step)
    for _ in range(5):
        twins.backward()
        step(), twins.optimizers[1].step()
        twins.assert_equal()
    assert counts(step) == (1, 4, 0, 1)


def test_other_optimizers(device: str) -> None:
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=False),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
        lambda p: torch.optim.Adagrad(p, 0.1, fused=True) if device == "cpu" else torch.optim.SGD(p, 0.1),
        lambda p: torch.optim.RMSprop(p, 0.1, capturable=device == "cuda", foreach=device == "cuda", momentum=0.9),
    ]
    for number, kind in enumerate(kinds):
        twins = Twins(device, lambda model, _device, _lr, kind=kind: kind(model.parameters()), lambda: 0.1)
        step = graphed(twins.steps[0])
        for _ in range(6):
            twins.backward()
            step(), twins.steps[1]()
            twins.assert_equal()
        assert counts(step) == (1, 5, 0, 1), number


# All that take dense gradients and no closure.
KINDS = sorted(
    {kind for kind in vars(torch.optim).values() if isinstance(kind, type)}
    - {torch.optim.Optimizer, torch.optim.SparseAdam, torch.optim.LBFGS},
    key=lambda kind: kind.__name__,
)


def refusal_of(kind: type[torch.optim.Optimizer], device: str, **options: Any) -> str:
    """Why the step of an optimizer is not captured; empty where it is, and replays as it runs eagerly."""
    made = {name: value.clone() if isinstance(value, Tensor) else value for name, value in options.items()}
    models = [nn.Sequential(nn.Linear(7, 5, bias=False), nn.Linear(5, 2, bias=False)).to(device)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [kind(models[0].parameters(), **made), kind(models[1].parameters(), **options)]
    step = graphed(optimizers[0].step)
    for _ in range(5):
        x = sample(device)
        for optimizer, model in zip(optimizers, models, strict=True):
            optimizer.zero_grad(set_to_none=False)
            model(x).square().sum().backward()
        optimizers[1].step()
        try:
            step()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
        assert_bitwise_equal(*(state_of(*both) for both in zip(models, optimizers, strict=True)))
    raised = next((reason for reason in step.info()["eager_calls"] if reason.startswith("raised ")), "")
    assert counts(step) == ((0, 0, 0, 5) if raised else (1, 4, 0, 1))
    return raised


@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_each_of_torchs_optimizers_replays_or_is_refused_with_what_helps(
    device: str, kind: type[torch.optim.Optimizer], is_tensor: bool
) -> None:
    options = {"lr": torch.tensor(0.01, device=device) if is_tensor else 0.01}
    refusal = refusal_of(kind, device, **options)
    if found := re.search(rf"{kind.__name__}\((\w+)=True\) can be captured|(capturable) is False", refusal):
        assert refusal_of(kind, device, **options, **{found[1] or found[2]: True}) == ""
    elif "give a number" in refusal:
        refusal = refusal_of(kind, device, lr=0.01)
        assert refusal == "" or refusal.endswith("leave it outside")
    else:
        # torch asks Adafactor for an option that it has not, in captures on GPUs.
        assert refusal == "" or refusal.startswith("raised KeyError") or refusal.endswith("leave it outside")


def scaled_step(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, updates: bool) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    if updates:
        scaler.update()


def test_a_step_and_update_of_a_grad_scaler_skip_what_is_not_finite(device: str) -> None:
    twins = Twins(device, adamw, lambda: 0.1)
    scalers = [torch.amp.GradScaler(device, init_scale=4.0) for _ in twins.models]
    step = graphed(scaled_step)
    for number in range(6):
        x = sample(device)
        for model, optimizer, scaler, run in zip(
            twins.models, twins.optimizers, scalers, (step, scaled_step), strict=True
        ):
            optimizer.zero_grad(set_to_none=False)
            scaler.scale(model(x).square().sum() * (torch.inf if number == 3 else 1)).backward()
            run(optimizer, scaler, True)
        twins.assert_equal()
    assert [scaler.get_scale() for scaler in scalers] == [2.0, 2.0]
    assert step.info()["forward_replays"] >= 4


def test_a_step_of_a_grad_scaler_that_cannot_be_captured_is_refused_with_advice(device: str) -> None:
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=False)
    scaler = torch.amp.GradScaler(device)
    step = graphed(scaled_step)
    with pytest.raises(RuntimeError, match=r"_local_scalar_dense.*; SGD\(fused=True\) can be captured"):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            scaler.scale(model(sample(device)).square().sum()).backward()
            step(optimizer, scaler, True)


def test_a_step_of_a_grad_scaler_without_its_update_runs_eagerly_with_advice(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler(device)
    step = graphed(scaled_step)
    with caplog.at_level(logging.WARNING, logger="te_graph"):
        for _ in range(6):
            optimizer.zero_grad(set_to_none=False)
            scaler.scale(model(sample(device)).square().sum()).backward()
            step(optimizer, scaler, False)
            scaler.update()
    assert step.info()["forward_replays"] == 0
    assert "change Python objects" in caplog.text
    assert "a GradScaler's step and update belong into one function" in caplog.text


def test_a_step_that_calls_a_closure_is_refused_with_advice(device: str) -> None:
    model, x = mlp(device), sample(device)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def loss() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        value = model(x).square().sum()
        value.backward()
        return value

    step = graphed(lambda: optimizer.step(loss))
    step()
    with pytest.raises(RuntimeError, match="no option lets a step of LBFGS be captured: leave it outside"):
        called(step, 3)


def test_a_step_counted_on_the_host_is_refused(device: str) -> None:
    model = mlp(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    step = graphed(optimizer.step)
    model(sample(device)).sum().backward()
    step()
    before = copy.deepcopy(state_of(model, optimizer))
    with pytest.raises(RuntimeError, match=r"^AdamW\.step: .*(_local_scalar_dense|capturable)"):
        step()
    assert_bitwise_equal(state_of(model, optimizer), before)


def test_forward_backward_and_step_in_one(device: str) -> None:
    twins = Twins(device, adamw, lambda: torch.tensor(0.1, device=device))
    x = sample(device)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
        loss = model(batch).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    graphed_train = graphed(train)
    for _ in range(6):
        x.copy_(sample(device))
        losses = [
            one(model, optimizer, x)
            for one, model, optimizer in zip((graphed_train, train), twins.models, twins.optimizers, strict=True)
        ]
        assert_bitwise_equal(losses[0].clone(), losses[1])
        twins.assert_equal()
    assert counts(graphed_train) == (1, 5, 0, 1)


step = 0  # the loop variable of a script
LR = 0.1


def test_a_global_of_an_attributes_name_is_no_part_of_the_signature(device: str) -> None:
    global step, LR
    model = mlp(device)
    optimizer = adamw(model, device, torch.tensor(0.1, device=device))
    update = graphed(lambda: optimizer.step() or LR)
    model(sample(device)).sum().backward()
    for step in range(5):  # noqa: B007 (that it changes is what is tested)
        assert update() == LR
    assert counts(update) == (1, 4, 0, 1)
    LR = 0.2
    assert update() == LR
    assert counts(update) == (1, 4, 1, 2)


def test_hooks_of_te_graphs_own_concern_no_capture(device: str) -> None:
    """Prepared FP8 weights are told of each step by a hook of all optimizers, which keeps notes."""
    parameter = nn.Parameter(torch.randn(16, 16, device=device))
    weights = Fp8Weights([parameter])
    optimizer, others = torch.optim.SGD([parameter], 0.1), []
    step = graphed(optimizer.step)
    parameter.grad = torch.ones_like(parameter)
    for _ in range(6):
        other = nn.Parameter(torch.zeros(1, device=device))
        other.grad = torch.ones_like(other)
        others.append(torch.optim.SGD([other], 0.1))
        others[-1].step()
        before = parameter._version
        step()
        assert parameter._version > before
    assert counts(step) == (1, 5, 0, 1)
    assert weights.weights


def test_a_step_that_trains_after_an_evaluation_runs_eagerly_there(device: str) -> None:
    def run(graph: Callable[[Callable], Callable]) -> list[Tensor]:
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 4).to(device)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        x = torch.randn(8, 4, device=device)

        def step() -> Tensor:  # -> []
            net.train()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return loss.detach()

        losses, step = [], graph(step)
        for _ in range(4):
            losses += [step().clone() for _ in range(4)]
            net.eval()
        steps.append(step)
        return losses

    steps: list[Any] = []
    assert_bitwise_equal(run(graphed), run(lambda step: step))
    assert counts(steps[0])[1] >= 9
