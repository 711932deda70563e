"""Graphs of FP8 layers: bit-equal to eager, whatever is graphed, and right in equal regions alone."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp8_comparisons import check_programs
from fp8_programs import Program
from tensor_lists import same_bits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import te_graph as tg

pytestmark = pytest.mark.usefixtures("repeatable")
WIDTH = 32
RECIPES = {"delayed": tg.DelayedScaling(amax_history_len=3), "current": tg.Float8CurrentScaling()}
recipes = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


class Layer(nn.Module):
    """x [n, WIDTH] -> [n, WIDTH]."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, device=device, dtype=torch.bfloat16)
        self.up = tg.Linear(WIDTH, 2 * WIDTH, device=device, dtype=torch.bfloat16)
        self.down = tg.Linear(2 * WIDTH, WIDTH, device=device, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def new_layers(device: str, count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(device) for _ in range(count)))


def a_sample(device: str) -> Tensor:
    return torch.randn(5, WIDTH, device=device, dtype=torch.bfloat16).requires_grad_()


def train(model: nn.Module, recipe: object, device: str, microbatches: int) -> list[Tensor]:
    """Losses, gradients of inputs, weights and FP8 states of 3 steps."""
    values, results = torch.Generator().manual_seed(1), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        for _ in range(microbatches):
            x = torch.randn(5, WIDTH, generator=values).to(device, torch.bfloat16).requires_grad_()
            with tg.fp8_autocast(recipe=recipe):
                loss = model(x).float().square().mean()
            loss.backward()
            results += [loss.detach(), x.grad]
        results += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *model.parameters(), *tg.fp8_state_dict(model).values()]


@recipes
@pytest.mark.parametrize(
    "microbatches", [1, pytest.param(2, marks=pytest.mark.full), 4, pytest.param(8, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("graphed", ["all", "chain", "every second one", "the whole"])
@pytest.mark.one_of(3)
def test_trainings_are_bit_equal(device: str, recipe: object, microbatches: int, graphed: str) -> None:
    expected = train(new_layers(device), recipe, device, microbatches)
    model = new_layers(device)
    parts = {"every second one": tuple(model[1::2]), "the whole": (model,)}.get(graphed, tuple(model))
    with tg.fp8_autocast(recipe=recipe):
        tg.make_graphed_callables(parts, tuple((a_sample(device),) for _ in parts), chain=graphed == "chain")
    assert all(map(same_bits, train(model, recipe, device, microbatches), expected))
    assert [part.te_graph.info()["forward_replays"] for part in parts] == [3 * microbatches] * len(parts)


@recipes
def test_a_function_that_trains_is_bit_equal(device: str, recipe: object) -> None:
    """One graph of a region, a backward and a step of the optimizer, which changes the weights inside."""
    results = []
    for graphed in (False, True):
        model, losses = new_layers(device, 2), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        static, values = a_sample(device).detach(), torch.Generator().manual_seed(2)

        def step(model: nn.Module = model, optimizer: Any = optimizer, static: Tensor = static) -> Tensor:
            with tg.fp8_autocast(recipe=recipe):
                loss = model(static).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return loss.detach()

        call = tg.graphed(step) if graphed else step
        for _ in range(6):
            static.copy_(torch.randn(5, WIDTH, generator=values))
            losses.append(call().clone())
        results.append([*losses, *model.parameters()])
        if graphed:
            assert call.info()["forward_replays"] >= 4
    assert all(map(same_bits, *results))


def test_a_capture_leaves_scales_and_casts_as_they_were(device: str) -> None:
    recipe, model = RECIPES["delayed"], new_layers(device, 2)
    for turn in range(2):
        before = [state[:, 2:] for state in tg.fp8_state_dict(model).values()]
        with tg.fp8_autocast(recipe=recipe):
            tg.make_graphed_callables(tuple(model), tuple((a_sample(device),) for _ in model))
        after = [state[:, 2:] for state in tg.fp8_state_dict(model).values()]
        assert all(map(same_bits, before, after))
        with tg.fp8_autocast(recipe=recipe):
            model(a_sample(device)).float().sum().backward()
        for layer in model:
            layer.te_graph.reset()
            for linear in (layer.up, layer.down):
                linear.fp8.update_if_due()
        assert turn or tg.fp8_state_dict(model)["0.up"][0, 8 + 2] > 0


def calls(model: nn.Module, device: str, region: Any) -> Tensor:
    with region:
        return model(a_sample(device))


@pytest.mark.parametrize(
    ("captured", "called", "message"),
    [
        ({"recipe": RECIPES["delayed"]}, None, "te_graph.fp8_autocast was left since capture"),
        (
            {"recipe": RECIPES["delayed"]},
            {"enabled": False},
            "an argument of te_graph.fp8_autocast (enabled, calibrating, recipe, amax_reduction_group) changed",
        ),
        (None, {"recipe": RECIPES["delayed"]}, "te_graph.fp8_autocast was entered since capture"),
        (
            {"recipe": RECIPES["delayed"]},
            {"recipe": RECIPES["current"]},
            "an argument of te_graph.fp8_autocast (enabled, calibrating, recipe, amax_reduction_group) changed",
        ),
        (
            {"recipe": RECIPES["delayed"]},
            {"recipe": tg.DelayedScaling(margin=3)},
            "an argument of te_graph.fp8_autocast (enabled, calibrating, recipe, amax_reduction_group) changed",
        ),
    ],
)
def test_other_regions_are_mismatches(device: str, captured: Any, called: Any, message: str) -> None:
    def region(options: Any) -> Any:
        return tg.fp8_autocast(**options) if options is not None else torch.enable_grad()

    model = new_layers(device, 1)
    with region(captured):
        tg.make_graphed_callables(model[0], (a_sample(device),))
    calls(model, device, region(captured))
    with pytest.raises(RuntimeError, match=re.escape(message)):
        calls(model, device, region(called))
    if captured is not None:
        calls(model, device, tg.fp8_autocast(recipe=tg.DelayedScaling(amax_history_len=3)))
    assert model[0].te_graph.info()["forward_replays"] == 1 + (captured is not None)


@pytest.mark.parametrize("capture", [tg.make_graphed_callables, tg.graph_layers])
def test_a_calibration_is_refused_in_a_capture(device: str, capture: Callable) -> None:
    def region() -> tg.fp8_autocast:
        return tg.fp8_autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"])

    model, x = new_layers(device, 2), a_sample(device)
    with region():
        model(x)
    before = tg.fp8_state_dict(model)
    with pytest.raises(RuntimeError, match="calibrate before the capture"), region():
        capture(model, (x,))
    assert all(map(same_bits, tg.fp8_state_dict(model).values(), before.values()))
    with region():
        model(x)


def test_layers_without_fp8_do_not_mind_regions(device: str) -> None:
    layer = nn.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)
    tg.make_graphed_callables(layer, (a_sample(device),))
    calls(layer, device, tg.fp8_autocast())
    assert layer.te_graph.info()["forward_replays"] == 1


def test_evaluation_of_a_graphed_layer_is_pure(device: str) -> None:
    recipe, model = RECIPES["delayed"], new_layers(device, 2)
    with tg.fp8_autocast(recipe=recipe):
        tg.make_graphed_callables(tuple(model), tuple((a_sample(device),) for _ in model))
        model(a_sample(device)).float().sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    before, x = tg.fp8_state_dict(model), a_sample(device).detach()
    with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
        y = model(x)
    assert all(map(same_bits, tg.fp8_state_dict(model).values(), before.values()))
    twin = new_layers(device, 2)
    twin.load_state_dict(model.state_dict())
    with torch.no_grad(), tg.fp8_autocast(recipe=recipe):
        assert same_bits(twin(x), y)


@pytest.mark.parametrize("pending", range(4))
def test_casts_of_one_graph_are_all_noted(device: str, pending: int) -> None:
    """Where one of them was made since its last update, too."""
    recipe, results = RECIPES["delayed"], []
    for graphed in (False, True):
        model, values = new_layers(device, 2), torch.Generator().manual_seed(3)
        linears = [linear for layer in model for linear in (layer.up, layer.down)]
        if graphed:
            with tg.fp8_autocast(recipe=recipe):
                tg.make_graphed_callables(model, (a_sample(device),))
        for _ in range(3):
            with contextlib.suppress(KeyError), tg.fp8_autocast(recipe=recipe):
                x = torch.randn(5, linears[pending].in_features, generator=values).to(device, torch.bfloat16)
                linears[pending](x)
                raise KeyError
            with tg.fp8_autocast(recipe=recipe):
                for _ in range(2):
                    x = torch.randn(5, WIDTH, generator=values).to(device, torch.bfloat16).requires_grad_()
                    model(x).float().square().mean().backward()
        for linear in linears:
            linear.fp8.update_if_due()
        results.append([*tg.fp8_state_dict(model).values(), *(parameter.grad for parameter in model.parameters())])
    assert all(map(same_bits, *results))


@pytest.mark.usefixtures("one_thread")
def test_random_trainings_are_bit_equal(device: str) -> None:
    check_programs(Program, "FP8 programs", device, count=30, most_seconds=5)


class Twice(nn.Module):
    """x [n, WIDTH] -> [n, WIDTH]; one layer called twice, whose scales are updated in between, inside the graph."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.shared = tg.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.shared(x)))


@pytest.mark.parametrize("chain", [False, True], ids=["apart", "chain"])
def test_scales_that_were_loaded_are_those_of_the_first_replay(device: str, chain: bool) -> None:
    def new_model() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList([Twice(device), tg.Linear(WIDTH, WIDTH, device=device, dtype=torch.bfloat16)])

    def step(model: nn.ModuleList, x: Tensor) -> Tensor:
        with tg.fp8_autocast(recipe=RECIPES["delayed"]):
            y = model[1](model[0](x))
        y.float().square().mean().backward()
        return y.detach().clone()

    trained, graphed, x = new_model(), new_model(), a_sample(device)
    for _ in range(3):
        step(trained, x)
    graphed.load_state_dict(trained.state_dict())
    graphed.zero_grad()
    trained.zero_grad()
    with tg.fp8_autocast(recipe=RECIPES["delayed"]):
        tg.make_graphed_callables(tuple(graphed), ((x,),) if chain else ((x,), (x,)), chain=chain)
    for _ in range(3):
        assert same_bits(step(graphed, x), step(trained, x))
    assert all(map(same_bits, (p.grad for p in graphed.parameters()), (p.grad for p in trained.parameters())))


def test_reports_say_what_was_captured_in_fp8(device: str) -> None:
    layers = [nn.Sequential(nn.LayerNorm(32), tg.Linear(32, 32), tg.Linear(32, 32)).to(device) for _ in range(2)]
    model, x = nn.Sequential(*layers), torch.randn(4, 32, device=device, requires_grad=True)
    for enabled, calls in ((True, 2), (False, 0)):
        with tg.fp8_autocast(enabled=enabled):
            report = tg.graph_layers(model, (x,))
            graphed = tg.graphed(lambda: model[0][1](x.detach()).detach())
            for _ in range(3):
                graphed()
        assert [layer.te_graph.info()["fp8_calls"] for layer in layers] == [calls] * 2
        assert (report.fp8, "2 in FP8" in str(report)) == (calls, bool(calls))
        assert ("2 FP8 layers" in repr(layers[0].te_graph)) == bool(calls)
        assert graphed.info()["fp8_calls"] == calls // 2
        report.reset()


@pytest.mark.gpu
@recipes
def test_backwards_of_a_chain_are_launched_together(recipe: object) -> None:
    """The layers share tables of scales, and no column of them."""
    model, seen = new_layers("cuda", 5), []
    with tg.fp8_autocast(recipe=recipe):
        tg.make_graphed_callables(tuple(model), (a_sample("cuda"),), chain=True)
    for _ in range(5):
        with tg.fp8_autocast(recipe=recipe):
            loss = model(a_sample("cuda")).float().square().mean()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
            loss.backward()
            torch.cuda.synchronize()
        seen.append(sum(event.name.startswith("cudaGraphLaunch") for event in profiler.events()))
    assert seen[-2:] == [2, 2], seen
