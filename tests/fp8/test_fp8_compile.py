"""torch.compile around FP8 layers and regions: bit for bit as uncompiled, from the first call on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from tensor_lists import same_bits
from torch import Tensor, nn

import te_graph as tg
from te_graph.fp8.autocast import current_region

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH = 32
DELAYED, CURRENT = tg.DelayedScaling(amax_history_len=4), tg.Float8CurrentScaling()
backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def new_model(device: str, is_converted: bool = False) -> nn.Sequential:
    """Three layers, x [n, WIDTH] -> [n, WIDTH]."""
    torch.manual_seed(0)
    make = nn.Linear if is_converted else tg.Linear
    layers = [make(WIDTH, WIDTH, device=device, dtype=torch.bfloat16) for _ in range(3)]
    model = nn.Sequential(layers[0], nn.GELU(), layers[1], nn.Tanh(), layers[2])
    if is_converted:
        tg.convert_to_fp8(model, min_features=WIDTH)
    return model


def train(model: nn.Module, call: Callable[[Tensor, object], Tensor], recipes: list[object]) -> list[Tensor]:
    """Losses, gradients and weights of one step with each of ``recipes``, and the scales that they leave."""
    values, results = torch.Generator().manual_seed(1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for recipe in recipes:
        x = torch.randn(5, WIDTH, generator=values).to(model[0].weight).requires_grad_()
        loss = call(x, recipe)
        loss.backward()
        assert current_region() is None
        results += [loss.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    for layer in model:
        if isinstance(layer, tg.Linear):
            layer.fp8.update_if_due()
    return [*results, *model.parameters(), *tg.fp8_state_dict(model).values()]


def loss_of(model: nn.Module) -> Callable[[Tensor, object], Tensor]:
    def call(x: Tensor, recipe: object) -> Tensor:
        with tg.fp8_autocast(recipe=recipe):
            return model(x).float().square().mean()

    return call


@backends
@pytest.mark.parametrize("is_converted", [False, True], ids=["layers", "converted"])
@pytest.mark.parametrize(
    "recipes",
    [[DELAYED] * 4, [CURRENT] * 4, [CURRENT, DELAYED, DELAYED, CURRENT]],
    ids=["delayed", "current", "another recipe"],
)
def test_a_model_whose_first_call_is_compiled_trains_as_uncompiled(
    device: str, backend: str, is_converted: bool, recipes: list[object]
) -> None:
    model = new_model(device, is_converted)
    expected = train(model, loss_of(model), recipes)
    model = new_model(device, is_converted)
    compiled = torch.compile(model, backend=backend)
    assert all(map(same_bits, train(model, loss_of(compiled), recipes), expected))


def _region_inside(model: nn.Module, x: Tensor, recipe: object) -> Tensor:
    with tg.fp8_autocast(recipe=recipe):
        y = torch.tanh(model(x) * 2)
    return y.float().square().mean()


def _regions_in_each_other(model: nn.Module, x: Tensor, recipe: object) -> Tensor:
    with tg.fp8_autocast(recipe=recipe):
        y = model(x) * 2
        with tg.fp8_autocast(enabled=False):
            y = model(torch.tanh(y))
    return y.float().square().mean()


@tg.fp8_autocast(recipe=DELAYED)
def _decorated(model: nn.Module, x: Tensor, recipe: object) -> Tensor:
    return torch.tanh(model(x) * 2).float().square().mean()


@backends
@pytest.mark.parametrize("step", [_region_inside, _regions_in_each_other, _decorated])
def test_regions_in_compiled_code_are_entered_and_left(device: str, backend: str, step: Callable) -> None:
    model = new_model(device)
    expected = train(model, lambda x, recipe: step(model, x, recipe), [DELAYED] * 3)
    twin, compiled = new_model(device), torch.compile(step, backend=backend)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*te_graph.*")
        results = train(twin, lambda x, recipe: compiled(twin, x, recipe), [DELAYED] * 3)
    assert all(map(same_bits, results, expected))


def test_an_exception_in_compiled_code_leaves_the_region(device: str) -> None:
    def step(x: Tensor) -> Tensor:
        with tg.fp8_autocast(recipe=CURRENT):
            raise KeyError("x")

    with pytest.raises(KeyError):
        torch.compile(step, backend="eager")(torch.ones(2, device=device))
    assert current_region() is None


@pytest.mark.parametrize("is_converted", [False, True], ids=["layers", "converted"])
def test_many_layers_are_compiled_without_warnings(
    device: str, is_converted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Each would be a reason to compile again, of which torch allows eight."""
    make = nn.Linear if is_converted else tg.Linear
    model = nn.Sequential(*(make(WIDTH, WIDTH, device=device) for _ in range(12)))
    if is_converted:
        tg.convert_to_fp8(model, min_features=WIDTH)
    compiled, x = torch.compile(model, backend="eager"), torch.randn(5, WIDTH, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with tg.fp8_autocast(recipe=DELAYED):
                compiled(x).sum().backward()
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


@pytest.mark.parametrize("is_converted", [False, True], ids=["layers", "converted"])
@pytest.mark.parametrize("is_on", [False, True])
def test_a_graph_that_must_not_break_is_an_error_inside_of_regions_and_outside(is_converted: bool, is_on: bool) -> None:
    compiled = torch.compile(new_model("cpu", is_converted), backend="eager", fullgraph=True)
    words = "computes in FP8, .*: compile what is around it, without fullgraph=True"
    with tg.fp8_autocast(enabled=is_on, recipe=CURRENT), pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        compiled(torch.randn(5, WIDTH, dtype=torch.bfloat16))
