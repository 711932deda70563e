"""Where code runs for its shapes alone, under FakeTensorMode and torch.export, FP8 layers keep nothing of it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable", "one_thread")
WIDTH = 32
DELAYED, CURRENT = tg.DelayedScaling(amax_history_len=3), tg.Float8CurrentScaling()
RECIPES = pytest.mark.parametrize("recipe", [DELAYED, CURRENT], ids=["delayed", "current"])
REFUSAL = r"^te_graph\.Linear: expected a call outside of fp8_autocast where torch\.export or make_fx traces"
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: tg.Linear(WIDTH, WIDTH),
    "LayerNormLinear": lambda: tg.LayerNormLinear(WIDTH, WIDTH),
    "LayerNormMLP": lambda: tg.LayerNormMLP(WIDTH, 2 * WIDTH),
    "TransformerLayer": lambda: tg.TransformerLayer(WIDTH, 2 * WIDTH, 2, hidden_dropout=0, attention_dropout=0),
}


class Training:
    """A model, x [n, 2, WIDTH] -> [n, 2, WIDTH], step by step."""

    def __init__(self, kind: str, recipe: object, device: str) -> None:
        torch.manual_seed(0)
        self.recipe, self.model = recipe, nn.Sequential(LAYERS[kind](), LAYERS[kind]()).to(device)
        self._values = torch.Generator().manual_seed(1)
        self.results: list[Tensor] = []

    def step(self) -> None:
        x = torch.randn(16, 2, WIDTH, generator=self._values).to(next(self.model.parameters()).device)
        loss = loss_of(self.model, x, self.recipe)
        loss.backward()
        self.results += [loss.detach(), *(parameter.grad.clone() for parameter in self.model.parameters())]
        self.model.zero_grad()


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, recipe: object) -> Tensor:  # [n, 2, WIDTH] -> []
    with tg.fp8_autocast(recipe=recipe):
        return model(x).square().mean()


def of_fakes(kind: str, training: Training, device: str) -> None:
    """A step of another model, all in the mode."""
    with FakeTensorMode(), torch.device(device):
        model, x = LAYERS[kind](), torch.randn(16, 2, WIDTH, requires_grad=True)
        loss_of(model, x, training.recipe).backward()
        with torch.no_grad():
            loss_of(model, x, training.recipe)
    assert x.grad.shape == x.shape
    assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


def of_real_weights(kind: str, training: Training, device: str) -> None:
    """A forward of the model itself, whose weights are taken for fakes."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = training.model(mode.from_tensor(torch.randn(16, 2, WIDTH, device=device)))
        loss_of(training.model, mode.from_tensor(torch.randn(16, 2, WIDTH, device=device)), training.recipe)
    assert y.shape == (16, 2, WIDTH)


def of_given_weights(kind: str, training: Training, device: str) -> None:
    """A step of the model itself, with fakes for its weights."""
    with FakeTensorMode() as mode:
        given = {name: mode.from_tensor(parameter) for name, parameter in training.model.named_parameters()}
        x = mode.from_tensor(torch.randn(16, 2, WIDTH, device=device))
        loss_of(lambda x: functional_call(training.model, given, (x,)), x, training.recipe).backward()


def inside_a_region(kind: str, training: Training, device: str) -> None:
    """The mode is in the region, whose end is outside."""
    with tg.fp8_autocast(recipe=training.recipe), FakeTensorMode(), torch.device(device):
        LAYERS[kind]()(torch.randn(16, 2, WIDTH)).mean().backward()


def copied(kind: str, training: Training, device: str) -> None:
    """And loaded from a state that has no values."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        copy.deepcopy(training.model)
        other = LAYERS[kind]()
        other.load_state_dict(other.state_dict())


@RECIPES
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("runs", [of_fakes, of_real_weights, of_given_weights, inside_a_region, copied])
def test_a_training_goes_on_as_if_shapes_had_not_been_asked_for(
    device: str, recipe: object, kind: str, runs: Any
) -> None:
    found = []
    for has_fakes in (False, True):
        training = Training(kind, recipe, device)
        for _ in range(3):
            if has_fakes:
                runs(kind, training, device)
            training.step()
        found.append([*training.results, *tg.fp8_state_dict(training.model).values()])
    assert all(map(same_bits, *found))


@pytest.mark.parametrize("kind", LAYERS)
def test_shapes_and_dtypes_are_those_of_fp8(device: str, kind: str) -> None:
    def call() -> Tensor:
        with torch.device(device), tg.fp8_autocast(recipe=CURRENT), torch.autocast(device, torch.bfloat16):
            return LAYERS[kind]()(torch.randn(16, 2, WIDTH))

    real = call()
    with FakeTensorMode():
        fake = call()
    assert (fake.shape, fake.dtype, fake.device.type) == (real.shape, real.dtype, real.device.type)


def test_updates_that_are_due_wait_for_the_next_call(device: str) -> None:
    layer, x = tg.Linear(WIDTH, WIDTH, device=device), torch.randn(16, WIDTH, device=device)
    with pytest.raises(KeyError), tg.fp8_autocast(recipe=DELAYED):
        layer(x)
        raise KeyError
    before = layer.get_extra_state()
    with FakeTensorMode(), tg.fp8_autocast(recipe=DELAYED):
        tg.Linear(WIDTH, WIDTH)(torch.randn(16, WIDTH))
    assert same_bits(layer.get_extra_state(), before)
    with tg.fp8_autocast(recipe=DELAYED):
        layer(x)
    assert not same_bits(layer.get_extra_state(), before)


def test_regions_of_shapes_alone_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # layers of other tests
    with caplog.at_level("WARNING", "te_graph"), tg.fp8_autocast(recipe=tg.DelayedScaling(margin=7)), FakeTensorMode():
        tg.Linear(WIDTH, WIDTH)(torch.randn(16, WIDTH))
    assert not caplog.records


class InRegion(nn.Module):
    """x [n, WIDTH] -> [n, WIDTH], in a region of its own."""

    def __init__(self, device: str, region: Callable[[], Any]) -> None:
        super().__init__()
        self.layer, self._region = tg.Linear(WIDTH, WIDTH, device=device), region

    def forward(self, x: Tensor) -> Tensor:
        with self._region():
            return self.layer(x)


TRACES = {
    "export": lambda model, x: torch.export.export(model, (x,), strict=False),
    "make_fx": lambda model, x: make_fx(model, tracing_mode="fake", _allow_non_fake_inputs=True)(x),
}


@RECIPES
@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
@pytest.mark.parametrize("calls_before", [False, True])
def test_programs_in_fp8_are_refused_by_name_and_leave_nothing(
    device: str, recipe: object, trace: Any, calls_before: bool
) -> None:
    found = []
    for is_traced in (False, True):
        torch.manual_seed(0)
        model, x = InRegion(device, lambda: tg.fp8_autocast(recipe=recipe)), torch.randn(16, WIDTH, device=device)
        for number in range(4):
            if is_traced and (number or not calls_before):
                with pytest.raises(RuntimeError, match=REFUSAL):
                    trace(model, x)
            loss = model(x * (number + 1)).square().mean()
            loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters()), model.layer.get_extra_state()])
        del model.layer  # torch.export keeps models that raise
    assert all(map(same_bits, *found))


def test_programs_in_high_precision_are_exported(device: str) -> None:
    model, x = InRegion(device, lambda: tg.fp8_autocast(enabled=False)), torch.randn(16, WIDTH, device=device)
    with tg.fp8_autocast(recipe=DELAYED):
        model.layer(x).mean().backward()
        program = torch.export.export(model, (x,), strict=False).module()
    assert same_bits(program(x), F.linear(x, model.layer.weight, model.layer.bias))
